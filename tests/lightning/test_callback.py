"""`InductorCompile` under a real Trainer: phases, results, and what is left behind."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch._inductor.config
from torch import nn

from compile_callbacks import CompileWarning, GraphPass, InductorCompile, InductorConfig, graph_pass
from tests.support.models import ChildOnly, Classifier, loader, mlp, seeded, trainer

pytestmark = pytest.mark.all_versions


class Recorder(GraphPass):
    """Writes down phase, flag and an option in force, at each graph; never cached, so that it always runs."""

    def __init__(self):
        self.log = []

    def __call__(self, graph, is_inference):
        self.log.append((self.phase, is_inference, torch._inductor.config.epilogue_fusion))

    def uuid(self):
        return None


def graphs(callback):
    return callback.report.train.graphs, callback.report.infer.graphs


def test_passes_see_phase_flag_and_options_of_fit_and_predict():
    recorder = Recorder()
    callback = InductorCompile(
        train_mode={"options": {"epilogue_fusion": False}},
        infer_mode="default",
        passes=[recorder],
        baseline_steps=0,
    )
    module = Classifier()
    trainer(callback, num_sanity_val_steps=0).fit(module, loader(), loader(2))
    assert recorder.log == [("train", False, False), ("train", False, False), ("infer", True, True)]
    recorder.log.clear()
    trainer(callback).predict(module, loader(2))
    assert recorder.log == [("infer", True, True)]


def test_passes_of_a_config_run_in_its_phase_alone_after_those_of_the_callback():
    order = []

    @graph_pass
    def both(graph, is_inference):
        order.append("both")

    @graph_pass
    def infer_only(graph, is_inference):
        order.append("infer_only")

    callback = InductorCompile("default", InductorConfig(passes=[infer_only]), passes=[both], baseline_steps=0)
    trainer(callback, num_sanity_val_steps=0).fit(ChildOnly(), loader(2), loader(2))
    assert order == ["both", "both", "both", "infer_only"]


def test_every_entry_point_in_any_order_compiles_once_a_phase():
    callback = InductorCompile(baseline_steps=0)
    module = Classifier()
    trainer(callback).validate(module, loader(2), verbose=False)
    trainer(callback).predict(module, loader(2))
    assert graphs(callback) == (0, 1)
    one = trainer(callback, num_sanity_val_steps=0)
    one.fit(module, loader(2))
    one.test(module, loader(2), verbose=False)
    one.fit(module, loader(2))
    assert graphs(callback) == (1, 1)


def test_another_module_begins_anew():
    callback = InductorCompile(baseline_steps=0)
    for _ in range(2):
        trainer(callback).fit(Classifier(), loader(2))
        assert graphs(callback) == (1, 0)


@pytest.mark.parametrize(("modes", "expected"), [((None, "default"), (0, 1)), (("default", "eager"), (1, 0))])
def test_a_phase_can_be_left_eager(modes, expected):
    callback = InductorCompile(*modes, baseline_steps=0)
    trainer(callback).fit(Classifier(), loader(2), loader(2))
    assert graphs(callback) == expected
    assert [callback.report.train.mode, callback.report.infer.mode] == [m or "user" for m in modes]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_made_while_training_follow_their_own_weights(duplicate):
    answers = []

    class Copier(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            module, trainer_ = pl_module, pl_module._trainer
            module._trainer = None  # a Trainer cannot be pickled
            twin = duplicate(module)
            module._trainer = trainer_
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
                answers.append((twin(torch.ones(2, 8)).abs().sum() + twin.net(torch.ones(2, 8)).abs().sum()).item())

    trainer(InductorCompile(baseline_steps=0), Copier()).fit(Classifier(), loader(3))
    assert answers == [0.0, 0.0, 0.0]


def test_keep_compiled_leaves_the_module_compiled_by_grad_mode():
    callback = InductorCompile(baseline_steps=0, keep_compiled=True)
    module = Classifier()
    trainer(callback).fit(module, loader(2))
    reference = copy.deepcopy(module)
    x = torch.randn(4, 8)
    torch.testing.assert_close(module(x), reference(x))
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), reference.eval()(x))
    assert "_compiled_call_impl" in vars(module)
    trainer(callback).validate(module, loader(2), verbose=False)
    callback.keep_compiled = False
    trainer(callback).validate(module, loader(2), verbose=False)
    assert "_compiled_call_impl" not in vars(module)


class Runs(pl.Callback):
    """Runs the model where Lightning's model summary and a logger's graph do, and keeps what is traced."""

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
        assert callback.report.train.graphs == 1
        assert callback.report.infer.graphs == 0
        assert len(runs.traced) == 3
        eager = copy.deepcopy(module.net)
        torch.testing.assert_close(runs.traced[-1](torch.ones(4, 8)), eager(torch.ones(4, 8)))
    callback.keep_compiled = False
    trainer(callback).validate(module, loader(2), verbose=False)


class Silent(Classifier):
    """Its net runs, and nothing of it can be compiled."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        @torch._dynamo.disable
        def forward(self, x):
            return self.inner(x)

    def __init__(self) -> None:
        super().__init__(self.Net())

    def validation_step(self, batch, batch_idx):
        pass


