"""Collects these tests only with ``-m models``: the group ``models`` in pyproject.toml has
their packages, see ``make test-models``."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if "models" in (config.getoption("markexpr") or "") else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.models)
            item.add_marker(pytest.mark.filterwarnings("default"))  # other packages' own warnings are no errors here
