"""Eager and compiled calls of one batch norm in one training step."""

from __future__ import annotations

import pytest
from torch import nn

from compile_callbacks import InductorCompile
from compile_callbacks._torch import inductor
from tests.support.against_eager import FLOAT32, FLOAT32_ON_GPU, assert_same_values
from tests.support.models import Classifier, batches_of, fit, mlp

pytestmark = [
    pytest.mark.all_versions,
    pytest.mark.usefixtures("no_codegen"),
    pytest.mark.filterwarnings("ignore::compile_callbacks.CompileWarning"),
]

STEPS = 24


class Net(nn.Module):
    """Takes a string, for whose values torch compiles separate graphs until it reaches its limit."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, name="a"):
        y = self.net(x)
        return y * 2 if name == "two" else y


class TwoCalls(Classifier):
    """Calls the network twice in each training step, the second time always with the same kind of input."""

    def __init__(self, first_call):
        super().__init__(Net())
        self.first_call = first_call

    def training_step(self, batch, batch_idx):
        x, y = batch
        size, name = self.first_call(batch_idx)
        loss = nn.functional.cross_entropy(self.net(x[:size], name), y[:size])
        loss = loss + nn.functional.cross_entropy(self.net(x, "a"), y)
        self.losses.append(loss.item())
        return loss


STATIC = {"train_mode": {"dynamic": False}}
CASES = {
    "ten strings": (lambda step: (20, f"name {step % 10}"), STATIC),
    "many sizes": (lambda step: (2 + step % 12, "a"), STATIC),
}


@pytest.fixture
def executions(monkeypatch):
    """Counts the executions of compiled graphs."""
    count = [0]
    compile_graph = inductor.compile_graph

    def counted(*args, **kwargs):
        compiled = compile_graph(*args, **kwargs)

        def call(*inputs):
            count[0] += 1
            return compiled(*inputs)

        return call

    monkeypatch.setattr(inductor, "compile_graph", counted)
    return count


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", ["default", pytest.param("reduce-overhead", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("recompiles_at_once")
def test_eager_and_compiled_calls_of_a_batch_norm_share_a_step(executions, case, mode, accelerator):
    first_call, settings = CASES[case]
    settings = settings | {"train_mode": {"mode": mode, **settings["train_mode"]}}
    ours = InductorCompile(**settings, infer_mode="eager", targets="net", baseline_steps=0)
    compiled, eager = (
        fit(
            *callbacks,
            make=lambda: TwoCalls(first_call),
            train=batches_of(*[20] * STEPS),
            validation=0,
            accelerator=accelerator,
        )
        for callbacks in ([ours], [])
    )
    assert_same_values(compiled, eager, FLOAT32 if accelerator == "cpu" else FLOAT32_ON_GPU)
    assert ours.report.train.graphs >= 1
    # The second call of each step runs compiled, and some first calls run eagerly. The comparison runs a graph once.
    assert STEPS <= executions[0] < 2 * STEPS + ours.report.train.graphs
