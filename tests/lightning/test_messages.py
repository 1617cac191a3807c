"""A message names the cause and the code that the report also names, and its advice helps."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from compile_callbacks import CompileError, CompileWarning, InductorCompile, _torch
from compile_callbacks.report.summary import describe_verdict, next_step
from tests.support.models import CLASSES, FEATURES, Classifier, Wrapper, fit

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen", "dropped_backends_go")]

LOGGER = logging.getLogger(__name__)


def run(make, *, train=8, validation=None, fitting=None, **settings):
    """Fit with the callback, and return its report and the messages of its warnings."""
    callback = InductorCompile(**{"baseline_steps": 0, "targets": ["net"], "verify": "off", **settings})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(callback, make=make, train=train, validation=validation, **(fitting or {}))
    return callback.report, [str(each.message) for each in caught if issubclass(each.category, CompileWarning)]


class CountsFlops(Classifier):
    def training_step(self, batch, batch_idx):
        with FlopCounterMode(display=False):
            return super().training_step(batch, batch_idx)


class CountsFlopsInHook(Classifier):
    """Calls a target in a hook only."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(FEATURES, CLASSES)

    def on_train_batch_start(self, batch, batch_idx):
        with FlopCounterMode(display=False):
            self.other(batch[0])


class HasBackwardHook(Classifier):
    def __init__(self):
        super().__init__()
        self.net[0].register_full_backward_hook(lambda module, inputs, outputs: None)


class Sparse(Wrapper):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.eye(FEATURES).to_sparse())

    def forward(self, x):
        return self.net(torch.sparse.mm(self.mask, x.T).T)


class Force(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + force[:, :CLASSES]


FLOPS = "FlopCounterMode is active, and torch compiles nothing within a TorchDispatchMode"
NEWER = pytest.mark.skipif(torch.__version__ < "2.13", reason="older versions compile a part, for another reason")
BACKWARD_HOOK = "Module-level backwards hooks require compiled autograd"


@pytest.mark.parametrize(
    ("make", "settings", "code", "reason"),
    [
        (CountsFlops, {}, "CC101", FLOPS),
        (HasBackwardHook, {}, "CC101", BACKWARD_HOOK),
        (lambda: Classifier(Sparse()), {}, "CC101", "torch.compile does not support sparse Tensors"),
        pytest.param(lambda: Classifier(Force()), {}, "CC101", "torch.autograd.grad", marks=NEWER),
    ],
)
def test_a_phase_without_compiled_steps_has_one_reason_everywhere(make, settings, code, reason):
    report, messages = run(make, **settings)
    verdict = describe_verdict("train", report.train)
    assert verdict.startswith("not compiled: ")
    assert reason in verdict
    assert f"see {code}" in verdict
    assert next_step(report) == f"read why train is not compiled: compile-callbacks explain {code}"
    assert [message for message in messages if "CC501" in message] == []
    if code == "CC101":
        assert [reason in message for message in messages] == [True]


def test_a_target_that_only_a_hook_calls_has_the_reason_of_its_calls():
    _, messages = run(CountsFlopsInHook, targets=["net", "other"])
    (message,) = [message for message in messages if "CC101" in message]
    assert message.startswith(f"target 'other' ran in the train phase without a compiled graph: {FLOPS}")


class Penalized(Classifier):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)))

    def gradient(self, x):
        return torch.func.grad(lambda x: self.net(x).sum())(x)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.gradient(batch[0]).square().mean()


def test_calls_within_a_transform_are_counted_and_give_no_sample_and_the_other_calls_are_compiled():
    report, messages = run(Penalized, baseline_steps=2, train=12)
    assert report.train.graphs == 1
    steps = report.train.diagnostics.steps["compiled"]
    assert report.train.diagnostics.eager_calls == {"net": steps}
    assert (report.train.diagnostics.compiled_samples, report.train.verdict) == (0, "too few samples")
    assert not [message for message in messages if "CC303" in message]
    advised, messages = run(Penalized, targets=["net", "gradient"])
    assert (advised.train.diagnostics.eager_calls, messages) == ({}, [])


class Tagged(Wrapper):
    """Has a graph break, behind which the graphs depend on a string."""

    def __init__(self):
        super().__init__()
        self.tag = "a"

    def forward(self, x):
        x = x * 2
        torch._dynamo.graph_break()
        return self.net(x) * len(self.tag)


class TagsInValidation(Classifier):
    def __init__(self):
        super().__init__(Tagged())

    def validation_step(self, batch, batch_idx):
        self.net.tag = f"v{batch_idx}"
        super().validation_step(batch, batch_idx)

    def on_train_epoch_start(self):
        self.net.tag = "t"


