"""Which steps are compared: those of equal work, of similar size where shapes vary, and anew where work has changed."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time

import lightning.pytorch as pl
import pytest
import torch
from models import CLASSES, FEATURES, Classifier, seeded, trainer
from step_times import Times
from torch.utils.data import DataLoader

from compile_callbacks import InductorCompile, InductorConfig, Tune
from compile_callbacks.measuring.baseline import Baseline
from compile_callbacks.measuring.by_size import BySize
from compile_callbacks.measuring.memory import PeakMemory
from compile_callbacks.measuring.timing import StepTimer
from compile_callbacks.measuring.work import STEPS_BETWEEN_LOOKS, KnownWork, Work, baseline_from_data, work_of
from compile_callbacks.processes.meetings import Meetings
from compile_callbacks.reporting.report import seconds_saved
from compile_callbacks.session.remeasuring import Remeasuring
from compile_callbacks.tuning.tuning import slowest

pytestmark = pytest.mark.newest


def of_size(elements, stage="train"):
    return Work(stage, "tokens", ((1, elements),))


def batch(size, dtype=torch.float32):
    return {"x": torch.zeros(size, 3, dtype=dtype), "y": [torch.zeros(2)] * size, "name": "a"}


def test_batches_of_other_sizes_are_work_of_one_kind_and_other_dtypes_or_names_are_not():
    small, large = work_of("train", batch(2)), work_of("train", batch(5))
    assert small != large
    assert small.of_any_size == large.of_any_size
    assert (small.elements, large.elements) == (2 * 3 + 2 * 2, 5 * 3 + 5 * 2)
    assert work_of("train", batch(2)) == small
    others = [
        work_of("test", batch(2)),
        work_of("train", batch(2, torch.float16)),
        work_of("train", batch(2), "1 of 2"),
        work_of("train", {"z": batch(2)["x"]}),
        small.where(trained=3),
    ]
    assert all(other.of_any_size != small.of_any_size for other in others)


def varied(count, *, factor=1.0, noise=0.03, seed=0, low=100, high=400):
    """Steps of varying lengths, of which a third is what the host takes for any length."""
    chance, found = random.Random(seed), {}
    for _ in range(count):
        size = chance.randint(low, high)
        ms = factor * (5 + 0.05 * size) * (1 + noise * chance.gauss(0, 1))
        found.setdefault(of_size(size), []).append(ms)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_varying_sizes_are_compared_as_for_the_usual_batch(seed):
    by_size = BySize.of(varied(20, seed=seed))
    samples = [(work, ms) for work, of_work in varied(20, factor=0.7, seed=seed + 99).items() for ms in of_work]
    scaled = by_size.scaled_ms(samples)
    assert len(scaled) >= 15
    assert statistics.median(scaled) / by_size.reference_ms == pytest.approx(0.7, rel=0.08)
    assert statistics.median(by_size.eager_ms()) == pytest.approx(by_size.reference_ms, rel=0.05)
    # Without that, the sizes alone make it hard to tell.
    assert statistics.stdev(scaled) < 0.6 * statistics.stdev(ms for _, ms in samples)


def test_what_eager_ran_nothing_near_to_is_not_compared():
    by_size = BySize.of(varied(20))
    assert by_size.scaled_ms([(of_size(5000), 1.0), (of_size(3), 1.0), (of_size(200, "test"), 1.0)]) == ()


@pytest.mark.parametrize(
    "eager",
    [
        {},
        {Work("train"): (1.0,) * 9},
        {of_size(100): (1.0,) * 10, of_size(37): (1.0,) * 3},  # with an odd batch now and then
        {of_size(100): (1.0,), of_size(37): (1.0,)},
    ],
)
def test_with_a_usual_shape_or_few_samples_only_equal_work_is_compared(eager):
    assert BySize.of(eager) is None


def timed(timer, clock, samples, *, compiled, phase="train"):
    for work, ms in samples:
        timer.start(cuda=False)
        clock[0] += ms / 1000
        timer.stop(phase, compiled=compiled, work=work, disturbed=False)


def flat(samples):
    return [(work, ms) for work, of_work in samples.items() for ms in of_work]


def test_a_run_of_varying_shapes_has_a_speedup():
    clock = [0.0]
    timer = StepTimer(lambda: clock[0])
    timed(timer, clock, flat(varied(20)), compiled=False)
    timed(timer, clock, flat(varied(60, factor=0.5, seed=7)), compiled=True)
    times = timer.times("train")
    assert times.by_size
    assert times.work == of_size(1).of_any_size._replace(new=True)
    assert statistics.median(times.eager_ms) / statistics.median(times.compiled_ms) == pytest.approx(2, rel=0.1)


def test_what_steps_saved_before_their_work_changed_is_kept():
    clock = [0.0]
    timer = StepTimer(lambda: clock[0])
    timed(timer, clock, [(of_size(1), 10.0)] * 12, compiled=False)
    timed(timer, clock, [(of_size(1), 5.0)] * 100, compiled=True)
    timer.forget("train")
    assert timer.times("train").work is None
    timed(timer, clock, [(of_size(2), 100.0)] * 12, compiled=False)
    timed(timer, clock, [(of_size(2), 80.0)] * 50, compiled=True)
    assert timer.saved_before_seconds("train") == pytest.approx(0.5)
    assert timer.steps_to_judge("train") == 50
    assert statistics.median(timer.times("train").compiled_ms) == pytest.approx(80)
    assert timer.compiled_steps("train") == 150


def test_shapes_that_never_return_do_not_fill_the_memory():
    clock = [0.0]
    timer = StepTimer(lambda: clock[0])
    timed(timer, clock, [(of_size(size), 1.0) for size in range(2000)], compiled=True)
    kept = timer.samples("train", compiled=True)
    assert 100 < len(kept) <= 500
    assert of_size(1999)._replace(new=True) in kept


def looks(known, works):
    found = []
    for work in works:
        found.append(known.has_changed(work))
        if found[-1]:
            known.accept_change()
    return found


def test_work_that_changed_for_good_is_noticed_and_odd_batches_are_not():
    known = KnownWork()
    assert not any(looks(known, [of_size(1)] * 500))  # nothing was measured
    known.add(of_size(100))
    assert not any(looks(known, ([of_size(100)] * 3 + [of_size(50)] * 2) * STEPS_BETWEEN_LOOKS))
    assert not any(looks(known, [of_size(100, "test")] * 2 * STEPS_BETWEEN_LOOKS))
    changed = looks(known, [of_size(200)] * 3 * STEPS_BETWEEN_LOOKS)
    assert changed == [False] * (STEPS_BETWEEN_LOOKS - 1) + [True] + [False] * 2 * STEPS_BETWEEN_LOOKS


def test_work_that_alternates_is_measured_twice_at_most_and_ever_other_work_a_few_times():
    known = KnownWork()
    known.add(of_size(100))
    loaders = ([of_size(100)] * 210 + [of_size(200)] * 210) * 20
    assert sum(looks(known, loaders)) <= 2
    longer = [of_size(1000 * 2**epoch) for epoch in range(30) for _ in range(1000)]
    changes = [step for step, changed in enumerate(looks(known, longer)) if changed]
    assert len(changes) == 4
    assert [later - earlier >= 1000 for earlier, later in itertools.pairwise(changes)] == [True] * 3


def test_batches_of_ever_other_structure_are_not_measured_in_vain():
    known, chance = KnownWork(), random.Random(0)

    def optional():
        fields = {f"field_{number}": torch.zeros(2) for number in range(12) if chance.random() < 0.5}
        return work_of("train", fields)

    known.add(optional())
    assert not any(looks(known, [optional() for _ in range(500)]))


def test_a_look_takes_little_time_where_shapes_vary():
    known, chance = KnownWork(), random.Random(0)
    works = [Work("train", "boxes", tuple((chance.randint(1, 999), 4) for _ in range(64))) for _ in range(200)]
    for work in works:
        known.add(work)
    started = time.perf_counter()
    looks(known, works[:STEPS_BETWEEN_LOOKS])
    assert time.perf_counter() - started < 0.1


def test_work_that_returns_is_measured_again_as_its_samples_are_gone():
    known = KnownWork()
    known.add(of_size(100))
    there, back = [of_size(200)] * STEPS_BETWEEN_LOOKS, [of_size(100)] * 2 * STEPS_BETWEEN_LOOKS
    assert looks(known, there)[-1]
    assert looks(known, back)[-1]


def test_a_change_into_several_kinds_is_one():
    known = KnownWork()
    known.add(Work("train", "1 of 1"))
    accumulated = [Work("train", "0 of 2"), Work("train", "1 of 2")] * STEPS_BETWEEN_LOOKS
    assert sum(looks(known, accumulated)) == 1


def test_a_change_of_which_nothing_comes_is_asked_for_again():
    known = KnownWork()
    known.add(of_size(100))
    asked = [known.has_changed(work) for work in [of_size(200)] * 10 * STEPS_BETWEEN_LOOKS]
    assert sum(asked) == 10


def test_texts_are_work_of_their_number():
    assert work_of("train", ["a"] * 4) != work_of("train", ["a"] * 64)
    assert work_of("train", ["a"] * 4).of_any_size == work_of("train", ["a"] * 64).of_any_size


def test_varying_shapes_are_no_change_unless_they_leave_the_range():
    known, chance = KnownWork(), random.Random(0)
    for _ in range(10):
        known.add(of_size(chance.randint(100, 200)))
    assert not any(looks(known, [of_size(chance.randint(80, 250)) for _ in range(1000)]))
    assert any(looks(known, [of_size(chance.randint(500, 900)) for _ in range(STEPS_BETWEEN_LOOKS)]))


def test_work_has_changed_where_it_has_in_all_processes():
    for others, changed in [([True], True), ([False], False), (None, False)]:
        known = KnownWork(lambda own, others=others: [] if others is None else [own, *others])
        known.add(of_size(100))
        assert any(looks(known, [of_size(200)] * STEPS_BETWEEN_LOOKS)) == changed


def test_processes_that_take_unequally_many_steps_look_at_once_after_a_stage():
    few, many = (KnownWork(lambda own: [own, own if isinstance(own, bool) else 60]) for _ in range(2))
    found = []
    for known, steps in [(few, 60), (many, 67)]:
        known.add(of_size(100))
        assert not any(looks(known, [of_size(200)] * steps))
        known.stage_ends()
        found.append(looks(known, [of_size(200)] * (STEPS_BETWEEN_LOOKS - 60)))
    assert found[0] == found[1] == [False] * 39 + [True]


# ------------------------------------------------------------------------------------------ in a run


def batches(sizes):
    chance = torch.Generator().manual_seed(0)
    return DataLoader(
        [(torch.randn(n, FEATURES, generator=chance), torch.randint(CLASSES, (n,), generator=chance)) for n in sizes],
        batch_size=None,
    )


class Phases(pl.Callback):
    """Which train steps ran eagerly, as the report's series tells it."""

    def __init__(self, ours):
        self.ours = ours

    @property
    def eager_steps(self):
        return [step for of in self.ours.report.train.series if of["kind"] == "eager" for step in of["steps"]]


