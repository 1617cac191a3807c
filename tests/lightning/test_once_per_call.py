"""The user's code runs once for each call if Dynamo fails, and graphs and eager calls are counted."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch._dynamo.symbolic_convert
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile, InductorConfig
from compile_callbacks.profiling.recorder import CompileRecorder
from tests.support.models import FEATURES, Classifier, Wrapper, fit, mlp, seeded

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

STEPS = 12


@pytest.fixture
def executions(monkeypatch):
    """The counts of the run that a test makes."""
    made, init = [], CompileRecorder.__init__

    def keep(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(self.executions)

    monkeypatch.setattr(CompileRecorder, "__init__", keep)
    return lambda: (made[-1].graphs, made[-1].eager_calls.total())


def compiled(train_mode="default", infer_mode=None, **settings):
    return InductorCompile(train_mode, infer_mode, **{"targets": ["net"], "baseline_steps": 0} | settings)


@contextlib.contextmanager
def dynamo_fails(on):
    """Let Dynamo fail on each frame whose code has a name with this part."""
    translator = torch._dynamo.symbolic_convert.InstructionTranslator
    real = translator.run

    def run(self):
        if on in self.f_code.co_name:
            raise MemoryError("no memory")
        return real(self)

    with mock.patch.object(translator, "run", run):
        yield


# ---------------------------------------------------------------------------------------------- the user's exceptions


class BatchError(Exception):
    """What only the user's code raises."""


class Raising(Wrapper):
    """Raises for some batches, between two layers, or behind a graph break."""

    def __init__(self, breaks=False):
        super().__init__()
        self.last, self.breaks, self.bad = nn.Linear(3, 3), breaks, False
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        hidden = self.net(x)
        if self.breaks:
            torch._dynamo.graph_break()
        if self.bad:
            raise BatchError("a bad batch")
        return self.last(hidden)


class Skipping(Classifier):
    """Skips the batches for which its network raises."""

    def __init__(self, bad, breaks=False):
        super().__init__(Raising(breaks))
        self.bad, self.skipped = bad, 0

    def training_step(self, batch, batch_idx):
        self.net.bad = batch_idx in self.bad
        try:
            return super().training_step(batch, batch_idx)
        except BatchError:
            self.skipped += 1
            return None