@pytest.mark.usefixtures("recompiles_at_once")
def test_the_phase_that_reaches_the_recompile_limit_is_the_one_that_is_named():
    fitting = {"max_epochs": 2, "num_sanity_val_steps": 0}
    with torch._dynamo.config.patch(recompile_limit=3):
        report, messages = run(TagsInValidation, validation=20, fitting=fitting)
    (limit,) = [message for message in messages if "CC103" in message]
    assert limit.startswith("target 'net' reached torch's recompile limit in the infer phase")
    assert (report.train.fallbacks, report.infer.fallbacks) == (0, 1)


class Counter(Wrapper):
    def __init__(self, start):
        super().__init__()
        self.register_buffer("calls", start) if isinstance(start, torch.Tensor) else setattr(self, "calls", start)

    def forward(self, x):
        self.calls = self.calls + 1
        return self.net(x) + self.calls


@pytest.mark.usefixtures("recompiles_at_once")
def test_the_advice_at_the_recompile_limit_fits_its_reason_and_helps():
    with torch._dynamo.config.patch(recompile_limit=3):
        report, (limit, *_) = run(lambda: Classifier(Counter(0)))
        advised, _ = run(lambda: Classifier(Counter(torch.zeros(()))))
    assert "value of 'calls': no longer" in limit
    assert "a buffer in its place avoids it [CC103" in limit
    assert "explain CC103" in next_step(report)
    assert report.train.graphs == 3
    assert report.train.fallbacks >= 1
    assert (advised.train.recompiles, advised.train.fallbacks) == (0, 0)


@NEWER
def test_the_hooks_of_lightnings_profiler_are_a_cause_with_advice_that_helps():
    with torch._dynamo.config.patch(recompile_limit=3):
        _, (limit, *_) = run(Classifier, fitting={"profiler": "pytorch"})
    assert "profiler=PyTorchProfiler(record_module_names=False) avoids it [CC103" in limit
    advised, _ = run(Classifier, fitting={"profiler": PyTorchProfiler(record_module_names=False)})
    assert (advised.train.graphs, advised.train.graph_breaks, advised.train.recompiles) == (1, 0, 0)


class Scaled(Wrapper):
    """Multiplies by a number that it computes from a tensor, and then breaks the graph again."""

    def __init__(self, converts):
        super().__init__()
        self.converts = converts

    def forward(self, x):
        scale = x.abs().mean()
        y = self.net(x) * (scale.item() if self.converts else scale)
        if self.converts:
            LOGGER.debug("a second break")
        return y


@pytest.mark.usefixtures("recompiles_at_once")
def test_the_first_graph_break_is_the_cause_of_what_follows_and_its_removal_helps():
    report, _ = run(lambda: Classifier(Scaled(True)))
    (recompile,) = [event for event in report.train.diagnostics.events if event["kind"] == "recompile"][:1]
    assert recompile["reason"].startswith("a result at the graph break in test_messages.py:")
    assert "___stack" not in str(report.train.diagnostics.events)
    assert "Tensor.item()" in recompile["fix"]
    assert "Tensor.item()" in next_step(report)
    advised, _ = run(lambda: Classifier(Scaled(False)))
    assert (advised.train.graph_breaks, advised.train.recompiles, advised.train.graphs) == (0, 0, 1)


class Differentiates(Penalized):
    def gradient(self, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]


def test_on_error_raise_gives_the_reason_of_a_run_that_continues():
    _, (message,) = run(Differentiates, baseline_steps=2, train=12)
    reason = message.partition("because ")[2].partition(" [CC303")[0]
    assert "create_graph=True" in reason
    with pytest.raises(CompileError) as raised:
        run(Differentiates, baseline_steps=2, train=12, on_error="raise")
    assert reason in str(raised.value)


class CallsForceInStep(Classifier):
    """Validates with a target that contains the target of training, and that torch does not compile."""

    def __init__(self):
        super().__init__(Force())

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            super().validation_step(batch, batch_idx)


def test_torch_traces_no_code_of_the_call_of_a_target():
    fitting = {"inference_mode": False, "num_sanity_val_steps": 0}
    report, messages = run(CallsForceInStep, targets=None, validation=8, fitting=fitting)
    assert not [message for message in messages if "CC108" in message]
    assert "compile_callbacks" not in str([event.get("file") for event in report.infer.diagnostics.events])


def test_a_dispatch_mode_that_has_ended_stops_no_compile(monkeypatch):
    # torch 2.15 can leave its flag set after two threads have compiled at the same time.
    flag = "is_in_any_mode_without_ignore_compile_internals"
    monkeypatch.setattr(torch.utils._python_dispatch, flag, lambda: True)
    assert _torch.modes.dispatch_mode() == ""