def test_a_larger_batch_for_good_is_measured_anew(caplog):
    caplog.set_level("INFO", logger="lightning.pytorch")
    ours = InductorCompile("default", None, baseline_steps=4, verify="off")
    trainer(ours, enable_progress_bar=False).fit(seeded(Classifier), batches([4] * 30 + [16] * 200))
    eager = Phases(ours).eager_steps
    first, anew = [step for step in eager if step <= 30], [step for step in eager if step > 30]
    assert first == list(range(1, 7))
    assert len(anew) in (5, 6)
    assert 100 <= anew[0] <= 30 + 6 + 2 * STEPS_BETWEEN_LOOKS
    assert ours.report.train.speedup is not None
    assert "eager steps are measured anew" in caplog.text


class Frozen(Classifier):
    """Trains its first layer from the second epoch on, as a finetuned backbone."""

    def on_train_epoch_start(self):
        next(self.net.parameters()).requires_grad_(self.current_epoch > 0)


def test_a_frozen_backbone_is_other_work():
    ours = InductorCompile("default", None, baseline_steps=4, verify="off")
    trainer(ours, max_epochs=3).fit(seeded(Frozen), batches([4] * 150))
    assert [step for step in Phases(ours).eager_steps if step > 150], "thawed steps have a baseline of their own"
    timer = ours._session._timer
    (kind,) = {work.kind for work in timer.samples("train", compiled=True)}  # without those of the frozen steps
    assert timer.times("train").work.kind == kind
    assert timer.times("train").eager_ms


