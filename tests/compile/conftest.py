"""A fixture that compiles modules and restores them."""

from __future__ import annotations

import pytest

from compile_callbacks import compile_phases, restore


@pytest.fixture
def compiled():
    """Compiles modules, and restores them after the test."""
    modules = []

    def compile_module(module, **settings):
        modules.append(compile_phases(module, **settings))
        return modules[-1]

    yield compile_module
    for module in modules:
        restore(module)
