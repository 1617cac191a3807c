"""Which step times and memory peaks are measured and compared, and when the report claims a speedup or warns."""

from __future__ import annotations

import importlib
import itertools
import random
import types
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from compile_callbacks import CompileWarning, InductorCompile, Tune
from compile_callbacks.profiling.comparison import compare
from compile_callbacks.profiling.step_times import PhaseTimes, Step
from tests.support.models import Classifier, batches_of, seeded, trainer
from tests.support.step_times import OnDevice, Times, captured_graphs

BASELINE = 12  # steps: two to warm up, and ten samples


def timed(ms, *sizes, make=Classifier, baseline_steps=10, epochs=1, mode="default"):
    """Train on batches of these sizes, and return the report, and the warnings."""
    with pytest.MonkeyPatch.context() as patch, captured_graphs(Times(patch, train=ms)):
        callback = InductorCompile(mode, None, baseline_steps=baseline_steps, verify="off", targets="net")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CompileWarning)
            trainer(callback, max_epochs=epochs).fit(seeded(make), batches_of(*sizes))
    return callback.report, [str(warning.message) for warning in caught if "CC501" in str(warning.message)]


@pytest.mark.usefixtures("recompiles_at_once")
def test_only_the_current_workload_is_compared_and_the_first_step_with_new_shapes_is_no_sample():
    first = itertools.count()

    def ms(candidate, workload):
        if workload.shapes[0][0][0] == 4:
            return 10 if candidate == "eager" else 5
        return 80 if next(first) else 900

    train = timed(ms, *[4] * (BASELINE + 20), *[9] * 49, mode={"dynamic": True})[0].train
    assert (train.compiled_step_ms, train.eager_step_ms, train.speedup) == (pytest.approx(80), None, None)
    assert max(itertools.chain(*(series["ms"] for series in train.diagnostics.series))) >= 900


class Frozen(Classifier):
    """Trains its first layer from the second epoch on, as a fine-tuned backbone."""

    def on_train_epoch_start(self):
        next(self.net.parameters()).requires_grad_(self.current_epoch > 0)


@pytest.mark.parametrize("epochs", [1, 3])
def test_steps_that_train_other_weights_have_no_speedup_without_eager_steps_of_their_own(epochs):
    train = timed({"eager": 10, None: 5}, *[4] * 30, make=Frozen, baseline_steps=4, epochs=epochs)[0].train
    assert train.compiled_step_ms == pytest.approx(5)
    assert (train.eager_step_ms, train.speedup) == (None if epochs == 3 else pytest.approx(10), None)


@pytest.mark.usefixtures("recompiles_at_once")
def test_slower_steps_are_reported_with_the_last_recompile():
    sizes = [4] * (BASELINE + 100), [5] * 4, [4] * 40
    _, (message,) = timed({"eager": 10, None: 14}, *itertools.chain(*sizes), mode={"dynamic": False})
    assert "train steps are slower than eager steps so far: slower by 40% (10.0 → 14.0 ms): possible cause" in message
    assert "1 recompile (" in message
    assert "train_mode='eager'" in message


@pytest.mark.usefixtures("recompiles_at_once")
@pytest.mark.parametrize(
    ("eager", "compiled", "sizes", "verdict"),
    [
        (10_000, [9_900] * 14 + [10_800], [4] * 120, "no difference"),
        (10, 10.3, [4] * 120, "slower"),
        (lambda number: 8 + number % 5, [10.5] * 30 + [90], [*[4] * (BASELINE + 30), *[9] * 4], "no difference"),
    ],
)
def test_noise_few_samples_and_few_percent_are_no_warning_nor_what_contradicts_the_verdict(
    eager, compiled, sizes, verdict
):
    report, warned = timed({"eager": eager, None: compiled}, *sizes, mode={"dynamic": True})
    assert (report.train.verdict, warned) == (verdict, [])
    assert report.train.net_seconds_saved > -20


@pytest.mark.parametrize(("baseline", "compiled", "reason"), [(2, 5, "too few samples"), (5, 10, "no difference")])
def test_a_run_without_evidence_reports_why(baseline, compiled, reason):
    report, _ = timed({"eager": 10, None: compiled}, *[4] * 20, baseline_steps=baseline)
    train = report.train
    assert (train.verdict, train.speedup, train.break_even_steps) == (reason, None, None)
    assert (train.net_seconds_saved is None) == (baseline < 5)
    assert train.compiled_step_ms == pytest.approx(compiled)
    assert not {"step/train/speedup", "step/train/break_even_steps"} & report.scalars().keys()
    assert reason in str(report)