def test_a_run_that_is_nearly_over_keeps_its_figures():
    ours = InductorCompile("default", None, baseline_steps=4, verify="off")
    trainer(ours).fit(seeded(Classifier), batches([4] * 30 + [16] * 150))
    assert max(Phases(ours).eager_steps) <= 30
    assert ours.report.train.speedup is not None


def test_what_was_saved_is_told_where_nothing_was_measured_since():
    clock = [0.0]
    timer = StepTimer(lambda: clock[0])
    timed(timer, clock, [(of_size(1), 10.0)] * 12, compiled=False)
    timed(timer, clock, [(of_size(1), 5.0)] * 100, compiled=True)
    timer.forget("train")
    timed(timer, clock, [(of_size(2), 80.0)] * 50, compiled=True)  # no eager ones beside them
    timer.forget("train")
    assert timer.steps_to_judge("train") == 50
    assert seconds_saved(50, None, None, timer.saved_before_seconds("train")) == pytest.approx(0.5)


def test_steps_of_another_precision_are_other_work():
    ours, model = InductorCompile("default", None, baseline_steps=4, verify="off"), seeded(Classifier)
    for precision, steps in [("32-true", 30), ("bf16-mixed", 250)]:
        trainer(ours, precision=precision).fit(model, batches([4] * steps))
    assert len([step for step in Phases(ours).eager_steps if step > 30]) in (5, 6)
    assert "bf16-mixed" in ours._session._timer.times("train").work.kind


