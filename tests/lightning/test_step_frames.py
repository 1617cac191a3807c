"""How many functions of this library a steady training step enters. A small step on a GPU is CPU-bound."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest

import compile_callbacks
from compile_callbacks import InductorCompile
from compile_callbacks.profiling.step_timer import MAX_WINDOWS, WINDOW_STEPS
from tests.support.models import Classifier, loader, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

PACKAGE = str(Path(compile_callbacks.__file__).parent)


class StartsProfile(pl.Callback):
    """Records the functions of the package that each step enters. It stands before the callback."""

    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        entered = []
        self.steps.append(entered)

        def profile(frame, event, argument):
            # By hand, the compiled function has a frame, too.
            ours = frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name != "net_train"
            if event == "call" and ours:
                entered.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name))

        sys.setprofile(profile)


class StopsProfile(pl.Callback):
    def on_train_batch_end(self, *args):
        sys.setprofile(None)


def test_a_steady_step_enters_few_functions():
    all_timed = MAX_WINDOWS * WINDOW_STEPS
    steps = all_timed + 200
    starts, ours = StartsProfile(), InductorCompile("default", None, baseline_steps=0)
    trainer(starts, ours, StopsProfile()).fit(Classifier(), loader(steps))
    steady = starts.steps[all_timed + 20 :]
    timed = [entered for entered in steady if any(name == "signature" for _, name in entered)]
    untimed = [entered for entered in steady if entered not in timed]
    assert timed
    assert untimed
    usual = min(untimed, key=len)
    assert sum(entered == usual for entered in untimed) > 0.8 * len(untimed), untimed
    assert len(untimed) >= 0.4 * len(steady)
    assert len(usual) <= 8, usual
    assert len({file for file, _ in usual}) <= 5, usual
    # One timed step in 64 also reads the times of the others.
    usual = sorted(timed, key=len)[len(timed) // 2]
    assert len(usual) <= 25, usual
