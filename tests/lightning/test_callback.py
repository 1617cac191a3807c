"""`InductorCompile` under a real Trainer: phases, copies, runs outside of steps, and modules that the user compiled."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._inductor.config
from torch import nn

from compile_callbacks import CompileWarning, GraphPass, InductorCompile, InductorConfig, compile_phases
from tests.support.models import FEATURES, Classifier, loader, mlp, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go")]


class Recorder(GraphPass):
    """Records its name, the phase, ``is_inference`` and an option for each graph; never cached, so that it runs."""

    def __init__(self, log, whose=""):
        self.log, self.whose = log, whose

    def __call__(self, graph, is_inference):
        self.log.append((self.whose, self.phase, is_inference, torch._inductor.config.epilogue_fusion))

    def uuid(self):
        return None


def graphs(callback):
    return callback.report.train.graphs, callback.report.infer.graphs


def test_each_phase_compiles_with_its_options_and_passes():
    log = []
    callback = InductorCompile(
        train_mode={"options": {"epilogue_fusion": False}},
        infer_mode=InductorConfig(passes=[Recorder(log, "infer only")]),
        passes=[Recorder(log, "both")],
        baseline_steps=0,
    )
    module = Classifier()
    trainer(callback, num_sanity_val_steps=0).fit(module, loader(), loader(2))
    in_train, in_infer = (
        ("both", "train", False, False),
        [("both", "infer", True, True), ("infer only", "infer", True, True)],
    )
    assert log == [in_train, in_train, *in_infer]  # forward and backward
    log.clear()
    trainer(callback).predict(module, loader(2))
    assert log == in_infer


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


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_made_while_training_use_their_own_weights(duplicate):
    answers = []

    class Copier(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            own_trainer, pl_module._trainer = pl_module._trainer, None  # a Trainer cannot be pickled
            twin = duplicate(pl_module)
            pl_module._trainer = own_trainer
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
                answers.append((twin(torch.ones(2, 8)).abs().sum() + twin.net(torch.ones(2, 8)).abs().sum()).item())

    trainer(InductorCompile(baseline_steps=0), Copier()).fit(Classifier(), loader(3))
    assert answers == [0.0, 0.0, 0.0]


class Runs(pl.Callback):
    """Runs the model where Lightning's model summary and a logger's graph do, and keeps the traced modules."""

    def on_fit_start(self, trainer, pl_module):
        pl_module(torch.ones(4, 8))
        self.traced = [self.trace(pl_module)]

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.traced.append(self.trace(pl_module))

    @staticmethod
    def trace(pl_module):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer torch: torch.jit is deprecated
            return torch.jit.trace(pl_module.net, torch.ones(4, 8), check_trace=False)  # a check runs it, compiled


@pytest.mark.parametrize("keep_compiled", [False, True])
def test_a_model_that_runs_before_its_training_or_is_traced_runs_eagerly(keep_compiled):
    callback, runs, module = InductorCompile(baseline_steps=0, keep_compiled=keep_compiled), Runs(), Classifier()
    for _ in range(2):
        trainer(callback, runs, num_sanity_val_steps=0).fit(module, loader(2))
        assert callback.report.train.verified == "equal 1"
        assert graphs(callback) == (1, 0)
        eager = copy.deepcopy(module.net)
        torch.testing.assert_close(runs.traced[-1](torch.ones(4, 8)), eager(torch.ones(4, 8)))
    reference, x = copy.deepcopy(module), torch.randn(4, 8)
    torch.testing.assert_close(module(x), reference(x))
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), reference.eval()(x))
    assert ("_compiled_call_impl" in vars(module)) == keep_compiled
    callback.keep_compiled = False
    trainer(callback).validate(module, loader(2), verbose=False)
    assert "_compiled_call_impl" not in vars(module)


class Uncompilable(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    @torch._dynamo.disable
    def forward(self, x):
        return self.inner(x)


class OneUnused(Classifier):
    def __init__(self) -> None:
        super().__init__(Uncompilable())
        self.spare = nn.Linear(2, 2)


def test_a_target_that_ran_uncompiled_is_warned_about_by_name():
    with pytest.warns(CompileWarning) as caught:
        trainer(InductorCompile("default", None, baseline_steps=0)).fit(OneUnused(), loader(2))
    (warning,) = [warning for warning in caught if warning.category is CompileWarning]
    assert str(warning.message).startswith("target 'net' ran in the train phase without a compiled graph: ")
    assert "disable" in str(warning.message)
    assert warning.filename == __file__


def test_training_step_can_be_a_target():
    class Plain(Classifier):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    callback = InductorCompile(targets=["training_step"], baseline_steps=0)
    module, reference = seeded(Plain), seeded(Plain)
    trainer(callback).fit(module, loader(4))
    trainer().fit(reference, loader(4))
    assert callback.report.train.targets == ("training_step",)
    assert callback.report.train.graphs >= 1
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


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


class Net(nn.Module):
    """A network with its own forward: torch 2.11 compiles nothing of a module of torch.nn that is compiled itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class PlainStep(Classifier):
    def __init__(self) -> None:
        super().__init__(Net())

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def compiled_by_user(how, backend):
    module = seeded(PlainStep)
    if how == "module":
        return torch.compile(module, backend=backend)
    if how == "in place":
        module.net.compile(backend=backend)
    else:
        module.net = torch.compile(module.net, backend=backend)
    return module


