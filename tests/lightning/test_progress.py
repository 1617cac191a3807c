"""The lines that a run prints while something compiles, and why torch recompiles or skips something."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile, Tune, report_of
from tests.cases.zoo import Calls, breaks
from tests.support.models import Classifier, batches_of, fit, mlp
from tests.support.passes import Slow

NET = "compiling 'net' for the train phase (default)"

pytestmark = pytest.mark.usefixtures("no_codegen")


def test_a_run_without_a_terminal_logs_what_compiles_and_how_long_it_took(monkeypatch, logged, tmp_path):
    for name in ("FIRST_LINE_SECONDS", "LINE_SECONDS"):
        monkeypatch.setattr(f"compile_callbacks.profiling.recorder.{name}", 0.1)
    settings = {"passes": [Slow(0.2)], "verify": "off", "cache_dir": tmp_path / "cache"}
    with pytest.warns(CompileWarning, match="cache_dir has no effect"):  # torch caches no graph with such a pass
        fit(InductorCompile(Tune(["default"], steps=5), None, **settings), train=12, validation=None)
    assert any(line.startswith(f"still {NET}: ") for line in logged())
    assert logged().count(f"{NET} ...") == 1
    assert any(line.startswith(f"{NET} took ") for line in logged())


class Changing(nn.Module):
    """Is called with other inputs, attributes and flags, one after the other."""

    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.number = nn.Linear(8, 8), nn.Dropout(), 1

    def forward(self, x, scale=2, name="a"):
        return self.drop(self.fc(x.float())) * scale * self.number * len(name)


BUFFER = "a buffer in its place avoids it"
DROPS = 'drop_last=True in the DataLoader, or train_mode={"dynamic": True}, avoids it'
CHANGES = [
    (lambda net, x: net(x[:3], scale=2), f"batch size 3, was 6; {DROPS}"),
    (lambda net, x: net(x.bfloat16(), scale=2), "dtype of argument 0: bfloat16, was float"),
    (lambda net, x: (net.fc.bias.requires_grad_(False), net(x, scale=2)), "'fc.bias' no longer requires grad"),
    (lambda net, x: (net.drop.eval(), net(x, scale=2)), "'drop' is in eval mode, was in train mode"),
    (lambda net, x: net(x, scale=3), "value of argument 'scale': no longer 2; passing a tensor avoids it"),
    (lambda net, x: (vars(net).update(number=2), net(x, scale=2)), "value of 'number': no longer 1; " + BUFFER),
]  # fmt: skip


@pytest.mark.all_versions
@pytest.mark.usefixtures("recompiles_at_once", "captured_graph")
@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_the_reason_of_a_recompile_in_words_and_the_advice(change, said, compiled):
    net, x = compiled(Changing(), {"dynamic": False}, verify="off"), torch.ones(6, 8)
    net(x, scale=2)
    change(net, x)
    (event,) = [event for event in report_of(net).train.diagnostics.events if event["kind"] == "recompile"]
    assert event["reason"] == said.partition(";")[0]
    assert event.get("fix") == (said.partition("; ")[2] or None)


@pytest.mark.all_versions
@pytest.mark.usefixtures("recompiles_at_once", "captured_graph")
def test_events_are_lines_with_their_cause_and_what_avoids_it(logged, monkeypatch):
    settings = {"targets": ["net"], "baseline_steps": 0, "verify": "off"}
    callback = InductorCompile({"dynamic": False}, None, **settings)
    fit(callback, train=batches_of(8, 8, 2, 3, 4, 5, 6), validation=None)
    lines = [line for line in logged() if "recompil" in line]
    assert lines[0] == f"recompiling 'net' (train): batch size 2, was 8; {DROPS}"
    assert len(lines) == 3
    assert lines[-1].endswith(" (further events: report.train.diagnostics.events)")
    events = callback.report.train.diagnostics.events
    assert [event["step"] for event in events if event["kind"] == "recompile"] == [3, 4, 5, 6, 7]
    fit(
        InductorCompile("default", None, **settings),
        make=lambda: Classifier(Calls(mlp(), breaks)),
        train=2,
        validation=None,
    )
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", mock.Mock(side_effect=ValueError("no\ncompiler")))
    with pytest.warns(CompileWarning, match="CC301"):
        fit(InductorCompile("default", None, **settings), train=2, validation=None)
    fallback = "'net' (train) falls back to eager: ValueError: no compiler"
    for begin in ("graph break in 'net' (train) at zoo.py:", fallback):
        assert len([line for line in logged() if line.startswith(begin)]) == 1, logged()
