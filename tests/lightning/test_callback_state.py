"""The callback's state in a checkpoint and in copies of the callback."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder

from compile_callbacks import InductorCompile
from tests.support.models import loader, seeded, trainer

pytestmark = pytest.mark.all_versions

KEY = "compile_callbacks"


def fit(ours, ckpt_path=None, epochs=1, **settings):
    run = trainer(ours, max_epochs=epochs, num_sanity_val_steps=0, **settings)
    run.fit(seeded(), loader(20), ckpt_path=ckpt_path)
    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The checkpoint of a fit, as data."""
    path = tmp_path_factory.mktemp("run") / "run.ckpt"
    fit(InductorCompile(baseline_steps=4, verify="off")).save_checkpoint(path)
    return torch.load(path, weights_only=True)


def resumed(checkpoint, tmp_path, change):
    """The report of a fit that resumes the checkpoint after a change of the callback's state."""
    changed = copy.deepcopy(checkpoint)
    changed[KEY] = change(changed[KEY])
    torch.save(changed, tmp_path / "changed.ckpt")
    ours = InductorCompile(baseline_steps=4, verify="off")
    fit(ours, tmp_path / "changed.ckpt", epochs=2)
    assert ours.report.train.graphs == 1
    str(ours.report)
    return ours.report


def of_state(change):
    def of_checkpoint(states):
        for state in states.values():
            change(state)
        return states

    return of_checkpoint


def replaced(name, value):
    return of_state(lambda state: state.update({name: value}))


def test_a_resumed_run_has_the_earlier_report_and_baseline(checkpoint, tmp_path):
    report = resumed(checkpoint, tmp_path, replaced("of a later version", {"a": 1}))
    assert report.before.train.graphs == 1
    assert report.train.diagnostics.restored
    eager = [step for one in report.train.diagnostics.series if one["kind"] == "eager" for step in one["steps"]]
    assert eager == [1]  # in which the callback finds its targets


@pytest.mark.parametrize(
    "change",
    [
        lambda states: [1],
        lambda states: dict.fromkeys(states, 3),
        of_state(dict.clear),
        replaced("version", 99),
        replaced("report", [[1]]),
        replaced("baselines", None),
        of_state(lambda state: state.pop("device")),
        replaced("winners", {"train": 5, 7: "x"}),
        replaced("baselines", {"train": [[["train", "kind", [["wide"]]], [1.0] * 9]]}),
        replaced("baselines", {"train": [[["train", "kind", [[4]]], [float("nan")] * 9]]}),
        replaced("baselines", {"train": [[["train", "kind", [[4]]], [10**400]]]}),
        replaced("baselines", {"train": [[["train", "kind", [[4]], "more"], [1.0]]]}),
    ],
    ids=[
        "list",
        "number",
        "empty",
        "version",
        "report",
        "baselines",
        "device",
        "winners",
        "shape",
        "nan",
        "huge",
        "long",
    ],
)
def test_a_state_of_another_form_costs_its_figures(checkpoint, tmp_path, change, request):
    report = resumed(checkpoint, tmp_path, change)
    changed = request.node.callspec.id
    assert bool(report.train.diagnostics.restored) == (changed in ("report", "winners"))
    assert (report.before is None) == (changed in ("list", "number", "empty", "version", "report"))


def test_a_checkpoint_that_is_loaded_within_a_run_is_no_resume():
    ours = InductorCompile(baseline_steps=2)
    run = trainer(ours, LearningRateFinder(num_training_steps=4, update_attr=False), max_epochs=1)
    module = seeded()
    module.lr = 0.1
    run.fit(module, loader(20))
    assert ours.report.before is None
    assert ours.report.train.diagnostics.restored == ()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_the_report_of_a_copy_that_ran_is_that_of_the_original(copied):
    ours = InductorCompile(baseline_steps=0)
    twin = copied(ours)
    fit(twin)
    assert ours.report == twin.report
    assert ours.report.train.graphs == 1


def test_the_report_of_a_callback_that_ran_is_its_own():
    ours = InductorCompile(baseline_steps=0)
    twin = copy.deepcopy(ours)
    fit(ours)
    trainer(twin).validate(seeded(), loader(2), verbose=False)
    assert (ours.report.train.graphs, ours.report.infer.graphs) == (1, 0)
    assert (twin.report.train.graphs, twin.report.infer.graphs) == (0, 1)


def test_a_pickle_of_a_callback_starts_without_a_report():
    ours = InductorCompile(baseline_steps=0)
    fit(ours)
    assert pickle.loads(pickle.dumps(ours)).report.train.graphs == 0
