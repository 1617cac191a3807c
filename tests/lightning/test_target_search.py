"""The steps of a run find their targets: in the first step, and after the module has changed."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile
from compile_callbacks.calls import target_search
from compile_callbacks.calls.dispatcher import CallProbe, CallSlot
from tests.lightning.test_targets import Validates, WithParameters
from tests.support.against_eager import assert_same_fit, assert_same_module, assert_same_values
from tests.support.models import CLASSES, FEATURES, Classifier, Wrapper, fit, loader, mlp, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]


def slots(module, kind=CallSlot):
    """The names of the modules and methods whose slot this library has replaced."""
    return {
        f"{path}.{name}".removesuffix("._compiled_call_impl")
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, kind)
    }


# ------------------------------------------------------------------------------------------ a module that changes


class Replaces(Validates):
    """Replaces its net or the last layer of it at the second epoch, in the hook that Lightning calls last."""

    def __init__(self, part):
        super().__init__()
        self.part, self.old = part, None

    def on_train_epoch_start(self):
        if self.current_epoch != 1:
            return
        if self.part == "net":
            self.old, self.net = weakref.ref(self.net), mlp()
        elif self.part == "head":
            self.net[3] = nn.Linear(16, CLASSES)
        else:
            self.other, self.net = self.net, None
        self.trainer.strategy.setup_optimizers(self.trainer)

    def logits(self, x):
        return (self.net or self.other)(x)


@pytest.mark.parametrize("targets", [None, ["net"]])
@pytest.mark.parametrize("part", ["net", "head"])
def test_a_replaced_module_is_compiled(part, targets):
    callback = InductorCompile(targets=targets, baseline_steps=0, on_error="raise", verify="raise")
    settings = {"make": lambda: Replaces(part), "max_epochs": 2, "num_sanity_val_steps": 0}
    compiled, eager = fit(callback, **settings), fit(**settings)
    assert_same_values(compiled, eager)
    assert_same_module(compiled, eager)
    train = callback.report.train
    assert (train.targets, train.fallbacks) == (("net",), 0)
    assert train.graphs == (2 if part == "net" else 1)  # the new head has the same shapes
    gc.collect()
    assert compiled.old is None or compiled.old() is None


def test_a_named_target_that_is_gone_is_warned_about_and_a_moved_one_is_found_by_default():
    settings = {"make": lambda: Replaces("name"), "max_epochs": 2, "train": 2, "validation": None}
    by_name, by_default = (InductorCompile(targets=targets, baseline_steps=0) for targets in (["net"], None))
    with pytest.warns(CompileWarning, match="target 'net' is no longer a part of the module.*CC102"):
        assert_same_fit(by_name, **settings)
    assert_same_fit(by_default, **settings)
    assert by_default.report.train.targets == ("other",)


class CallsLater(Classifier):
    """Calls parts of its net, and other parts from the second epoch on."""

    def __init__(self):
        super().__init__()
        self.parts = Wrapper()
        self.parts.head = nn.Linear(CLASSES, CLASSES)
        self.direct = nn.Linear(CLASSES, CLASSES)

    def logits(self, x):
        out = self.parts.net(x)
        return self.direct(self.parts.head(out)) if self.current_epoch else out


class CallsInThirdStep(CallsLater):
    def logits(self, x):
        return self.direct(self(x)) if self.global_step > 1 else self(x)


@pytest.mark.parametrize(
    ("make", "baseline_steps", "targets"),
    [
        (CallsLater, 0, {"parts.net", "parts.head", "direct"}),
        (CallsLater, 2, {"parts.net", "parts.head", "direct"}),
        (CallsInThirdStep, 0, {"forward", "direct"}),
    ],
)
def test_a_child_that_is_called_later_is_compiled_then(make, baseline_steps, targets):
    callback = InductorCompile("default", None, baseline_steps=baseline_steps, on_error="raise")
    assert_same_fit(callback, make=make, max_epochs=2)
    train = callback.report.train
    assert set(train.targets) == targets
    assert (train.graphs, train.recompiles) == (len(targets), 0)


# ------------------------------------------------------------------------------------------ without a baseline


def convolutions():
    normalized = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), normalized, nn.Flatten(), nn.Linear(32, CLASSES))


def attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Unflatten(1, (8, 1)), nn.Linear(1, 8), encoder, nn.Flatten(), nn.Linear(64, CLASSES))


class Trained(Classifier):
    """Trains with one optimizer, and counts the graphs of the first step."""

    def __init__(self, net, optimizer, *, by_hand):
        super().__init__(Wrapper(net()))  # torch 2.11 compiles nothing of the call of a Sequential
        self.optimizer, self.compiled_in_first_step = optimizer, None
        if by_hand:
            self.net.compile()

    def on_train_batch_end(self, *args):
        if self.compiled_in_first_step is None:
            self.compiled_in_first_step = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.01)


@pytest.mark.codegen
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("net", [convolutions, attention])
def test_a_run_without_a_baseline_equals_torch_compile_from_the_first_step_on(net, optimizer):
    callback = InductorCompile("default", None, baseline_steps=0, verify="raise", on_error="raise")
    runs = []
    for callbacks in ((callback,), ()):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        make = lambda by_hand=not callbacks: Trained(net, optimizer, by_hand=by_hand)  # noqa: E731
        runs.append(fit(*callbacks, make=make, train=20, validation=None))
    ours, by_hand = runs
    assert ours.compiled_in_first_step == by_hand.compiled_in_first_step == 1
    assert ours.losses == by_hand.losses
    torch.testing.assert_close(dict(ours.state_dict()), dict(by_hand.state_dict()), rtol=0, atol=0)
    train = callback.report.train
    assert (train.targets, train.graphs, train.verified[:5]) == (("net",), 1, "equal")


class Layers(Classifier):
    """Calls the members of a list in a child."""

    def __init__(self):
        super().__init__()
        self.net = nn.Module()
        self.net.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=i != 3), nn.Tanh()) for i in range(5)
        )
        self.head = nn.Linear(FEATURES, CLASSES)

    def logits(self, x):
        for layer in self.net.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("baseline_steps", [0, 2])
def test_equal_blocks_that_the_steps_call_share_a_graph(baseline_steps):
    callback = InductorCompile("default", None, baseline_steps=baseline_steps, on_error="raise")
    assert_same_fit(callback, make=Layers, validation=None)
    train = callback.report.train
    assert train.targets == ("net.layers.0 + 3 more (4 blocks, 2 graphs)", "net.layers.3", "head")
    assert train.graphs == 4  # the input of the first block requires no gradient


# ------------------------------------------------------------------------------------------ modules without a probe


class Watched(Validates):
    """Calls a part of each child."""

    def __init__(self):
        super().__init__()
        self.holder, self.loss, self.outer = Wrapper(), Wrapper(WithParameters()), Wrapper(Wrapper())
        self.plain = nn.Sequential(nn.Softplus())
        self.graphs, self.seen = [], {True: [], False: []}
        self.outer.net.compile(backend=lambda graph, inputs: self.graphs.append(graph) or graph)

    def logits(self, x):
        self.seen[self.trainer.training].append(slots(self, CallProbe))
        self.loss.net(self.holder.net(x))
        return self.outer.net(x) + self.holder.net[0](x).sum()


def test_probes_are_installed_only_where_the_library_may_compile():
    callback = InductorCompile(None, "default", baseline_steps=0, on_error="raise")
    module = fit(callback, make=Watched, train=6, val_check_interval=2, num_sanity_val_steps=0)
    assert module.seen[True] == [set()] * 6
    assert len(module.graphs) == 1  # the user's backend compiles once, for the train phase
    left = {"", "holder", "loss", "outer", "net", "net.0", "net.1", "net.3"}
    called = {"holder.net", "holder.net.0", "holder.net.1", "holder.net.3", "outer.net"}
    assert module.seen[False] == [left | called, *([left] * 5)]
    assert set(callback.report.infer.targets) == {"holder.net", "holder.net.0", "outer.net"}


def test_calls_in_backward_and_between_steps_are_not_recorded():
    class Calls(Classifier):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"inner": nn.Module()})
            for name in ("backward", "hook", "step"):
                setattr(self.parts["inner"], name, nn.Linear(CLASSES, CLASSES))

        def logits(self, x):
            out = self.net(x)
            out.register_hook(self.parts["inner"].backward)
            return self.parts["inner"].step(out)

        def on_train_batch_end(self, *args):
            self.parts["inner"].hook(torch.zeros(1, CLASSES))

    callback = InductorCompile("default", None, baseline_steps=2)
    assert_same_fit(callback, make=Calls, validation=None)
    assert set(callback.report.train.targets) == {"net", "parts.inner.step"}


def test_a_second_run_finds_what_the_first_did_not_call():
    class Tests(Classifier):
        def test_step(self, batch, batch_idx):
            self.net[0](batch[0])

    module, callback = seeded(Tests), InductorCompile(baseline_steps=0)
    run = trainer(callback)
    run.fit(module, loader(2), loader(1))
    run.test(module, loader(2), verbose=False)
    assert set(callback.report.infer.targets) == {"forward", "net.0"}
    assert slots(module) == set()


def test_a_failure_of_the_search_costs_a_target_and_not_the_run(monkeypatch):
    def fail(root, called, callees):
        if called.name == "parts.head":
            raise ZeroDivisionError("by design")
        return [called]

    monkeypatch.setattr(target_search, "with_equal_blocks", fail)
    callback = InductorCompile("default", None, baseline_steps=0)
    with pytest.warns(CompileWarning, match="could not be made a target: .*by design"):
        assert_same_fit(callback, make=CallsLater, max_epochs=2, validation=None)
    assert callback.report.train.targets == ("parts.net", "direct")


class Adapts(Classifier):
    """Trains a shallow copy of its network with another head, as meta-learning does."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)))

    def logits(self, x):
        fast, head = copy.copy(self.net), copy.deepcopy(self.net[1])
        with torch.no_grad():
            head.weight.mul_(2)
        fast._modules = {**self.net._modules, "1": head}
        return fast(x)


@pytest.mark.parametrize("baseline_steps", [0, 2])
@pytest.mark.filterwarnings("ignore:nothing is compiled in the train phase")
def test_a_shallow_copy_of_a_child_computes_with_its_own_parts(baseline_steps):
    assert_same_fit(InductorCompile("default", None, baseline_steps=baseline_steps), make=Adapts, validation=None)


class ReplacesInValidation(Classifier):
    def __init__(self):
        super().__init__()
        self.old, self.installed = [self.net], []

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking and self.net is self.old[0]:
            self.net = copy.deepcopy(self.net)
            self.trainer.strategy.setup_optimizers(self.trainer)

    def on_train_batch_end(self, *args):
        self.installed.append((bool(slots(self.old[0])), bool(slots(self.net))))


def test_a_network_that_replaces_another_within_an_epoch_is_compiled_and_the_old_one_runs_without_this_library():
    callback = InductorCompile("default", None, baseline_steps=0)
    module = fit(callback, make=ReplacesInValidation, train=12, validation=1, val_check_interval=4)
    assert callback.report.train.diagnostics.steps == {"compiled": 12}
    assert module.installed == [(True, True)] * 4 + [(False, True)] * 8