@pytest.mark.parametrize("how", ["in place", "wrapped", "module"])
@pytest.mark.parametrize(("mode", "shown"), [(None, "user"), ("eager", "eager"), ("default", "default")])
def test_a_phase_with_mode_none_runs_the_users_compiled_module(how, mode, shown, caplog):
    backend = Backend()
    module, plain = compiled_by_user(how, backend), seeded(PlainStep)
    callback = InductorCompile(mode, "default", baseline_steps=0)
    assert callback.report.train.mode == shown
    with caplog.at_level(logging.INFO):
        trainer(callback, num_sanity_val_steps=0).fit(module, loader(6), loader(3))
    trainer(num_sanity_val_steps=0).fit(plain, loader(6), loader(3))
    assert (callback.report.train.mode, callback.report.infer.mode) == (shown, "default")
    assert graphs(callback) == (int(mode == "default"), 1)
    assert backend.calls == {"train": 6 if mode is None else 0, "infer": 0}
    assert len([r for r in caplog.records if "replaces your torch.compile of" in r.getMessage()]) == (how != "in place")
    torch.testing.assert_close(list(module.parameters()), list(plain.parameters()))
    if how != "module":
        assert list(module.state_dict()) == list(plain.state_dict())
        module.net(torch.ones(2, FEATURES))
        assert backend.calls["train"] == (7 if mode is None else 1)  # after the run, it is compiled as before


def test_two_modes_none_change_nothing():
    backend = Backend()
    module = compiled_by_user("wrapped", backend)
    wrapper, callback = module.net, InductorCompile(None, None)
    trainer(callback, num_sanity_val_steps=0).fit(module, loader(4), loader(2))
    assert (callback.report.train.mode, callback.report.infer.mode) == ("user", "user")
    assert module.net is wrapper
    assert backend.calls == {"train": 4, "infer": 2}


def test_compile_phases_leaves_a_phase_with_mode_none_alone():
    backend, net = Backend(), Net()
    net.compile(backend=backend)
    compile_phases(net, train_mode=None)
    net(torch.ones(2, FEATURES))
    with torch.no_grad():
        net(torch.ones(2, FEATURES))
    assert backend.calls == {"train": 1, "infer": 0}
    assert type(net) is Net


# ------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"train_mode": "max-autotun"}, ValueError, "train_mode='max-autotun' is unknown; did you mean 'max-autotune'"),
        ({"infer_mode": 3}, TypeError, "infer_mode=3"),
        ({"train_mode": False}, TypeError, "train_mode=False .*'eager' runs .*None leaves the phase alone.*CC202"),
        ({"mode": "lite"}, TypeError, r"InductorCompile\(train_mode='lite', infer_mode='lite'\).*CC201"),
        ({"backend": "inductor"}, TypeError, r"Choose the settings: InductorCompile\(train_mode=..., infer_mode=...\)"),
        ({"dynamic": True}, TypeError, r"InductorCompile\(train_mode={'dynamic': True}\)"),
        ({"new_shape": "raise"}, TypeError, "has no argument 'new_shape'. Did you mean 'new_shapes'"),
        ({"train_mode": {"mode": "lite", "options": {"max_autotune": True}}}, ValueError, "train_mode: .*options"),
        ({"targets": 3}, TypeError, "targets=3"),
        ({"targets": []}, ValueError, "targets"),
        ({"passes": [3]}, TypeError, "passes.*3"),
        ({"baseline_steps": -1}, ValueError, "baseline_steps=-1"),
        ({"baseline_steps": 1.5}, TypeError, "baseline_steps=1.5"),
        ({"baseline_steps": True}, TypeError, "baseline_steps=True"),
        ({"on_error": "eagre"}, ValueError, "on_error='eagre' is unknown; did you mean 'eager'?"),
        ({"verify": False}, ValueError, "verify=False .*verify='off' compares nothing"),
        ({"new_shapes": "warning"}, ValueError, "new_shapes='warning'"),
        ({"keep_compiled": "yes"}, TypeError, "keep_compiled='yes'"),
    ],
)
def test_wrong_arguments_are_refused_with_those_that_work(arguments, error, message):
    for function in (InductorCompile, compile_phases):
        if function is compile_phases and arguments.keys() & {"baseline_steps", "keep_compiled"}:
            continue
        given = (mlp(),) if function is compile_phases else ()
        with pytest.raises(error, match=message.replace("InductorCompile", function.__name__)):
            function(*given, **arguments)


@pytest.mark.parametrize("ineffective", [{"keep_compiled": True}, {"passes": [Recorder([])]}])
def test_a_setting_without_effect_is_warned_about_at_the_users_line(ineffective):
    with pytest.warns(CompileWarning, match=f"{next(iter(ineffective))} has no effect") as caught:
        InductorCompile(None, "eager", **ineffective)
    assert caught[0].filename == __file__


def test_a_target_that_matches_nothing_is_refused_before_training():
    module = Classifier()
    with pytest.raises(ValueError, match="targets='nett' is unknown; did you mean 'net'"):
        trainer(InductorCompile(targets=["nett"])).fit(module, loader(2))
    assert module.losses == []


def test_repr_shows_the_modes_and_the_arguments_that_differ_from_their_defaults():
    assert repr(InductorCompile()) == "InductorCompile(train_mode='default', infer_mode='default')"
    ours = InductorCompile("auto", None, targets=["net"], verify="off", keep_compiled=True)
    assert repr(ours) == (
        "InductorCompile(train_mode='auto', infer_mode=None, targets=['net'], verify='off', keep_compiled=True)"
    )
