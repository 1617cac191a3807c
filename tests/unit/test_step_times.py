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

from compile_callbacks import InductorCompile
from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks.calls.phase_switch import PhaseSwitch
from compile_callbacks.config.inductor_config import Variant
from compile_callbacks.profiling.comparison import compare
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.memory import Peak, PeakMemory
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.profiling.spans import Span
from compile_callbacks.profiling.step_timer import MAX_WINDOWS, WINDOW_STEPS, StepTimer
from compile_callbacks.profiling.steps import Step, Workload
from compile_callbacks.session.stage_warnings import RECENT_WINDOWS, SessionWarnings
from tests.support.models import Classifier, loader, seeded, trainer
from tests.support.step_times import TimedSteps, Times

pytestmark = pytest.mark.usefixtures("no_codegen")


def test_timer_compares_the_current_work_only_and_does_not_sample_the_first_step_with_new_shapes():
    small, large = (Workload("train", "tokens", ((1, elements),)) for elements in (1, 2))
    steps = TimedSteps()
    steps.run([10] * 12, compiled=False, workload=small)
    steps.run([5] * 20, compiled=True, workload=small)
    times = steps.timer.times("train")
    assert (times.workload, len(times.eager_ms)) == (small, 10)
    steps.run([900, *[80] * 49], compiled=True, workload=large)
    times = steps.timer.times("train")
    assert (times.workload, times.eager_ms, times.compiled_ms) == (large, (), pytest.approx((80.0,) * 49))


class Frozen(Classifier):
    """Trains its first layer from the second epoch on, as a fine-tuned backbone."""

    def on_train_epoch_start(self):
        next(self.net.parameters()).requires_grad_(self.current_epoch > 0)


def test_steps_that_train_other_weights_have_no_speedup_without_eager_steps_of_their_own():
    for epochs in (1, 3):
        ours = InductorCompile("default", None, baseline_steps=4, verify="off")
        trainer(ours, max_epochs=epochs).fit(seeded(Frozen), loader(30))
        train = ours.report.train
        assert train.compiled_step_ms is not None
        assert (train.eager_step_ms is None) == (epochs == 3)
    assert train.speedup is None


def messages(recorder, timer):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        session_warnings = SessionWarnings(WarnOnce(), PhaseSwitch([], recorder=recorder), recorder, timer)
        session_warnings.check_step_times("train", Variant())
    return [str(warning.message) for warning in found]


def test_slower_steps_are_reported_with_the_last_recompile_and_noise_and_few_samples_are_not():
    recorder, steps = CompileRecorder(), TimedSteps()
    steps.run([10] * 12, compiled=False)
    steps.run([5] * 100, compiled=True)
    assert messages(recorder, steps.timer) == []
    mismatch = "tensor 'x' size mismatch at index 0: expected 4, actual 5"
    recorder.record("recompile", CompileKey("net", "train"), reason=mismatch)
    steps.run([14] * RECENT_WINDOWS * WINDOW_STEPS, compiled=True)
    (message,) = messages(recorder, steps.timer)
    assert "compiled train steps are slower than eager steps (14.00 ms in the last 30, eager 10.00 ms)." in message
    assert "Possible causes are the last recompile of target 'net' (tensor 'x' size mismatch" in message
    assert "other programs that use the machine" in message
    assert "train_mode='eager'" in message

    steps = TimedSteps()  # noise and few samples
    steps.run([8, 9, 10, 11, 12] * 4, compiled=False)
    steps.run([10.5] * 30, compiled=True)
    steps.run([90] * 2, compiled=True, workload="few")
    assert messages(recorder, steps.timer) == []


def noisy(median, count=20, spread=0.1):
    draw = random.Random(median)
    return tuple(median * (1 + draw.uniform(-spread, spread)) for _ in range(count))


