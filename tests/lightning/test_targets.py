"""The default targets are the modules and methods that the first eager steps call, and torch can compile."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import types
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.profilers import AdvancedProfiler
from torch import nn
from torch._dynamo.utils import counters
from torchmetrics import Metric

from compile_callbacks import CompileWarning, InductorCompile
from tests.support import random_modules
from tests.support.against_eager import assert_fits_as_eager, assert_same_fit, assert_same_module, assert_same_values
from tests.support.models import CLASSES, FEATURES, Classifier, Wrapper, fit, loader, mlp, seeded, trainer
from tests.support.processes import run_in_new_process

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]


class Parts(nn.Module):
    """Has methods, and a forward that calls one of them."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.decode(self.encoder(x))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, x):
        return self.head(x).relu()

    def generate(self, x):
        return self.encoder(x).sum() + self(x)


class WithParameters(Metric):
    """A metric with a network, as LPIPS and FID are."""

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(CLASSES, 1).requires_grad_(False)
        self.add_state("total", torch.zeros(()))

    def update(self, out):
        self.total += self.network(out.detach()).square().sum()

    def compute(self):
        return self.total


class Validates(Classifier):
    """Validates with the call of the training step."""

    def validation_step(self, batch, batch_idx):
        self.validation_outputs.append(self.logits(batch[0]))


