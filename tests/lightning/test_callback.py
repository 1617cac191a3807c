"""`InductorCompile` under a real Trainer: arguments, hooks, the order of runs, and calls that run eagerly."""

from __future__ import annotations

import copy
import gc
import inspect
import re
import weakref

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from compile_callbacks import CompileWarning, InductorCompile
from tests.cases.case import Case, check, net
from tests.cases.zoo import Calls, TwoParts, convolutions, critic, logits, smooth
from tests.support.models import Classifier, fit, loader, mlp, seeded, trainer
from tests.support.passes import Uncached
from tests.support.step_times import Times

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


class Copier(pl.Callback):
    """Runs a copy of the module with other weights after each training step."""

    def __init__(self):
        self.answers = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        twin, x = copy.deepcopy(pl_module), torch.ones(2, 8)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
            self.answers.append((twin(x).abs().sum() + twin.net(x).abs().sum()).item())


def test_every_entry_point_in_any_order_compiles_once_a_phase():
    callback, copier, module = InductorCompile(baseline_steps=0), Copier(), Classifier()
    graphs = lambda: (callback.report.train.graphs, callback.report.infer.graphs)  # noqa: E731
    trainer(callback).validate(module, loader(2), verbose=False)
    trainer(callback).predict(module, loader(2))
    assert graphs() == (0, 1)
    one = trainer(callback, copier, num_sanity_val_steps=0)
    one.fit(module, loader(3))
    one.test(module, loader(2), verbose=False)
    one.fit(module, loader(3))
    assert graphs() == (1, 1)
    assert copier.answers == [0.0] * 3
    trainer(callback).fit(Classifier(), loader(2))
    assert graphs() == (1, 0)  # another module starts a new report
    earlier = [weakref.ref(one), weakref.ref(module)]
    del one, module, copier  # Lightning gives each callback the `log` of the module
    gc.collect()
    assert [reference() for reference in earlier] == [None, None]


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_at_most_half_of_the_steps_of_a_short_call_are_eager(call):
    callback = InductorCompile(None, "default")
    getattr(trainer(callback), call)(Classifier(), loader(8))
    assert callback.report.infer.diagnostics.steps == {"compiled": 4}


@pytest.mark.parametrize(
    ("accelerator", "mode"), [("cpu", "default"), pytest.param("gpu", "reduce-overhead", marks=pytest.mark.gpu)]
)
def test_two_runs_with_a_deterministic_trainer_are_bit_equal(accelerator, mode):
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        callback = InductorCompile(mode, mode)
        settings = {"max_epochs": 2, "deterministic": True, "accelerator": accelerator}
        try:
            module = fit(callback, make=net(convolutions), train=20, validation=16, **settings)
        finally:
            torch.use_deterministic_algorithms(False)
        assert (callback.report.train.graphs, callback.report.infer.graphs) == (1, 1)
        runs.append((module.losses, module.validation_outputs, module.state_dict()))
    torch.testing.assert_close(*runs, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------ hooks

HOOKS = re.compile(
    "on_|configure_(?!sharded)|optimizer_|transfer_|prepare_data|setup|teardown|backward|lr_sched|.*_(step|dataloader)$"
)


def record_calls(names, owner):
    """Record the calls of the hooks, steps and loaders of an object."""

    def recorded(name, function):
        return lambda *args, **kwargs: (names.append(f"{type(owner).__name__}.{name}"), function(*args, **kwargs))[1]

    for name in filter(HOOKS.match, dir(type(owner))):
        of_data = isinstance(owner, pl.LightningModule) and name.endswith(("_dataloader", "_transfer", "_to_device"))
        if inspect.isfunction(getattr(type(owner), name)) and not of_data:
            object.__setattr__(owner, name, recorded(name, getattr(owner, name)))


def recorded_names(*callbacks):
    """Every call of a hook or a forward in the four kinds of runs."""
    names, module = [], Classifier(Calls(mlp(), lambda net, x: record("net forward") or net(x)))
    record = torch.compiler.disable(names.append)  # Dynamo would guard on the length of the list
    module.register_forward_hook(lambda *args: record("forward"))
    data, before, after = pl.LightningDataModule(), pl.Callback(), pl.Callback()
    data.train_dataloader = lambda: loader(4)
    data.val_dataloader = data.test_dataloader = data.predict_dataloader = lambda: loader(2)
    for owner in (module, data, before, after):
        record_calls(names, owner)
    for stage in ("fit", "validate", "test", "predict"):
        names.append(stage)
        run = trainer(before, *callbacks, after, max_epochs=2, num_sanity_val_steps=1, enable_checkpointing=True)
        getattr(run, stage)(module, datamodule=data)
    return names


def test_hooks_and_forward_calls_are_those_of_a_run_without_the_callback():
    callback = InductorCompile(baseline_steps=2)
    names = recorded_names(callback)
    assert names == recorded_names()
    assert {"net forward", "forward", "Classifier.on_save_checkpoint", "Callback.on_predict_end"} <= set(names)
    assert callback.report.infer.graphs > 0


# ------------------------------------------------------------------------------------------ eager calls


def test_steps_with_a_target_left_eager_are_compiled_and_its_calls_are_counted(monkeypatch):
    Times(monkeypatch, train={"eager": 12, None: 10})
    calls = {"train.diagnostics.steps": {"compiled": 28}, "train.diagnostics.eager_calls": {"critic": 28}}
    expect = {**calls, "train.fallbacks": 1, "train.speedup": pytest.approx(1.2)}
    settings = {"train": (4,) * 40, "validation": None, "predict": None, "codes": ("CC303",), "expect": expect}
    settings["callback"] = {"baseline_steps": 10, "infer_mode": None}
    # The gradients of the critic are differentiated, as in a WGAN-GP, and not those of the network.
    penalized = lambda m, x: m.net(x) * critic(m.critic, x.clone().requires_grad_(), None)  # noqa: E731
    report = check(Case(name="a critic", make=logits(penalized, critic=smooth), **settings)).report
    assert "train: 28 calls of critic ran eagerly" in str(report)
    assert {part["kind"] for part in report.train.diagnostics.series} >= {"eager", "compiled"}


# ------------------------------------------------------------------------------------------ arguments


def test_a_setting_without_effect_is_warned_about_at_the_users_line():
    for name, value in (("keep_compiled", True), ("passes", [Uncached()])):
        with pytest.warns(CompileWarning, match=f"{name} has no effect") as caught:
            InductorCompile(None, "eager", **{name: value})
        assert caught[0].filename == __file__
    with pytest.warns(CompileWarning, match="keep_compiled leaves the train phase eager"):
        fit(InductorCompile("auto", None, keep_compiled=True), train=4)


def test_wrong_targets_and_a_second_callback_are_refused_before_the_run():
    for targets, error, message in (
        ([["heed"]], ValueError, "targets='heed' is unknown; did you mean 'head'"),
        ([None, ["head"]], MisconfigurationException, r"more than one InductorCompile.*\['encoder', 'head'\]"),
    ):
        module = seeded(TwoParts)
        with pytest.raises(error, match=message):
            trainer(*[InductorCompile(targets=names) for names in targets]).fit(module, loader(2))
        assert module.losses == []
        assert not module._load_state_dict_pre_hooks