def test_a_later_call_of_another_kind_does_not_change_the_verdict():
    with pytest.MonkeyPatch.context() as patch, captured_graphs(Times(patch, infer={"eager": 10, None: 5})):
        callback, module = InductorCompile(None, "default", verify="off", targets="net"), Classifier()
        trainer(callback).validate(module, batches_of(*[4] * 40), verbose=False)
        trainer(callback).predict(module, batches_of(*[4] * 100))
    assert callback.report.infer.speedup == pytest.approx(2)


# ------------------------------------------------------------------------------------------ the rule


def noisy(median, count=10, spread=0.1):
    draw = random.Random(median)
    return tuple(median * (1 + draw.uniform(-spread, spread)) for _ in range(count))


QUIET, SLOW, DRIFTING = noisy(10.0), noisy(13.0), [noisy(10.0 - 0.02 * number, 10, 0.02) for number in range(30)]


@pytest.mark.parametrize(
    ("eager", "compiled", "verdict"),
    [
        ((), [()], None),
        ((4.0,) * 4, [(2.0,) * 9], None),
        ((4.0,) * 9, [(2.0,) * 4], None),
        ((1045.0, 9.0), [(5.0, 5.0)], None),  # a garbage collection in one of two eager samples
        ((4.0,) * 5, [(2.0,) * 5], "faster"),
        ((2.0,) * 5, [(4.0,) * 5], "slower"),
        ((4.0,) * 5, [(4.0,) * 5], "no difference"),
        (noisy(10.0, 20), [noisy(10.05, 20)], "no difference"),
        (noisy(10.0, 20), [noisy(5.0, 20)], "faster"),
        ((9.0, 9.1, 9.2, 9.1, 9.0, 9.2, 9.1, 1045.0), [(10.0, 9.0, 9.2, 9.1, 9.3)], "no difference"),
        ((9.0, 9.1, 9.2, 9.1, 1045.0), [(10.0, 9.0, 9.2, 9.1, 9.3)], "not comparable"),
        ((901.0,) * 9, [(10.0,) * 9], "not comparable"),  # threads wait for each other
        (SLOW, [QUIET] * 9, "faster"),
        (SLOW, [*[QUIET] * 8, SLOW], "no difference"),  # the eager steps may have run during such a disturbance
        (noisy(10.0, 10, 0.02), DRIFTING, "no difference"),  # the eager steps are at the begin of the drift
        (noisy(11.0, 10, 0.02), DRIFTING, "faster"),
    ],
)
def test_speedup_needs_samples_and_an_interval_without_one(eager, compiled, verdict):
    found = compare([eager], compiled)
    assert (found and found.outcome) == verdict


@pytest.mark.parametrize("machine", [{}, {"bursts": 0.03}, {"drift": -0.05}, {"drift": 0.05}])
def test_equal_steps_are_seldom_called_faster_or_slower(machine, monkeypatch):
    """With 4% noise of a step. The program of the benchmark has the rates at true differences."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    program = importlib.import_module("false_verdicts")
    outcomes = Counter(program.simulate_report(1.0, seed=seed, steps=1000, **machine) for seed in range(100))
    assert max(outcomes["faster"], outcomes["slower"]) <= 4
    assert program.simulate_report(1.5, seed=0, steps=1000, **machine) == "faster"
    chosen = {ratio: [program.simulate_tune(ratio, seed=n, **machine) for n in range(50)] for ratio in (1.0, 1.1, 1.3)}
    counts = [outcomes.count("faster") for outcomes in chosen.values()]
    assert [counts[0] <= 2, counts[1] >= 35, counts[2] >= 48] == [True] * 3, counts


@pytest.fixture
def auto_on_gpu(monkeypatch):
    """Runs the contest of "auto" on simulated steps of a GPU until it has decided."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    program, gpu, numbers = importlib.import_module("false_verdicts"), torch.device("cuda"), itertools.count()

    def run(ms, **conditions):
        contest = program.Contest("train", Tune("auto"))
        contest.facts, contest.waits, contest.tell = lambda _: program.CompileFacts(1.0), lambda _: None, lambda _: None
        shared = {"device": gpu, "devices": lambda: {gpu}, "shapes": lambda: {"net": 1.0}}
        contest.begin(program.Conditions(**shared, **conditions))
        while contest.decision is None:
            variant, _ = contest.next()
            number = next(numbers)
            timed = {"workload": program.WORKLOAD, "end": ms[variant.name] * (1 + number % 3 / 1000)}
            contest.done(program.Step(variant=variant, is_sample=number % 14 >= 4, **timed))
        return contest

    return run


@pytest.mark.parametrize(("default_ms", "chosen"), [(5.0, "default"), (11.0, "eager")])
def test_auto_without_memory_for_cuda_graphs_takes_default_only_if_it_was_faster(default_ms, chosen, auto_on_gpu):
    contest = auto_on_gpu({"eager": 10.0, "reduce-overhead": 2.0, "default": default_ms, "max-autotune": 3.0})
    assert contest.chosen.name == "reduce-overhead"
    assert contest.give_up_cuda_graphs(contest.chosen, "no memory")
    assert contest.chosen.name == chosen


