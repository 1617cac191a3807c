"""Which steps are compared with each other: those of equal workload."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from compile_callbacks import InductorCompile
from compile_callbacks.profiling.workload import Workload
from tests.support.models import CLASSES, FEATURES, Classifier, seeded, trainer
from tests.support.step_times import TimedSteps

pytestmark = pytest.mark.usefixtures("no_codegen")


def of_size(elements):
    return Workload("train", "tokens", ((1, elements),))


def batches(sizes):
    chance = torch.Generator().manual_seed(0)
    return DataLoader(
        [(torch.randn(n, FEATURES, generator=chance), torch.randint(CLASSES, (n,), generator=chance)) for n in sizes],
        batch_size=None,
    )


def test_timer_compares_the_current_work_only():
    steps = TimedSteps()
    timer = steps.timer
    steps.run([10] * 12, compiled=False, workload=of_size(1))
    steps.run([5] * 20, compiled=True, workload=of_size(1))
    assert timer.times("train").workload == of_size(1)
    assert len(timer.times("train").eager_ms) == 10
    steps.run([80] * 50, compiled=True, workload=of_size(2))
    times = timer.times("train")
    assert (times.workload, times.eager_ms, len(times.compiled_ms)) == (of_size(2), (), 49)


def test_timer_does_not_sample_the_first_step_with_new_shapes():
    steps = TimedSteps()
    steps.run([1] * 5, compiled=True, workload=of_size(1))
    steps.run([50, 2], compiled=True, workload=of_size(2))
    (of_second,) = steps.timer.samples("train", compiled=True)[of_size(2)]
    assert of_second == pytest.approx(2.0)


class Frozen(Classifier):
    """Trains its first layer from the second epoch on, as a fine-tuned backbone."""

    def on_train_epoch_start(self):
        next(self.net.parameters()).requires_grad_(self.current_epoch > 0)


def test_steps_that_train_other_weights_have_no_speedup_without_eager_steps_of_their_own():
    ours = InductorCompile("default", None, baseline_steps=4, verify="off")
    trainer(ours, max_epochs=1).fit(seeded(Frozen), batches([4] * 30))
    assert ours.report.train.compiled_step_ms is not None
    assert ours.report.train.eager_step_ms is not None
    ours = InductorCompile("default", None, baseline_steps=4, verify="off")
    trainer(ours, max_epochs=3).fit(seeded(Frozen), batches([4] * 30))
    assert ours.report.train.compiled_step_ms is not None
    assert ours.report.train.eager_step_ms is None
    assert ours.report.train.speedup is None
