"""`InductorCompile` under a real Trainer: phases, copies, runs outside of steps, and modules that the user compiled."""

from __future__ import annotations

import copy
import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile, compile_phases
from tests.support.models import FEATURES, Classifier, Wrapper, fit, loader, mlp, seeded, trainer
from tests.support.uncached import Uncached

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]


def graphs(callback):
    return callback.report.train.graphs, callback.report.infer.graphs


def test_every_entry_point_in_any_order_compiles_once_a_phase():
    callback, module = InductorCompile(baseline_steps=0), Classifier()
    trainer(callback).validate(module, loader(2), verbose=False)
    trainer(callback).predict(module, loader(2))
    assert graphs(callback) == (0, 1)
    one = trainer(callback, num_sanity_val_steps=0)
    one.fit(module, loader(2))
    one.test(module, loader(2), verbose=False)
    one.fit(module, loader(2))
    assert graphs(callback) == (1, 1)
    trainer(callback).fit(Classifier(), loader(2))
    assert graphs(callback) == (1, 0)  # another module starts a new report


def test_a_copy_made_while_training_uses_its_own_weights():
    answers = []

    class Copier(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            twin = copy.deepcopy(pl_module)
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
                answers.append((twin(torch.ones(2, 8)).abs().sum() + twin.net(torch.ones(2, 8)).abs().sum()).item())

    trainer(InductorCompile(baseline_steps=0), Copier()).fit(Classifier(), loader(3))
    assert answers == [0.0, 0.0, 0.0]


class Uncompilable(Wrapper):
    forward = torch._dynamo.disable(Wrapper.forward)


def test_a_target_that_ran_uncompiled_is_warned_about_by_name():
    message = "target 'net' ran in the train phase without a compiled graph: .*disable"
    with pytest.warns(CompileWarning, match=message) as caught:
        trainer(InductorCompile("default", None, baseline_steps=0)).fit(Classifier(Uncompilable()), loader(2))
    assert [each.filename for each in caught if each.category is CompileWarning] == [__file__]


# ------------------------------------------------------------------------------------------ compiled by the user


class Backend:
    """A backend that counts the calls of its graphs, by grad mode."""

    def __init__(self) -> None:
        self.calls = {"train": 0, "infer": 0}

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls["train" if torch.is_grad_enabled() else "infer"] += 1
            return graph.forward(*args)

        return call


class PlainStep(Classifier):
    """Its network has its own forward: torch 2.11 compiles nothing of a module of torch.nn that is compiled itself."""

    def __init__(self) -> None:
        super().__init__(Wrapper())

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_training_step_can_be_a_target():
    callback = InductorCompile(targets=["training_step"], baseline_steps=0)
    module, reference = (fit(*ours, make=PlainStep, validation=None) for ours in ([callback], []))
    assert callback.report.train.targets == ("training_step",)
    assert callback.report.train.graphs >= 1
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-6)


def compiled_by_user(how, backend):
    module = seeded(PlainStep)
    if how == "module":
        return torch.compile(module, backend=backend)
    if how == "in place":
        module.net.compile(backend=backend)
    else:
        module.net = torch.compile(module.net, backend=backend)
    return module


@pytest.mark.parametrize(
    ("how", "mode", "shown"),
    [
        ("in place", None, "eager"),
        ("wrapped", None, "eager"),
        ("wrapped", "eager", "eager"),
        ("in place", "default", "default"),
        ("module", "default", "default"),
    ],
)
def test_an_uncompiled_phase_runs_the_users_compiled_module(how, mode, shown, caplog):
    backend = Backend()
    module = compiled_by_user(how, backend)
    callback = InductorCompile(mode, "default", baseline_steps=0)
    assert callback.report.train.mode == shown
    with caplog.at_level(logging.INFO):
        trainer(callback, num_sanity_val_steps=0).fit(module, loader(6), loader(3))
    plain = fit(make=PlainStep, train=6)
    assert (callback.report.train.mode, callback.report.infer.mode) == (shown, "default")
    assert graphs(callback) == (int(mode == "default"), 1)
    assert backend.calls == {"train": 0 if mode == "default" else 6, "infer": 0}
    assert len([r for r in caplog.records if "replaces your torch.compile of" in r.getMessage()]) == (how != "in place")
    torch.testing.assert_close(list(module.parameters()), list(plain.parameters()))
    if how != "module":
        assert list(module.state_dict()) == list(plain.state_dict())
        module.net(torch.ones(2, FEATURES))
        assert backend.calls["train"] == (1 if mode == "default" else 7)  # after the run, it is compiled as before


@pytest.mark.parametrize("mode", [None, "eager"])
def test_compile_phases_runs_an_uncompiled_phase_as_the_user_compiled_it(mode):
    backend, net = Backend(), Wrapper()
    net.compile(backend=backend)
    compile_phases(net, train_mode=mode)
    net(torch.ones(2, FEATURES))
    with torch.no_grad():
        net(torch.ones(2, FEATURES))
    assert backend.calls == {"train": 1, "infer": 0}
    assert type(net) is Wrapper


# ------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"train_mode": "max-autotun"}, ValueError, "train_mode='max-autotun' is unknown; did you mean 'max-autotune'"),
        ({"train_mode": "none"}, ValueError, "'none' is unknown. Choices: 'default'.*'auto', 'eager', None. `compile"),
        ({"train_mode": False}, TypeError, "train_mode=False .*'eager' does not compile the phase.*CC202"),
        ({"mode": "lite"}, TypeError, r"InductorCompile\(train_mode='lite', infer_mode='lite'\).*CC201"),
        ({"backend": "inductor"}, TypeError, r"Set the modes: InductorCompile\(train_mode=..., infer_mode=...\)"),
        ({"dynamic": True}, TypeError, r"InductorCompile\(train_mode={'dynamic': True}\)"),
        ({"trace_dir": "trace"}, TypeError, "has no argument 'trace_dir'. Write TORCH_TRACE=folder python train.py"),
        ({"new_shapes": "raise"}, TypeError, "has no argument 'new_shapes'. A call .* runs eagerly"),
        ({"train_mode": {"mode": "lite", "options": {"max_autotune": True}}}, ValueError, "train_mode: .*options"),
        ({"targets": []}, ValueError, "targets"),
        ({"baseline_steps": -1}, ValueError, "baseline_steps=-1"),
        ({"verify": False}, ValueError, "verify=False .*verify='off' compares nothing"),
    ],
)
def test_wrong_arguments_are_refused_with_those_that_work(arguments, error, message):
    for function in (InductorCompile, compile_phases):
        if function is compile_phases and "baseline_steps" in arguments:
            continue
        given = (mlp(),) if function is compile_phases else ()
        with pytest.raises(error, match=message.replace("InductorCompile", function.__name__)):
            function(*given, **arguments)


@pytest.mark.parametrize("ineffective", [{"keep_compiled": True}, {"passes": [Uncached()]}])
def test_a_setting_without_effect_is_warned_about_at_the_users_line(ineffective):
    with pytest.warns(CompileWarning, match=f"{next(iter(ineffective))} has no effect") as caught:
        InductorCompile(None, "eager", **ineffective)
    assert caught[0].filename == __file__


def test_a_target_that_matches_nothing_is_refused_before_training():
    module = Classifier()
    with pytest.raises(ValueError, match="targets='nett' is unknown; did you mean 'net'"):
        trainer(InductorCompile(targets=["nett"])).fit(module, loader(2))
    assert module.losses == []