@pytest.mark.parametrize(
    ("eager", "compiled", "verdict"),
    [
        ((), (), None),
        ((4.0,) * 9, (), None),
        ((), (4.0,) * 9, None),
        ((4.0,) * 4, (2.0,) * 9, None),
        ((4.0,) * 9, (2.0,) * 4, None),
        ((1045.0, 9.0), (5.0, 5.0), None),  # a garbage collection in one of two eager samples
        ((4.0,) * 5, (2.0,) * 5, "faster"),
        ((2.0,) * 5, (4.0,) * 5, "slower"),
        ((4.0,) * 5, (4.0,) * 5, "no difference"),
        (noisy(10.0), noisy(10.05), "no difference"),
        (noisy(10.0), noisy(5.0), "faster"),
        ((9.0, 9.1, 9.2, 9.1, 9.0, 9.2, 9.1, 1045.0), (10.0, 9.0, 9.2, 9.1, 9.3), "no difference"),
        ((9.0, 9.1, 9.2, 9.1, 1045.0), (10.0, 9.0, 9.2, 9.1, 9.3), "not comparable"),
        ((901.0,) * 9, (10.0,) * 9, "not comparable"),  # threads wait for each other
    ],
)
def test_speedup_needs_samples_and_an_interval_without_one(eager, compiled, verdict):
    found = compare([eager], [compiled])
    assert (found and found.outcome) == verdict


def test_a_disturbance_of_some_windows_and_a_drift_over_the_run_leave_no_clear_difference():
    """The eager steps may have run during such a disturbance, and are at the begin of the drift."""
    quiet, slow = noisy(10.0, 10), noisy(13.0, 10)
    assert compare([slow], [quiet] * 9).outcome == "faster"
    assert compare([slow], [*[quiet] * 8, slow]).outcome == "no difference"
    drifting = [noisy(10.0 - 0.02 * number, 10, 0.02) for number in range(30)]
    assert compare([noisy(10.0, 10, 0.02)], drifting).outcome == "no difference"
    assert compare([noisy(11.0, 10, 0.02)], drifting).outcome == "faster"


@pytest.mark.parametrize(
    ("baseline_steps", "compiled", "reason"),
    [(2, 5, "too few samples"), (5, 10, "no difference"), (0, 5, "too few samples")],
)
def test_a_run_without_evidence_reports_why(baseline_steps, compiled, reason, monkeypatch):
    Times(monkeypatch, train={"eager": 10, None: compiled})
    callback = InductorCompile("default", None, baseline_steps=baseline_steps, verify="off")
    trainer(callback).fit(Classifier(), loader(20))
    report, train = callback.report, callback.report.train
    assert (train.speedup, train.break_even_steps) == (None, None)
    assert (train.net_seconds_saved is None) == (baseline_steps < 5)
    assert train.verdict == reason
    assert train.compiled_step_ms == compiled
    assert not {"step/train/speedup", "step/train/break_even_steps"} & report.scalars().keys()
    assert reason in str(report)


def test_a_peak_is_measured_only_if_a_step_raises_it(monkeypatch):
    """The user's own code may read the peak of torch's CUDA allocator, so it is not reset."""
    allocated = [100]  # MiB
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: max(allocated) * 2**20)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", pytest.fail)
    memory = PeakMemory()

    def step(mib, *, compiled, traced=False):
        memory.start("train", None if compiled else "eager")
        allocated.append(mib)
        memory.stop(traced=traced)

    assert memory.peak("train", "eager") == Peak()
    for mib in (300, 938, 700):
        step(mib, compiled=False)
    step(950, compiled=True, traced=True)  # the compiler used this memory
    step(207, compiled=True)
    assert memory.peak("train", "eager") == Peak(mib=938)
    assert memory.peak("train") == Peak(at_most_mib=950)
    step(1000, compiled=True)
    assert memory.peak("train") == Peak(mib=1000)


WORK = Workload("train", "", ())


