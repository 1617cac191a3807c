"""A plugin of pytest: under xdist, tests that share a fixture run in one worker, and the slowest tests run first.

``--dist loadgroup`` does not read the groups of pytest 9.2 (xdist 3.8).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_SECONDS: defaultdict[str, float] = defaultdict(float)  # of the tests of this session, by their parts
_CACHED = "compile_callbacks/seconds"


@functools.cache
def _has_shared_fixture(file: str) -> bool:
    path = Path(file)
    return path.suffix == ".py" and path.is_file() and 'scope="module"' in path.read_text()


def _part(nodeid: str) -> str:
    """The tests that one worker gets together: those of a file, or one test."""
    file = nodeid.partition("::")[0]
    return file if _has_shared_fixture(file) else nodeid


class _ByPart(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return _part(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByPart(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        seconds = config.cache.get(_CACHED, {}) if hasattr(config, "cache") else {}
        items.sort(key=lambda item: -seconds.get(_part(item.nodeid), 0.0))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _SECONDS[_part(report.nodeid)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "cache") and not hasattr(config, "workerinput"):
        config.cache.set(_CACHED, {**config.cache.get(_CACHED, {}), **_SECONDS})
