"""Python's stack in a trainer run: no depth at which calls are slow."""

from __future__ import annotations

import resource
import sys

import pytest
from models import Classifier, loader, trainer

from compile_callbacks import InductorCompile

CALLS = 200
DEPTHS = range(250)  # of 100 bytes a frame and more: beyond the next chunk of 16 KiB


def leaf() -> None:
    pass


leaf.__code__ = leaf.__code__.replace(co_stacksize=100)  # more than from one depth to the next: none is left out


def slow_depths(depth: int = 0) -> list[int]:
    """At which depths below this each call maps memory, and gives it back."""
    if depth == len(DEPTHS):
        return []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return ([depth] if faults > CALLS // 2 else []) + slow_depths(depth + 1)


class Deep(Classifier):
    """Calls to many depths in each stage."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = {}
        self.fails = fails

    def on_train_batch_start(self, batch, batch_idx):
        self.found["train"] = slow_depths()
        if self.fails:
            raise ValueError("a run that fails")

    def on_validation_batch_start(self, batch, batch_idx):
        self.found["infer"] = slow_depths()

    on_predict_batch_start = on_validation_batch_start


def test_no_call_of_a_run_crosses_a_boundary_of_pythons_stack():
    module = Deep()
    runner = trainer(InductorCompile(None, None), max_epochs=1)
    runner.fit(module, loader(2), loader(1))
    assert module.found == {"train": [], "infer": []}
    module.found.clear()
    runner.predict(module, loader(1))
    assert module.found == {"infer": []}


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="its last releases keep a chunk for the next such call")
def test_without_the_callback_there_is_such_a_depth():
    module = Deep()
    trainer(max_epochs=1).fit(module, loader(1))
    assert module.found["train"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_trainers_loops_are_its_own_again_after_a_run(fails):
    module, runner = Deep(fails), trainer(InductorCompile(None, None), max_epochs=1)
    loops = runner.fit_loop, runner.validate_loop, runner.test_loop, runner.predict_loop
    if fails:
        with pytest.raises(ValueError, match="a run that fails"):
            runner.fit(module, loader(1))
    else:
        runner.fit(module, loader(1))
    assert not any("run" in vars(loop) for loop in loops)