class Stream:
    """An accelerator's stream: workload is queued at once, and takes milliseconds to run."""

    def __init__(self):
        self.queued_ms = self.synchronized = 0.0

    def synchronize(self):
        self.synchronized = self.queued_ms

    def event(self, enable_timing=False):
        assert enable_timing
        stream, event = self, types.SimpleNamespace(at_ms=None)
        event.record = lambda: setattr(event, "at_ms", stream.queued_ms)
        event.query = lambda: stream.synchronized >= event.at_ms
        event.synchronize = lambda: setattr(stream, "synchronized", max(stream.synchronized, event.at_ms))
        event.elapsed_time = lambda end: end.at_ms - event.at_ms
        return event


@pytest.mark.parametrize("device", ["mps", "xpu", "cuda"])
def test_a_step_is_timed_by_the_device_without_a_synchronization(device, monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch, device, types.SimpleNamespace(Event=stream.event, synchronize=stream.synchronize))
    timer = StepTimer(clock=lambda: 0.0)  # no time passes on the CPU
    for _ in range(5):
        step = Step(variant=Variant(), kind="compiled", workload=WORK, span=Span(torch.device(device), timer.clock))
        stream.queued_ms += 4
        timer.stop("train", step, "train")
    assert timer.windows("train") == {}
    assert stream.synchronized == 0
    timer.synchronize()
    assert timer.windows("train") == {WORK: ((4.0, 4.0, 4.0),)}


def counted_steps(count, accumulated=1):
    """Run steps as `Session` does: steps that the timer does not want are only counted. Every step has a number."""
    timer = StepTimer()
    for number in range(1, count + 1):
        step = Step(variant=Variant(), kind="compiled", workload=Workload("train", f"{number % accumulated}"))
        if timer.untimed_left:
            timer.untimed_left -= 1
        else:
            step.span = types.SimpleNamespace(stop=lambda: None, passed=lambda: True, milliseconds=lambda ms=number: ms)
        timer.stop("train", step, "train")
    return timer


@pytest.mark.parametrize("count", [300, 1000, 10_000, 100_000])
def test_timed_steps_are_spread_evenly_over_the_run(count):
    timer = counted_steps(count)
    assert timer.steps("train") == {"compiled": count}
    (series,) = timer.series("train")
    windows = timer.windows("train")[Workload("train", "0")]
    assert MAX_WINDOWS // 2 <= len(windows) <= MAX_WINDOWS + 1
    begins = [window[0] for window in windows if len(window) == WINDOW_STEPS]
    distances = [after - before for before, after in itertools.pairwise(begins)]
    assert max(distances) <= 1.2 * min(distances)
    assert begins[-1] + 2.5 * max(distances) > count
    assert series["steps"] == sorted(set(series["steps"]))
    assert series["ms"] == [float(f"{number:.4g}") for number in series["steps"]]


@pytest.mark.parametrize("accumulated", [2, 3, 4, 8, 12, 16, 32])
def test_each_step_of_an_accumulation_is_timed_as_often_as_the_others(accumulated):
    windows = counted_steps(20_000, accumulated).windows("train")
    counts = [sum(map(len, of_workload)) for of_workload in windows.values()]
    assert len(counts) == accumulated
    assert min(counts) > 0.3 * sum(counts) / accumulated


def test_each_stage_has_its_own_windows():
    timer = counted_steps(9_900)
    assert (left := timer.untimed_left)
    for _ in range(20):
        timer.stop("train", Step(variant=Variant(), kind="compiled", workload=WORK, span=Span()), "other")
        assert timer.untimed_left == 0
    timer.stop("train", Step(variant=Variant(), kind="compiled"), "train")
    assert timer.untimed_left == left


@pytest.mark.parametrize("machine", [{}, {"bursts": 0.03}, {"drift": -0.05}, {"drift": 0.05}])
def test_equal_steps_are_seldom_called_faster_or_slower(machine, monkeypatch):
    """With 4% noise of a step. The program of the benchmark has the rates at true differences."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    simulate = importlib.import_module("false_verdicts").simulate_report
    outcomes = Counter(simulate(1.0, seed=seed, steps=1000, **machine) for seed in range(500))
    assert outcomes["faster"] <= 0.03 * 500
    assert outcomes["slower"] <= 0.03 * 500
    assert simulate(1.5, seed=0, steps=1000, **machine) == "faster"