def test_auto_remembers_the_winner_also_with_sharded_weights(auto_on_gpu):
    written = []
    record = types.SimpleNamespace(facts={}, load=lambda: {"winners": {}}, update=lambda *entry: written.append(entry))
    ms = {"eager": 10.0, "default": 5.0, "max-autotune-no-cudagraphs": 6.0}
    auto_on_gpu(ms, sharded="the weights are sharded", record=record)
    assert [entry["candidate"] for _, _, entry in written] == ["default"]


# ------------------------------------------------------------------------------------------ measurements


@pytest.fixture
def _a_gpu(monkeypatch):
    for name in ("get_device_name", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: "a GPU")


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize(("last", "peak"), [(207, None), (1000, 1000)])
def test_a_peak_is_measured_only_if_a_step_raises_it(last, peak, monkeypatch):
    """The user's own code may read the peak of torch's CUDA allocator, so it is not reset."""
    needed, allocated = {0: 300, 1: 938, 2: 700, 8: 950, 9: 207, 11: last}, [100]  # MiB, by step; the compiler used 950
    allocate = lambda step: allocated.append(max(allocated[-1], needed.get(step, 0)))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocated[-1] * 2**20)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", pytest.fail)
    report, _ = timed({"eager": 5, None: 5}, *[4] * 16, make=lambda: OnDevice("cuda", in_step=allocate))
    details = report.train.diagnostics
    assert (details.eager_peak_memory_mib, details.peak_memory_mib) == (938, peak)
    monkeypatch.setattr(times := PhaseTimes("train"), "peak_before", 0)
    times.end(Step(), "train")
    assert times.peak_before is None  # because a step that is only counted skips `begin`


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize("device", ["mps", "xpu", "cuda"])
def test_a_step_is_timed_by_the_device_without_a_synchronization(device, monkeypatch):
    """The device gets the work of a step at once, and needs milliseconds to run it."""
    stream = types.SimpleNamespace(queued_ms=0.0, synchronized=0.0, before=None)

    def queue(step):
        stream.queued_ms += 4
        stream.before = stream.synchronized

    def event(enable_timing):
        assert enable_timing
        event = types.SimpleNamespace(at_ms=None)
        event.record = lambda: setattr(event, "at_ms", stream.queued_ms)
        event.query = lambda: stream.synchronized >= event.at_ms
        event.synchronize = lambda: setattr(stream, "synchronized", max(stream.synchronized, event.at_ms))
        event.elapsed_time = lambda end: end.at_ms - event.at_ms
        return event

    monkeypatch.setattr(f"torch.{device}.Event", event)
    callback = InductorCompile("default", None, verify="off", targets="net")
    with pytest.MonkeyPatch.context() as patch, captured_graphs(Times(patch)):
        patch.undo()  # the real clock
        trainer(callback).fit(OnDevice(device, in_step=queue), batches_of(*[4] * 20))
    assert stream.before == 0
    assert callback.report.train.compiled_step_ms == 4.0


class TwoLoaders(Classifier):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0])


def test_timed_steps_are_spread_evenly_over_the_run_and_each_stage_has_its_own():
    """Every step of an accumulation, for example, is timed as often as the others."""
    count, loaders = 3000, [DataLoader([[torch.zeros(4, 8)]] * n, batch_size=None) for n in (3000, 20)]
    with pytest.MonkeyPatch.context() as patch, captured_graphs(Times(patch, infer={None: 5})):
        callback = InductorCompile(None, "default", baseline_steps=0, verify="off", targets="net")
        trainer(callback).validate(TwoLoaders(), loaders, verbose=False)
    infer = callback.report.infer
    assert infer.diagnostics.steps == {"compiled": count + 20}
    (steps,) = (series["steps"] for series in infer.diagnostics.series if series["kind"] == "compiled")
    assert steps == sorted(set(steps))
    assert set(range(count + 2, count + 12)) <= set(steps)  # the first step ends the untimed steps of the other loader
    steps = [number for number in steps if number <= count]
    begins = [after for before, after in itertools.pairwise(steps) if after > before + 1]
    distances = [after - before for before, after in itertools.pairwise(begins)]
    assert 80 <= len(steps) <= 170  # 8 to 17 windows of ten steps
    assert max(distances) <= 1.2 * min(distances)
    assert begins[-1] + 2.5 * max(distances) > count
    for accumulated in (2, 3, 8, 32):
        counts = Counter(number % accumulated for number in steps)
        assert len(counts) == accumulated
        assert min(counts.values()) > 0.3 * len(steps) / accumulated
