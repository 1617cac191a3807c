"""The cost of the callback in a step: the functions that it enters, and time. A small step on a GPU is CPU-bound."""

from __future__ import annotations

import sys
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader

import compile_callbacks
from compile_callbacks import InductorCompile
from tests.support.models import Classifier, fit

pytestmark = [
    pytest.mark.usefixtures("no_codegen"),
    pytest.mark.filterwarnings("ignore:nothing is compiled in the train phase"),
]

PACKAGE = str(Path(compile_callbacks.__file__).parent)
ALL_TIMED = 320  # of the first steps, each one is timed


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
    fit(starts, ours, stops, train=ALL_TIMED + 200, validation=None)
    steady = steps[ALL_TIMED + 20 :]
    timed = [entered for entered in steady if any(name == "signature" for _, name in entered)]
    untimed = [entered for entered in steady if entered not in timed]
    usual = min(untimed, key=len)
    assert sum(entered == usual for entered in untimed) > 0.8 * len(untimed), untimed
    assert len(untimed) >= 0.4 * len(steady)
    assert len(usual) <= 8, usual
    assert len({file for file, _ in usual}) <= 5, usual
    usual = sorted(timed, key=len)[len(timed) // 2]
    assert len(usual) <= 25, usual


class Ignores(Classifier):
    """Makes no use of its batch, and does not move it."""

    def training_step(self, batch, batch_idx):
        return self.net[0].weight.sum()

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


def fit_on(batches, *callbacks):
    train = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
    fit(*callbacks, make=Ignores, train=train, validation=None)


X = torch.zeros(2, 3)


def test_batches_of_other_shapes_dtypes_grad_and_structure_are_other_workloads():
    batches = [X, [X], (X, X), torch.zeros(3, 2), X.half(), X.clone().requires_grad_(), {"x": X}, {"y": X}]
    batches += [UserDict(x=X, y=X), SimpleNamespace(z=X), ["a"] * 40, ["a"] * 41]
    callback = InductorCompile(baseline_steps=1000)
    fit_on([batch for batch in batches for _ in range(5)], callback)
    assert callback.report.train.diagnostics.eager_samples in (4, 5)  # of one workload
