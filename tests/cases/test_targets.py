"""The default targets are the modules and methods that the steps call and torch can compile; others have names."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.profilers import AdvancedProfiler
from torch import nn
from torch._dynamo.utils import counters
from torch.optim import AdamW
from torch.utils.flop_counter import FlopCounterMode

from compile_callbacks import CompileWarning, InductorCompile, report_of
from tests.cases import zoo
from tests.cases.case import Case, check, net
from tests.support.models import CLASSES, FEATURES, Classifier, Wrapper, fit, loader, mlp, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]

SEARCHED = "net,inside.net,inside.head,own.net,own,split.net,split.head,before,before.net,outer.net"
RECORDED = "net,inside.net,inside.decode,split.encode,split.decode,before,before.net,outer.net,own.net,own"
BASELINES = TRAIN, BASELINE = {"infer_mode": None}, {"infer_mode": None, "baseline_steps": 2}
SEVERAL = ["list.net.0 + 3 more (4 blocks, 2 graphs)", "list.net.3", "head"]  # the first input has no gradient
TWO_EPOCHS = {"max_epochs": 2}
LATER = zoo.logits(zoo.call_later, parts=zoo.Parts, direct=zoo.linear(CLASSES))
REPLACES = zoo.logits(
    lambda m, x: m.net(x) + m.second(x) + (m.third or m.moved)(x), zoo.Replaces, second=mlp, third=mlp
)


class Listed(Wrapper):
    """Returns its parameters in a list."""

    def parameters(self, recurse=True):
        return list(super().parameters(recurse))


PREDICTS_PART = zoo.logits(lambda m, x: m.net[0](x) if m.trainer.predicting else m.net(x))


def row(name, make, callback, expect, *codes, **settings):
    return Case(name=name, make=make, callback=callback, expect=expect, codes=codes, **settings)


def finds(names, graphs=None, **others):
    names = names.split(",") if isinstance(names, str) else names
    return {"train.targets": names, "train.graphs": graphs or len(names)} | others


def names(*targets, **callback):
    return {"targets": targets, **callback}


CASES = [
    row("calls", zoo.called, TRAIN, finds(SEARCHED)),
    row("calls after a baseline", zoo.called, BASELINE, finds(RECORDED)),
    row("replaced methods", zoo.Patched, names("net.forward", "second.decode", "third.decode"),
        {"train.targets": ["third.decode"], "infer.targets": ["third.decode"]}, "CC104", "CC104",
        says="'net.forward' is not compiled: its forward is an attribute of the object"),
    row("no default targets", zoo.Unsupported, {}, finds("net")),
    row("named all the same", zoo.Unsupported, names("traced", "scripted", "net"),
        {"train.targets": ["net"], "infer.targets": ["net"]}, "CC104", "CC104",
        says="(?s)target 'traced' is not compiled: it is a TorchScript module.*target 'scripted' is not"),
    row("changed", REPLACES, {}, finds("second,net,moved", 5) | {"infer.graphs": 5}, trainer=TWO_EPOCHS),
    row("changed with names", REPLACES, names("net", "second", "third"), finds("second,net", 4) | {"infer.graphs": 4},
        "CC102", trainer=TWO_EPOCHS, says="target 'third' is no longer a part of the module"),
    row("later", LATER, BASELINE, finds("parts.net,parts.head,direct"), trainer=TWO_EPOCHS),
    row("own list of parameters", net(Listed), {}, {}),
    *(row(f"blocks {i}", zoo.layers, BASELINES[i], finds(SEVERAL, 4) | {"train.recompiles": 1}) for i in (0, 1)),
    row("glob", zoo.layers, names("list.net.[0124]", **TRAIN), finds(SEVERAL[:1], 2) | {"train.recompiles": 1}),
    row("marked blocks", net(zoo.marked_blocks), TRAIN, finds("net")),
    row("later stage", PREDICTS_PART, {"train_mode": None}, {"infer.targets": ["net", "net.0"], "infer.graphs": 2}),
    row("never called", PREDICTS_PART, names("net", "net.0", **TRAIN), finds("net"), "CC102", says="'net.0' was never"),
    row("shallow copy", zoo.logits(zoo.adapt), BASELINE, finds("net.0,net.1")),
    row("two matches", Classifier, names("net.[03]", **TRAIN), finds("net.0,net.3")),
    row("methods of the root", Classifier, names("logits", "forward"), {}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_targets_are_compiled_as_the_case_expects(case):
    check(case)
    assert not zoo.Replaces.replaced  # the module of a replaced target is freed


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_the_users_profilers_do_not_hinder_finding_targets(tmp_path):
    profilers = {"trainer": {"profiler": AdvancedProfiler(tmp_path, "profile")}, "inside": torch.profiler.profile}
    check(row("profilers", zoo.called, BASELINE, finds(RECORDED), predict=None, **profilers))
    assert "training_step" in (tmp_path / "fit-profile.txt").read_text()


def test_an_exception_in_a_recorded_method_leaves_nothing_on_the_module():
    module = zoo.Logits(lambda m, x: {}[m.net.encode(x)], net=zoo.Parts)
    with pytest.raises(KeyError):
        trainer(InductorCompile()).fit(module, loader(4))
    assert slots(module) == set()


def slots(module, kind=""):
    """The names of the modules and methods that have an object of this library, or a kind of them, in front of them."""
    return {
        f"{path}.{name}".removesuffix("._compiled_call_impl")
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if type(value).__module__.startswith("compile_callbacks.") and kind in type(value).__name__
    }


class Watched(zoo.Logits):
    """Calls a part of each child; the user has compiled one."""

    def __init__(self):
        super().__init__(holder=Wrapper, loss=lambda: Wrapper(zoo.WithParameters()), outer=lambda: Wrapper(Wrapper()))
        self.plain = nn.Sequential(nn.Softplus())
        self.graphs, self.seen = [], {True: [], False: []}
        self.outer.net.compile(backend=lambda graph, inputs: self.graphs.append(graph) or graph)

    def logits(self, x):
        self.seen[self.trainer.training].append(slots(self, "CallProbe"))
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


@pytest.mark.codegen
def test_a_run_without_a_baseline_equals_torch_compile_from_the_first_step_on():
    runs = []
    for by_hand in (False, True):
        torch._dynamo.reset()
        counters.clear()
        # torch 2.11 compiles nothing of the call of a Sequential
        module = seeded(lambda: Classifier(Wrapper(zoo.convolutional())))
        module.configure_optimizers = lambda module=module: AdamW(module.parameters(), lr=0.01)
        ours = InductorCompile("default", None, baseline_steps=0, verify="raise", on_error="raise")
        graphs = []
        count = LambdaCallback(on_train_batch_end=lambda *_, **__: graphs.append(counters["stats"]["unique_graphs"]))  # noqa: B023
        if by_hand:
            module.net.compile()
        trainer(*[ours] * (not by_hand), count).fit(module, loader(10))
        assert graphs == [1] * 10
        runs.append([module.losses, dict(module.state_dict())])
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_a_search_that_raises_costs_a_target_and_not_the_run(monkeypatch):
    monkeypatch.setattr("compile_callbacks.calls.target_search.possible_callees", lambda root: 1 / 0)
    with pytest.warns(CompileWarning) as caught:
        assert len(fit(InductorCompile(None, verify="off"), validation=2).losses) == 8
    assert any("could not be made a target: ZeroDivisionError" in str(warning.message) for warning in caught)


def test_with_fullgraph_the_first_call_may_be_within_a_dispatch_mode(compiled):
    net = compiled(mlp(), {"fullgraph": True})
    with FlopCounterMode(display=False):
        net(torch.ones(4, FEATURES))
    net(torch.ones(4, FEATURES))
    assert report_of(net).train.graphs == 1
