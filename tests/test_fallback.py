"""A failure of the compiler costs speed, never the run; an error of the user's is the user's."""

from __future__ import annotations

import pytest
import torch
from models import Classifier, loader, seeded, trainer

from compile_callbacks import CompileError, CompileWarning, InductorCompile, InductorConfig, graph_pass


@graph_pass
def always_fails(graph, is_inference):
    raise ZeroDivisionError("by design")


@graph_pass
def fails_in_backward(graph, is_inference):
    if not is_inference and any("tangents" in node.name for node in graph.nodes):
        raise ZeroDivisionError("in backward")


def losses(*callbacks, make=Classifier):
    module = seeded(make)
    trainer(*callbacks).fit(module, loader(), loader(2))
    return module.losses


@pytest.mark.parametrize("broken", [always_fails, fails_in_backward])
def test_a_failing_compile_runs_eagerly_with_one_warning_a_phase_and_is_counted(broken):
    callback = InductorCompile(passes=[broken], baseline_steps=0)
    with pytest.warns(CompileWarning, match="runs eagerly.*ZeroDivisionError") as caught:
        compiled = losses(callback)
    assert compiled == losses()
    assert callback.report.train.fallbacks == 1
    phases = 2 if broken is always_fails else 1
    assert len([w for w in caught if issubclass(w.category, CompileWarning)]) == phases
    assert callback.report.infer.fallbacks == phases - 1
    assert "by design" in str(callback.report.to_dict()) or "in backward" in str(callback.report.to_dict())


class Breaks(Classifier):
    def forward(self, x):
        torch._dynamo.graph_break()
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss


def test_a_graph_break_under_fullgraph_falls_back():
    callback = InductorCompile(InductorConfig(fullgraph=True), None, targets=["forward"], baseline_steps=0)
    with pytest.warns(CompileWarning, match="target 'forward' runs eagerly in the train phase"):
        compiled = losses(callback, make=Breaks)
    assert compiled == losses(make=Breaks)
    assert callback.report.train.fallbacks == 1


def test_raise_ends_the_run_and_names_target_and_phase():
    with pytest.raises(CompileError, match="target 'net' for the train phase failed"):
        trainer(InductorCompile(passes=[always_fails], on_error="raise", baseline_steps=0)).fit(Classifier(), loader(2))


class WrongShape(Classifier):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0][:, :3]).sum()


class Raises(Classifier):
    def forward(self, x):
        raise LookupError("no such token")

    def training_step(self, batch, batch_idx):
        return self(batch[0]).sum()


@pytest.mark.parametrize("on_error", ["eager", "raise"])
@pytest.mark.parametrize(
    ("make", "error", "said"),
    [(WrongShape, RuntimeError, "shapes cannot be multiplied"), (Raises, LookupError, "token")],
)
def test_an_error_of_the_users_code_is_raised_as_it_is(make, error, said, on_error):
    callback = InductorCompile(on_error=on_error, baseline_steps=0)
    with pytest.raises(error, match=said) as caught:
        trainer(callback).fit(make(), loader(2))
    assert not isinstance(caught.value, CompileError)
    assert callback.report.train.fallbacks == 0
    assert "training_step" in [entry.name for entry in caught.traceback]