def test_which_weights_train_is_known_in_the_middle_of_an_epoch():
    phase = {"train": Baseline(0), "infer": Baseline(0)}
    remeasuring = Remeasuring(
        seeded(Classifier),
        baselines=phase,
        tunings={},
        timer=StepTimer(),
        memory=PeakMemory(),
        meetings=Meetings(),
        say=print,
    )
    remeasuring.begin()
    resumed = remeasuring.with_weights(of_size(1), look=False)
    assert resumed == remeasuring.with_weights(of_size(1), look=True) != of_size(1)


@pytest.mark.parametrize(
    "data", [{"('train', (4, 8))": [1.0]}, [["a", [1.0]]], [[["a", "b", [[1]]], [1.0]]], None, [3]]
)
def test_a_baseline_of_an_earlier_version_is_none(data):
    assert baseline_from_data(data) == {}


def test_a_baseline_goes_through_plain_data():
    baseline = {of_size(3): (1.0, 2.0), of_size(5)._replace(new=True): (3.0,)}
    data = json.loads(json.dumps([[list(work), list(ms)] for work, ms in baseline.items()]))
    assert baseline_from_data(data) == baseline


def test_of_processes_whose_shapes_vary_the_steps_of_one_count():
    fast, slow = varied(6), varied(5, factor=2, seed=1)
    assert slowest([fast, slow]) == {work: tuple(ms) for work, ms in slow.items()} or slowest([fast, slow]) == slow
    usual = {of_size(100): (1.0,) * 9}
    assert slowest([usual, {of_size(100): (2.0,) * 9}]) == {of_size(100): (2.0,) * 9}


def test_a_tune_tries_its_candidates_anew_for_other_work(caplog):
    caplog.set_level("INFO", logger="lightning.pytorch")
    ours = InductorCompile(Tune(["default"], steps=5, min_speedup=1), None, verify="off")
    trainer(ours).fit(seeded(Classifier), batches([4] * 60 + [16] * 250))
    eager = Phases(ours).eager_steps
    assert [step for step in eager if step < 60]
    assert ours._session._tunings["train"].winner is not None
    assert all(work.shapes[0][0] == 16 for work in ours._session._timer.samples("train", compiled=False))
    assert "candidates are tried anew" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "new", "said"),
    [
        ([8, 16, 24, 32], False, "step times are as for the usual size"),
        (range(2, 3000), True, "step times are as for the usual size, of steps whose shapes were new"),
    ],
)
def test_steps_of_new_shapes_are_compared_with_each_other(sizes, new, said):
    chance = random.Random(0)
    ours = InductorCompile({"dynamic": True}, None, baseline_steps=16, verify="off")
    trainer(ours).fit(seeded(Classifier), batches([chance.choice(sizes) for _ in range(160)]))
    times = ours._session._timer.times("train")
    if not new:
        times = BySize.of(ours._session._timer.baseline("train"))
    assert times.work.new == new
    assert ours.report.train.speedup is not None
    assert new == (said in str(ours.report))


