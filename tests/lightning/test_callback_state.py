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
    report = resumed(checkpoint, tmp_path, lambda states: states)
    assert report.before.train.graphs == 1
    assert report.train.diagnostics.restored
    series = report.train.diagnostics.series
    eager = [step for of_kind in series if of_kind["kind"] == "eager" for step in of_kind["steps"]]
    assert eager == [1]  # in which the callback finds its targets


@pytest.mark.parametrize(
    "change",
    [
        lambda states: None,
        lambda states: [1],
        lambda states: dict.fromkeys(states, 3),
        lambda states: {},
        of_state(dict.clear),
        replaced("version", 99),
        of_state(lambda state: state.pop("version")),
    ],
    ids=["none", "list", "number", "no-entry", "empty", "other-version", "no-version"],
)
def test_a_state_of_another_form_costs_its_figures(checkpoint, tmp_path, change):
    report = resumed(checkpoint, tmp_path, change)
    assert (report.before, report.train.diagnostics.restored) == (None, ())
    assert report.train.diagnostics.series[0]["kind"] == "eager"


@pytest.mark.parametrize("name", ["report", "baselines", "device", "winners"])
@pytest.mark.parametrize("value", [None, [[1]], {"train": 5, 7: "x"}], ids=repr)
def test_a_field_of_a_wrong_type_costs_its_figures(checkpoint, tmp_path, name, value):
    report = resumed(checkpoint, tmp_path, replaced(name, value))
    assert bool(report.train.diagnostics.restored) == (name not in ("baselines", "device"))
    assert (report.before is None) == (name == "report" and not isinstance(value, dict))


@pytest.mark.parametrize("name", ["report", "baselines", "device", "winners"])
def test_a_missing_field_costs_its_figures(checkpoint, tmp_path, name):
    report = resumed(checkpoint, tmp_path, of_state(lambda state: state.pop(name)))
    assert bool(report.train.diagnostics.restored) == (name not in ("baselines", "device"))


@pytest.mark.parametrize(
    "samples",
    [
        [[["train", "kind", [["wide"]]], [1.0] * 9]],
        [[["train", 3, [[4]]], [1.0] * 9]],
        [[["train", "kind", [[4]]], [float("nan")] * 9]],
        [[["train", "kind", [[4]]], [10**400]]],
        [[["train", "kind", [[4]], "more"], [1.0]]],
    ],
    ids=["shape", "kind", "nan", "huge", "long"],
)
def test_baseline_samples_of_a_wrong_type_are_ignored(checkpoint, tmp_path, samples):
    report = resumed(checkpoint, tmp_path, replaced("baselines", {"train": samples}))
    assert report.train.diagnostics.restored == ()


def test_an_unknown_field_changes_nothing(checkpoint, tmp_path):
    report = resumed(checkpoint, tmp_path, replaced("new", {"a": 1}))
    assert report.train.diagnostics.restored
    assert report.before is not None


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
