"""The cost of the callback in a step: the functions that it enters, and time. A small step on a GPU is CPU-bound."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import LambdaCallback

import compile_callbacks
from compile_callbacks import InductorCompile
from tests.support.models import fit

pytestmark = [
    pytest.mark.usefixtures("no_codegen"),
    pytest.mark.filterwarnings("ignore:nothing is compiled in the train phase"),
]

PACKAGE = str(Path(compile_callbacks.__file__).parent)
EACH_SECOND_WINDOW = 320  # of the first steps, half are timed


def test_a_steady_step_enters_few_functions():
    steps = []

    def profile(frame, event, argument):
        # By hand, the compiled function has a frame, too.
        ours = frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name != "net_train"
        if event == "call" and ours:
            steps[-1].append((frame.f_code.co_filename, frame.f_code.co_name))

    starts = LambdaCallback(on_train_batch_start=lambda *args: (steps.append([]), sys.setprofile(profile)))
    stops = LambdaCallback(on_train_batch_end=lambda *args: sys.setprofile(None))
    ours = InductorCompile("default", None, baseline_steps=0)
    fit(starts, ours, stops, train=EACH_SECOND_WINDOW + 200, validation=None)
    steady = steps[EACH_SECOND_WINDOW + 20 :]
    timed = [entered for entered in steady if any(name == "signature" for _, name in entered)]
    untimed = [entered for entered in steady if entered not in timed]
    usual = min(untimed, key=len)
    assert sum(entered == usual for entered in untimed) > 0.8 * len(untimed), untimed
    assert len(untimed) >= 0.4 * len(steady)
    assert len(usual) <= 8, usual
    assert len({file for file, _ in usual}) <= 5, usual
    usual = sorted(timed, key=len)[len(timed) // 2]
    assert len(usual) <= 25, usual
