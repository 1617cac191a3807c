"""Hooks of pytest: under xdist, tests that share a fixture run in one worker, and the slowest tests run first."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

_SECONDS: Counter[str] = Counter()  # of the tests of this session, by the parts that xdist gives to a worker


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        if _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(_file(item.nodeid)))
    cache = getattr(config, "cache", None)
    seconds = cache.get("compile_callbacks/seconds", {}) if cache else {}
    items.sort(key=lambda item: -seconds.get(_part(item), 0.0))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name, _, group = report.nodeid.partition("@tests/")
    _SECONDS[f"tests/{group}" if group else name] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    cache = getattr(session.config, "cache", None)
    if cache and not hasattr(session.config, "workerinput"):
        cache.set("compile_callbacks/seconds", {**cache.get("compile_callbacks/seconds", {}), **_SECONDS})


def _shares_a_fixture(item: Any) -> bool:
    """Whether a fixture of a module or class makes something for the tests around this test."""
    fixtures = getattr(item, "_fixtureinfo", None)
    definitions = fixtures.name2fixturedefs.values() if fixtures else ()
    return any(last.scope in ("module", "class") for *_, last in definitions)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _part(item: pytest.Item) -> str:
    return _file(item.nodeid) if item.get_closest_marker("xdist_group") else item.nodeid