class Steps(Classifier):
    """Its training step calls a function with the module and the inputs."""

    def __init__(self, call, net=None):
        super().__init__(net or Parts())
        self.outer = Wrapper(nn.Linear(FEATURES, CLASSES))  # steps call only the module inside it
        self.metric, self.scale, self.call = WithParameters(), nn.Softplus(), call

    def logits(self, x):
        return self.call(self, x)

    def validation_step(self, batch, batch_idx):
        self.metric(self.outer.net(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD([*self.net.parameters(), *self.outer.parameters()], lr=0.1)


PARTS, BOTH = {"net.encoder", "net.head"}, {"net", "net.encoder"}
CALLS = {  # the targets with a baseline, and without one
    "module": (lambda m, x: m.net(x), {"net"}, {"net"}),
    "forward": (lambda m, x: m.net.forward(x), {"net.encoder", "net.decode"}, PARTS),
    "methods": (lambda m, x: m.net.decode(m.scale(m.net.encode(x))), {"net.encode", "net.decode"}, PARTS),
    "method that calls its module": (lambda m, x: m.net.generate(x), BOTH, BOTH),
    "module before its part": (lambda m, x: m.net(x) + m.net.encoder(x).sum(), BOTH, BOTH),
    "module inside a child": (lambda m, x: m.outer.net(x), {"outer.net"}, {"outer.net"}),
}


@pytest.mark.parametrize("baseline_steps", [0, 2])
@pytest.mark.parametrize("call", CALLS)
def test_default_targets_are_the_called_modules_and_methods(call, baseline_steps):
    function, *expected = CALLS[call]
    called = expected[0 if baseline_steps else 1]
    callback = InductorCompile(baseline_steps=baseline_steps, verify="raise", on_error="raise")
    settings = {"make": lambda: Steps(function), "num_sanity_val_steps": 0}
    compiled, eager = fit(callback, **settings), fit(**settings)
    assert_same_values(compiled, eager)
    assert_same_module(compiled, eager)
    torch.testing.assert_close(compiled.metric.compute(), eager.metric.compute())  # each sample counts once
    train, infer = callback.report.train, callback.report.infer
    assert {event["target"] for event in train.diagnostics.events if event["kind"] == "compile"} == called
    assert set(train.targets) == called
    assert {event["target"] for event in infer.diagnostics.events if event["kind"] == "compile"} == {"outer.net"}


@pytest.mark.parametrize("targets", [None, ["net"]])
def test_a_target_that_only_a_compiled_function_calls_is_warned_about(targets):
    function = torch.compile(lambda net, x: net(x) * 2)
    before = counters["stats"]["unique_graphs"]
    callback = InductorCompile("max-autotune-no-cudagraphs", None, targets=targets, on_error="raise", baseline_steps=2)
    with pytest.warns(CompileWarning, match="nothing is compiled in the train phase, because its steps call none of"):
        fit(callback, make=lambda: Steps(lambda m, x: function(m.net, x), mlp()), train=20, validation=None)
    train = callback.report.train
    assert (train.graphs, train.compiled_step_ms, train.speedup) == (0, None, None)
    assert train.eager_step_ms is not None
    assert counters["stats"]["unique_graphs"] == before + 1  # the user's


def test_an_exception_in_a_recorded_method_leaves_nothing_on_the_module():
    def fail(module, x):
        raise KeyError(module.net.encode(x).shape)

    module = seeded(lambda: Steps(fail))
    with pytest.raises(KeyError):
        trainer(InductorCompile()).fit(module, loader(4))
    assert not {"encode", "forward", "_compiled_call_impl"} & {name for part in module.modules() for name in vars(part)}


@pytest.mark.parametrize("profiler", ["Python's", "torch's"])
def test_the_users_profiler_does_not_hinder_finding_targets(profiler, tmp_path):
    function, called, _ = CALLS["methods"]
    callback = InductorCompile("default", None, baseline_steps=2)
    of_lightning = AdvancedProfiler(tmp_path, "profile") if profiler == "Python's" else None
    with contextlib.nullcontext() if of_lightning else torch.profiler.profile(acc_events=True):
        fit(callback, make=lambda: Steps(function), validation=None, profiler=of_lightning)
    assert of_lightning is None or "training_step" in (tmp_path / "fit-profile.txt").read_text()
    assert set(callback.report.train.targets) == called


# ------------------------------------------------------------------------------------------ replaced methods, pickles


X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


def as_closure(module, method):
    original = getattr(module, method)
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


def as_method(module, method):
    return types.MethodType(lambda self, x: 2 * self.head(x), module)


class Patched(Classifier):
    """Replaces a method of its net, before the run or at one batch."""

    def __init__(self, method, patch, at_batch=None):
        super().__init__(Parts())
        self.method, self.patch, self.at_batch = method, patch, at_batch
        if at_batch is None:
            self.replace_method()

    def replace_method(self):
        self.patched = self.patch(self.net, self.method)
        setattr(self.net, self.method, self.patched)

    def training_step(self, batch, batch_idx):
        if batch_idx == self.at_batch:
            self.replace_method()
        return super().training_step(batch, batch_idx)

    def logits(self, x):
        return self.net(x) if self.method == "forward" else self.net.decode(self.net.encode(x))


@pytest.mark.parametrize(
    ("method", "patch", "at_batch"),
    [("forward", as_closure, None), ("decode", as_method, None), ("decode", as_closure, 3)],
)
def test_a_replaced_method_runs_as_in_eager_and_stays(method, patch, at_batch):
    arguments = {"make": lambda: Patched(method, patch, at_batch), "validation": None}
    callback = InductorCompile(targets=f"net.{method}", baseline_steps=0, on_error="raise")
    compiled, eager = fit(callback, **arguments), fit(**arguments)
    assert vars(compiled.net)[method] is compiled.patched
    assert_same_values(compiled, eager)
    torch.testing.assert_close(compiled.logits(X), eager.logits(X))
    assert callback.report.train.graphs == 1


LOAD = """
import pickle, sys

sys.modules["compile_callbacks"] = None  # importing it fails
import torch

for path in sys.argv[1:]:
    with open(path, "rb") as file:
        model = pickle.load(file)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(model.state_dict())
    print(model.net.encode(torch.ones(2, 8)).unique().item())
"""


def test_a_pickle_of_a_run_loads_without_this_library(tmp_path):
    for name in ("original", "patched"):

        def pickle_within_step(trainer, pl_module, path=tmp_path / name):
            assert "encode" in vars(pl_module.net)
            path.write_bytes(pickle.dumps(pl_module))

        model = random_modules.Model(random_modules.Spec(blocks=("plain",), target="net.encode", shared=True))
        if name == "patched":
            model.net.encode = random_modules.first_features
        callback = InductorCompile(targets=["net.encode", "side"], baseline_steps=0)
        trainer(callback, LambdaCallback(on_after_backward=pickle_within_step)).fit(model, loader(4))
    assert run_in_new_process(LOAD, tmp_path / "original", tmp_path / "patched").split() == ["0.0", "1.0"]


# ------------------------------------------------------------------------------------------ that torch cannot compile


class WithScript(Validates):
    """Its step calls a scripted and a traced child before the network."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates TorchScript
            self.scripted = torch.jit.script(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()))
            self.traced = torch.jit.trace(nn.Linear(FEATURES, FEATURES), torch.ones(2, FEATURES))

    def logits(self, x):
        return self.net(self.traced(self.scripted(x)))


class Asynchronous(Wrapper):
    async def forward(self, x):
        return self.net(x)

    encode = forward


class Awaits(Validates):
    """Awaits the call, or a method, of its net."""

    def __init__(self, method="__call__"):
        super().__init__(Asynchronous())
        self.method = method

    def logits(self, x):
        coroutine = getattr(self.net, self.method)(x)
        assert inspect.iscoroutine(coroutine)
        return asyncio.run(coroutine)


@pytest.mark.parametrize(
    ("make", "targets", "reason", "found"),
    [
        (WithScript, None, None, ("net",)),
        (WithScript, ["traced", "net"], "it is a TorchScript module", ("net",)),
        (WithScript, ["scripted.forward"], "it is a TorchScript module", ()),
        (Awaits, None, None, ("net.net",)),
        (Awaits, ["net"], "its .* is an async function", ()),
        (lambda: Awaits("encode"), ["net.encode"], "its .* is an async function", ()),
    ],
)
def test_script_modules_and_async_functions_are_no_default_targets_and_run_eagerly_with_a_warning_if_they_are_named(
    make, targets, reason, found
):
    callback = InductorCompile(targets=targets, baseline_steps=0)
    message = f"target '{targets and targets[0]}' is not compiled: {reason}"
    with pytest.warns(CompileWarning, match=message) if targets else contextlib.nullcontext():
        assert_same_fit(callback, make=make)
    for phase in (callback.report.train, callback.report.infer):
        assert (phase.targets, phase.graphs, phase.graph_breaks, phase.fallbacks) == (found, len(found), 0, 0)


class _Skipped(nn.Module):
    """Torch compiles only the last of its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(8)))
        self.head = nn.Linear(FEATURES, 3)

    @torch.compiler.disable
    def features(self, x):
        return self.layers(x)

    def forward(self, x):
        return self.head(self.features(x))


def test_a_target_whose_graphs_use_few_of_its_weights_is_reported_with_the_share():
    callback = InductorCompile(infer_mode="eager", targets="net", baseline_steps=0)
    message = r"graphs of target 'net' use 2 of its 18 weights \(11%\) in the train phase, .*\.py:\d+"
    with pytest.warns(CompileWarning, match=message):
        assert_fits_as_eager(callback, make=lambda: Classifier(_Skipped()))
