"""Which steps are compared with each other: those of equal workload."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader

from compile_callbacks import InductorCompile
from compile_callbacks.profiling.baseline import baseline_from_data
from compile_callbacks.profiling.workload import Workload, workload_of
from tests.support.models import CLASSES, FEATURES, Classifier, seeded, trainer
from tests.support.step_times import TimedSteps

pytestmark = pytest.mark.usefixtures("no_codegen")


def of_size(elements):
    return Workload("train", "tokens", ((1, elements),))


def batch(size, dtype=torch.float32):
    return {"x": torch.zeros(size, 3, dtype=dtype), "y": [torch.zeros(2)] * size, "name": "a"}


def batches(sizes):
    chance = torch.Generator().manual_seed(0)
    return DataLoader(
        [(torch.randn(n, FEATURES, generator=chance), torch.randint(CLASSES, (n,), generator=chance)) for n in sizes],
        batch_size=None,
    )


def test_work_of_batches_differs_by_shape_dtype_names_and_stage():
    workloads = [
        workload_of("train", batch(2)),
        workload_of("train", batch(5)),
        workload_of("test", batch(2)),
        workload_of("train", batch(2, torch.float16)),
        workload_of("train", batch(2), "1 of 2"),
        workload_of("train", {"z": batch(2)["x"]}),
        workload_of("train", batch(2)).with_conditions(trained=3),
        workload_of("train", ["a"] * 4),
        workload_of("train", ["a"] * 64),
    ]
    assert len(set(workloads)) == len(workloads)
    assert workload_of("train", batch(2)) == workloads[0]


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


def test_timer_keeps_a_bounded_number_of_works():
    steps = TimedSteps()
    for size in range(2000):
        steps.run([1, 1], compiled=True, workload=of_size(size))
    kept = steps.timer.samples("train", compiled=True)
    assert 100 < len(kept) <= 500
    assert of_size(1999) in kept


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


def test_steps_of_another_precision_have_no_speedup_without_eager_steps_of_their_own():
    ours, model = InductorCompile("default", None, baseline_steps=4, verify="off"), seeded(Classifier)
    for precision, steps in [("32-true", 30), ("bf16-mixed", 60)]:
        trainer(ours, precision=precision).fit(model, batches([4] * steps))
    assert "bf16-mixed" in ours.session._measurements.timer.times("train").workload.kind
    assert ours.report.train.speedup is None


@pytest.mark.parametrize("data", [{"('train', (4, 8))": [1.0]}, [["a", [1.0]]], [[["a", "b"], [1.0]]], None, [3]])
def test_damaged_baselines_are_ignored(data):
    assert baseline_from_data(data) == {}


def test_baselines_round_trip_through_json():
    baseline = {of_size(3): (1.0, 2.0), workload_of("train", batch(2)): (3.0,)}
    data = json.loads(json.dumps([[list(workload), list(samples)] for workload, samples in baseline.items()]))
    assert baseline_from_data(data) == baseline