@pytest.mark.filterwarnings("ignore:.*training_step.*returned.*None")
@pytest.mark.parametrize("breaks", [False, True])
def test_a_batch_that_raises_runs_once_and_training_continues_as_in_eager(breaks):
    bad = {0, 20, 30}
    # torch skips the code that raised in a trace: without a graph break, the whole target.
    warns = pytest.warns(CompileWarning, match="without a compiled graph: .*exception.*CC101")
    with contextlib.nullcontext() if breaks else warns:
        module = fit(compiled(), make=lambda: Skipping(bad, breaks), train=60, validation=None)
    assert (module.skipped, len(module.losses), module.net.calls.item()) == (3, 57, 60)
    expected = fit(make=lambda: Skipping(bad, breaks), train=60, validation=None)
    torch.testing.assert_close(module.losses, expected.losses, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------- state of Python


class Counting(Wrapper):
    """Counts its calls in an attribute, a list and a plain tensor."""

    def __init__(self, net=None):
        super().__init__(net)
        self.calls, self.sizes, self.total = 0, [], torch.zeros(1)

    def count(self, x):
        self.calls += 1
        self.sizes.append(x.shape[0])
        self.total.add_(1)

    def forward(self, x):
        self.count(x)
        return self.net(x)


def assert_counted_once_a_call(module, calls=STEPS):
    assert (module.net.calls, module.net.sizes, module.net.total.item()) == (calls, [4] * calls, calls)


@pytest.mark.filterwarnings("ignore:target 'net'.*recompile.limit")
def test_a_counter_at_the_recompile_limit_counts_once_a_call_and_steps_are_eager_and_no_samples(executions):
    callback = compiled(verify="off")
    with torch._dynamo.config.patch(recompile_limit=3):
        module = fit(callback, make=lambda: Classifier(Counting()), train=STEPS, validation=None)
    assert_counted_once_a_call(module)
    graphs, eager_calls = executions()
    assert graphs + eager_calls == STEPS
    assert eager_calls > 0
    train = callback.report.train
    steps = train.diagnostics.steps
    assert steps["eager"] == STEPS - steps["compiled"] > 0
    assert train.verdict == "not compiled"
    assert train.samples in (None, 0) or train.samples <= steps["compiled"]
    compiled_series = [part for part in train.diagnostics.series if part["kind"] == "compiled"]
    assert sum(len(part["ms"]) for part in compiled_series) <= steps["compiled"]


class Broken(Counting):
    """Has a graph break, and code behind it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Wrapper(nn.Sequential(nn.Linear(3, 3), nn.Tanh())) for _ in range(4)])

    def forward(self, x):
        self.count(x)
        hidden = self.net(x)
        torch._dynamo.graph_break()
        return self.blocks(hidden)


@pytest.mark.usefixtures("recompiles_at_once")
def test_code_behind_a_graph_break_on_which_dynamo_fails_runs_alone_and_eagerly(executions):
    callback = compiled()  # each step recompiles, because a number in an attribute of a module is a constant
    with (
        dynamo_fails("torch_dynamo_resume"),
        pytest.warns(
            CompileWarning, match="a part of target 'net' runs eagerly in the train phase.*MemoryError"
        ) as caught,
    ):
        module = fit(callback, make=lambda: Classifier(Broken()), train=6, validation=None)
    assert len([w for w in caught if issubclass(w.category, CompileWarning)]) == 1
    assert_counted_once_a_call(module, 6)
    assert (callback.report.train.graphs >= 1, callback.report.train.fallbacks) == (True, 1)
    graphs, eager_calls = executions()
    assert (graphs >= 6, eager_calls) == (True, 6)  # a part of each call
    expected = fit(make=lambda: Classifier(Broken()), train=6, validation=None)
    torch.testing.assert_close(module.losses, expected.losses, rtol=1e-4, atol=1e-5)


class BreaksForbidden(Counting):
    """Has a graph break in a block in which the user forbids it."""

    def forward(self, x):
        self.count(x)
        with torch._dynamo.error_on_graph_break(True):
            torch._dynamo.graph_break()
        return self.net(x)


@pytest.mark.parametrize(
    ("make", "mode"),
    [(Broken, InductorConfig(fullgraph=True)), (BreaksForbidden, "default")],
    ids=["fullgraph", "context"],
)
@pytest.mark.parametrize("on_error", ["eager", "raise"])
def test_a_forbidden_graph_break_makes_the_target_eager(executions, make, mode, on_error):
    callback = compiled(mode, on_error=on_error)
    if on_error == "raise":
        module = seeded(lambda: Classifier(make()))
        with pytest.raises(RuntimeError, match=r"compiling target 'net' for the train phase failed.*graph_break"):
            fit(callback, make=lambda: module, train=STEPS, validation=None)
        return
    with pytest.warns(CompileWarning, match="target 'net' runs eagerly in the train phase.*graph_break"):
        module = fit(callback, make=lambda: Classifier(make()), train=STEPS, validation=None)
    assert_counted_once_a_call(module)
    assert executions() == (0, STEPS)
    assert callback.report.train.graphs == 0


def test_a_failure_of_the_targets_own_frame_compiles_no_block_alone(executions):
    def make():
        blocks = (Wrapper(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())) for _ in range(12))
        return Classifier(nn.Sequential(*blocks, mlp()))

    callback = compiled("default", "default")
    with (
        dynamo_fails("net_train"),
        pytest.warns(CompileWarning, match="target 'net' runs eagerly in the train phase.*MemoryError"),
    ):
        fit(callback, make=make, train=STEPS, validation=2, num_sanity_val_steps=0)
    train, infer = callback.report.train, callback.report.infer
    assert (train.graphs, train.fallbacks, infer.graphs, infer.fallbacks) == (0, 1, 1, 0)
    assert executions() == (2, STEPS)