def test_of_new_and_seen_shapes_the_seen_are_compared_where_there_are_enough():
    new = {work._replace(new=True): [10 * ms for ms in of_work] for work, of_work in varied(20).items()}
    seen = varied(6, seed=1)
    assert not BySize.of({**new, **seen}).work.new
    assert BySize.of({**new, **varied(3, seed=1)}).work.new
    assert BySize.of({**new, **seen}, list(new)).work.new  # the others have none


def test_a_tune_that_begins_anew_keeps_what_it_has_compiled_and_knows_what_compiling_takes(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5, "options={epilogue_fusion: False}": 8})
    unfused = InductorConfig(options={"epilogue_fusion": False})
    ours = InductorCompile(Tune(["default", unfused], steps=5), None, verify="off", new_shapes="recompile")
    trainer(ours).fit(seeded(Classifier), batches([4] * 60 + [16] * 250))
    report = ours.report.train
    assert report.mode == "default"
    kinds = [(event["settings"], event["kind"]) for event in report.events if event["kind"] in ("compile", "recompile")]
    assert kinds.count(("default", "recompile")) == 1  # for the new shapes, and not from nothing again
    assert ours._session._tunings["train"]._tuner._compile_seconds.keys() == {"default", unfused.describe()}


class LargeBatchesAreQuick(Times):
    """Eager takes 10 ms for small batches and 5 for large ones; what is compiled takes 8 for any."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch, train={"eager": 10, "default": 8})
        of_any = StepTimer.samples

        def samples(timer, phase, *, compiled, settings=None):
            found = of_any(timer, phase, compiled=compiled, settings=settings)
            quick = {work for work in found if not compiled and work.shapes[0][0] == 16}
            return {work: (5.0,) * len(ms) if work in quick else ms for work, ms in found.items()}

        monkeypatch.setattr(StepTimer, "samples", samples)


def test_a_choice_is_kept_for_the_work_that_it_was_judged_by(monkeypatch, tmp_path):
    LargeBatchesAreQuick(monkeypatch)

    def run(sizes):
        ours = InductorCompile(Tune(["default"], steps=12), None, verify="off", cache_dir=tmp_path)
        trainer(ours).fit(seeded(Classifier), batches(sizes))
        return ours.report.train

    assert run([4] * 8 + [16] * 90).mode == "eager"
    small = run([4] * 90)
    assert small.mode == "default"
    assert not any("in an earlier run" in (trial["reason"] or "") for trial in small.trials)
    large = run([16] * 90)
    assert any("in an earlier run" in (trial["reason"] or "") for trial in large.trials)


def test_too_few_steps_to_come_are_not_tuned_anew(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    ours = InductorCompile(Tune(["default"], steps=5), None, verify="off")
    trainer(ours).fit(seeded(Classifier), batches([4] * 60 + [16] * 130))
    assert ours.report.train.mode == "default"
    assert max(Phases(ours).eager_steps) < 60


def test_a_tune_of_varying_shapes_is_judged(tmp_path):
    chance = random.Random(0)
    sizes = [chance.randint(2, 200) for _ in range(150)]
    ours = InductorCompile(Tune([{"dynamic": True}], steps=8), None, verify="off", cache_dir=tmp_path)
    trainer(ours).fit(seeded(Classifier), batches(sizes))
    (trial,) = [trial for trial in ours.report.train.trials if trial["candidate"] != "eager"]
    assert trial["verdict"] in ("chosen", "not faster", "beaten")
    assert trial["samples"] >= 5
    fixed = InductorCompile(Tune([{"dynamic": True}], steps=8), None, verify="off", cache_dir=tmp_path)
    trainer(fixed).fit(seeded(Classifier), batches([77] * 40))
    assert not any("in an earlier run" in (trial["reason"] or "") for trial in fixed.report.train.trials)
    # The choice is for batches of whatever shapes: a run that begins with another one finds it.
    again = InductorCompile(Tune([{"dynamic": True}], steps=8), None, verify="off", cache_dir=tmp_path)
    trainer(again).fit(seeded(Classifier), batches([333, *sizes]))
    reasons = [trial["reason"] or "" for trial in again.report.train.trials]
    assert any("in an earlier run" in reason for reason in reasons)
