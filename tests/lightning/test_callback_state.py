"""The callback's state in a checkpoint and in copies of the callback."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder

from compile_callbacks import InductorCompile
from tests.support.models import fit, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

KEY = "compile_callbacks"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The checkpoint of a fit, as data."""
    run = trainer(InductorCompile(baseline_steps=4, verify="off"))
    run.fit(seeded(), loader(20))
    run.save_checkpoint(path := tmp_path_factory.mktemp("run") / "run.ckpt")
    return torch.load(path, weights_only=True)


def of_state(change):
    def of_checkpoint(states):
        for state in states.values():
            change(state)
        return states

    return of_checkpoint


def replaced(name, value):
    return of_state(lambda state: state.update({name: value}))


@pytest.mark.parametrize(
    "change",
    [
        replaced("of a later version", {"a": 1}),
        lambda states: None,
        lambda states: [1],
        lambda states: dict.fromkeys(states, 3),
        of_state(dict.clear),
        replaced("version", 99),
        replaced("report", [[1]]),
        replaced("baselines", {"train": [[["train", "kind", [[4]]], [float("nan")] * 9]]}),
    ],
    ids=["whole", "missing", "list", "number", "empty", "version", "report", "baselines"],
)
def test_a_state_of_another_form_costs_its_figures(checkpoint, tmp_path, change, request):
    """A resumed run measures again what the state of the callback does not tell."""
    changed = copy.deepcopy(checkpoint)
    if (state := change(changed.pop(KEY))) is not None:
        changed[KEY] = state
    torch.save(changed, tmp_path / "changed.ckpt")
    ours = InductorCompile(baseline_steps=4, verify="off")
    fit(ours, train=20, max_epochs=2, ckpt_path=tmp_path / "changed.ckpt")
    report, case = ours.report, request.node.callspec.id
    str(report)
    assert report.train.graphs == 1
    assert report.train.eager_step_ms is not None
    assert bool(report.train.diagnostics.restored) == (case in ("whole", "report"))
    assert (report.before is None) == (case not in ("whole", "baselines"))


def test_a_checkpoint_that_is_loaded_within_a_run_is_no_resume():
    ours = InductorCompile(baseline_steps=2)
    run = trainer(ours, LearningRateFinder(num_training_steps=4, update_attr=False), max_epochs=1)
    module = seeded()
    module.lr = 0.1
    run.fit(module, loader(20))
    assert ours.report.before is None
    assert ours.report.train.diagnostics.restored == ()


def test_the_report_of_a_copy_that_ran_is_that_of_the_original():
    ours = InductorCompile(baseline_steps=0)
    twin = copy.deepcopy(ours)
    fit(twin)
    assert ours.report == twin.report
    assert ours.report.train.graphs == 1
