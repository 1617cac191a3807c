"""Tables as plain text and on a terminal."""

from __future__ import annotations

import pytest

from compile_callbacks import CompileReport, PhaseReport
from compile_callbacks.report.console import make_table, to_text


def test_cells_are_text_and_long_ones_wrap_without_loss():
    mode = "options={" + "x" * 150 + "}"
    text = to_text(make_table(("", "[b]train[/b]"), [("mode", mode), ("note", "[red]:smile:[/red]")]))
    assert "[b]train[/b]" in text
    assert "[red]:smile:[/red]" in text
    assert text.count("x") == 150
    assert max(map(len, text.splitlines())) < 80


@pytest.mark.parametrize(("name", "value"), [("FORCE_COLOR", "1"), ("COLUMNS", "20"), ("TTY_COMPATIBLE", "1")])
def test_the_environment_does_not_change_the_text_of_a_report(name, value, monkeypatch):
    report = CompileReport(train=PhaseReport(mode="max-autotune-no-cudagraphs", targets=("net",)))
    text = str(report)
    monkeypatch.setenv(name, value)
    assert str(report) == text
    assert "\x1b" not in text