def test_a_target_that_ran_uncompiled_is_warned_about_by_name():
    with pytest.warns(CompileWarning, match=r"target 'net' ran in the train phase without a compiled graph: .*disable"):
        trainer(InductorCompile(baseline_steps=0)).fit(Silent(), loader(2))


def test_a_target_that_did_not_run_is_not_warned_about():
    class Unused(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2)

    trainer(InductorCompile(baseline_steps=0)).fit(Unused(), loader(2), loader(2))


def test_a_target_that_matches_nothing_is_refused_before_training():
    module = Classifier()
    with pytest.raises(ValueError, match="targets='nett' is unknown; did you mean 'net'"):
        trainer(InductorCompile(targets=["nett"])).fit(module, loader(2))
    assert module.losses == []


def test_training_step_can_be_a_target():
    class Plain(Classifier):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    callback = InductorCompile(targets=["training_step"], baseline_steps=0)
    module = seeded(Plain)
    trainer(callback).fit(module, loader(4))
    reference = seeded(Plain)
    trainer().fit(reference, loader(4))
    assert callback.report.train.targets == ("training_step",)
    assert callback.report.train.graphs >= 1
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrap", ["child", "module"])
def test_what_was_compiled_by_hand_is_taken_over_with_one_message(wrap, caplog):
    module = Classifier(torch.compile(mlp())) if wrap == "child" else torch.compile(Classifier())
    callback = InductorCompile(baseline_steps=0)
    with caplog.at_level(logging.INFO):
        trainer(callback).fit(module, loader(2), loader(2))
    assert graphs(callback) == (1, 1)
    assert len([r for r in caplog.records if "replaces your torch.compile of" in r.getMessage()]) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (
            {"train_mode": "max-autotun"},
            ValueError,
            ["train_mode='max-autotun'", "did you mean 'max-autotune'"],
        ),
        ({"infer_mode": 3}, TypeError, ["infer_mode=3"]),
        ({"targets": 3}, TypeError, ["targets=3"]),
        ({"targets": []}, ValueError, ["targets"]),
        ({"passes": [3]}, TypeError, ["passes", "3"]),
        ({"baseline_steps": -1}, ValueError, ["baseline_steps=-1"]),
        ({"baseline_steps": 1.5}, TypeError, ["baseline_steps=1.5"]),
        ({"baseline_steps": True}, TypeError, ["baseline_steps=True"]),
        ({"on_error": "eagre"}, ValueError, ["on_error='eagre'", "did you mean 'eager'", "'raise'"]),
        ({"on_error": None}, ValueError, ["on_error=None"]),
        ({"verify": True}, ValueError, ["verify=True"]),
        ({"new_shapes": "warning"}, ValueError, ["new_shapes='warning'"]),
        ({"keep_compiled": "yes"}, TypeError, ["keep_compiled='yes'"]),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, error, said):
    with pytest.raises(error) as caught:
        InductorCompile(**arguments)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize("idle", [{"keep_compiled": True}, {"passes": [Recorder()]}])
def test_a_setting_without_effect_is_warned_about(idle):
    with pytest.warns(CompileWarning, match=f"{next(iter(idle))} has no effect"):
        InductorCompile(None, "eager", **idle)
