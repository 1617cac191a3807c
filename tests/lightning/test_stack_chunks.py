"""Calls in a trainer run never map a chunk of CPython's stack for each call."""

from __future__ import annotations

import resource

import pytest

from compile_callbacks import InductorCompile
from compile_callbacks.callbacks import stack_chunks
from tests.support.models import Classifier, loader, trainer

pytestmark = pytest.mark.all_versions

CALLS = 200
DEPTHS = range(250)  # of 100 bytes a frame and more: further than the next chunk of 16 KiB


def leaf() -> None:
    pass


leaf.__code__ = leaf.__code__.replace(co_stacksize=100)  # more than between two depths: no depth is missed


def slow_depths(depth: int = 0) -> list[int]:
    """Return the depths below the caller at which each call maps and unmaps memory."""
    if depth == len(DEPTHS):
        return []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return ([depth] if faults > CALLS // 2 else []) + slow_depths(depth + 1)


class Deep(Classifier):
    """Looks for slow depths in each stage."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = {}
        self.fails = fails

    def on_train_batch_start(self, batch, batch_idx):
        self.found["train"] = slow_depths()
        assert ("run" in vars(self.trainer.fit_loop)) == (stack_chunks.HAS_BUG and bool(self.trainer.callbacks))
        if self.fails:
            raise ValueError("a run that fails")

    def on_validation_batch_start(self, batch, batch_idx):
        self.found["infer"] = slow_depths()


def loops(runner):
    return runner.fit_loop, runner.validate_loop, runner.test_loop, runner.predict_loop


@pytest.mark.parametrize("has_bug", [stack_chunks.HAS_BUG, False])
def test_a_run_has_no_slow_depth_with_the_callback(has_bug, monkeypatch):
    monkeypatch.setattr(stack_chunks, "HAS_BUG", has_bug)
    module = Deep()
    trainer(InductorCompile(None, None)).fit(module, loader(2), loader(1))
    if has_bug:
        assert module.found == {"train": [], "infer": []}


def test_a_run_without_the_callback_has_a_slow_depth_if_python_has_the_fault():
    module = Deep()
    trainer().fit(module, loader(1))
    assert bool(module.found["train"]) == stack_chunks.HAS_BUG


def test_trainer_loops_are_restored_after_a_run_that_fails():
    runner = trainer(InductorCompile(None, None))
    with pytest.raises(ValueError, match="a run that fails"):
        runner.fit(Deep(fails=True), loader(1))
    assert not any("run" in vars(loop) for loop in loops(runner))


def test_trainer_loops_keep_a_run_method_that_was_set_on_the_instance():
    runner = trainer(max_epochs=1)
    runner.fit_loop.run = users = lambda: "the user's"
    stack_chunks.install_on(runner)
    stack_chunks.install_on(runner)
    assert runner.fit_loop.run() == "the user's"
    stack_chunks.remove_from(runner)
    assert runner.fit_loop.run is users
    assert not any("run" in vars(loop) for loop in loops(runner)[1:])
