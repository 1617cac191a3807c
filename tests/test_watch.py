"""Compiled steps that become slower than eager ones: what is said, and which cause is named."""

from __future__ import annotations

import random

import pytest
import torch
from models import CLASSES, FEATURES, Classifier, trainer
from torch.utils.data import DataLoader

from compile_callbacks import CompileWarning, InductorCompile
from compile_callbacks.measuring.events import CompileRecorder, Owner
from compile_callbacks.measuring.timing import LATEST_SAMPLES, StepTimer
from compile_callbacks.measuring.watch import Watch
from compile_callbacks.measuring.work import Work

pytestmark = pytest.mark.newest

NET = Owner("net", "train")


class Steps:
    """A timer with a clock of its own, told how long each step takes."""

    def __init__(self):
        self.now = 0.0
        self.timer = StepTimer(lambda: self.now)

    def run(self, milliseconds, *, compiled, work="w", times=1):
        for length in [milliseconds] * times:
            self.timer.start(cuda=False)
            self.now += length / 1000
            self.timer.stop(
                "train", compiled=compiled, work=work if isinstance(work, Work) else Work(work), disturbed=False
            )


@pytest.fixture
def recorder():
    return CompileRecorder()


@pytest.fixture
def steps():
    """Has an eager baseline of 10 ms."""
    steps = Steps()
    steps.run(10, compiled=False, times=12)
    return steps


def said(watch):
    return [message for _, message in watch.look("train")]


def test_faster_steps_are_nothing_to_speak_of(recorder, steps):
    watch = Watch(recorder, steps.timer)
    assert said(watch) == []
    steps.run(5, compiled=True, times=30)
    assert said(watch) == []


def test_steps_that_became_slower_are_told_with_the_cause(recorder, steps):
    watch = Watch(recorder, steps.timer)
    steps.run(5, compiled=True, times=100)
    assert said(watch) == []
    recorder.add("recompile", NET, reason="tensor 'x' size mismatch at index 0: expected 4, actual 5")
    steps.run(14, compiled=True, times=LATEST_SAMPLES)
    (message,) = said(watch)
    assert "compiled train steps are slower than eager ones (14.00 ms in the last 20, against 10.00 ms);" in message
    assert "the last recompile of target 'net': tensor 'x' size mismatch" in message
    assert "train_mode=None" in message
    assert "never pay" not in message


def test_steps_that_were_always_slower_never_pay_and_an_unknown_cause_is_said_to_be_unknown(recorder, steps):
    watch = Watch(recorder, steps.timer)
    steps.run(14, compiled=True, times=30)
    (message,) = said(watch)
    assert "never pay for compiling" in message
    assert "no recompile, fallback or CUDA graph that was skipped" in message


def test_a_subject_is_the_cause(recorder, steps):
    watch = Watch(recorder, steps.timer)
    subjects = []
    for kind, reason in [("cudagraph_skip", "mutated inputs"), ("cudagraph_skip", "mutated inputs"), ("fallback", "x")]:
        recorder.add(kind, NET, reason=reason)
        steps.run(14, compiled=True, times=30)
        subjects += [subject for subject, _ in watch.look("train")]
    assert subjects[0] == subjects[1] != subjects[2]


def test_steps_of_other_work_and_of_other_phases_are_not_compared(recorder, steps):
    watch = Watch(recorder, steps.timer)
    steps.run(30, compiled=True, work="larger", times=30)
    assert said(watch) == []
    assert list(watch.look("infer")) == []


def test_noise_and_few_samples_are_nothing_to_speak_of(recorder):
    steps = Steps()
    for length in (8, 9, 10, 11, 12) * 4:
        steps.run(length, compiled=False)
    watch = Watch(recorder, steps.timer)
    steps.run(11, compiled=True, times=30)
    assert said(watch) == []
    few = Watch(recorder, steps.timer)
    steps.run(90, compiled=True, work="few", times=2)
    assert said(few) == []


def compile_anew(recorder, times, seconds):
    for _ in range(times):
        recorder.add("compile", NET, part="graph", seconds=seconds, graphs=1)
        recorder.add("recompile", NET, reason="size mismatch")


def test_recompiles_that_take_more_than_steps_save_are_told(recorder, steps):
    watch = Watch(recorder, steps.timer)
    recorder.add("compile", NET, part="graph", seconds=60, graphs=1)  # the first: what compiling costs
    steps.run(5, compiled=True, times=100)
    assert said(watch) == []
    compile_anew(recorder, 4, 1.0)
    steps.run(5, compiled=True, times=100)
    (message,) = said(watch)
    assert "compiling anew took 4.0 s of the last 100 steps, in which compiled steps save 0.5 s at most" in message
    assert "size mismatch" in message
    steps.run(5, compiled=True, times=100)
    assert said(watch) == []


def test_one_recompile_an_epoch_adds_up(recorder, steps):
    watch = Watch(recorder, steps.timer)
    recorder.add("compile", NET, part="graph", seconds=60, graphs=1)
    messages = []
    for epoch in range(12):
        if epoch >= 4:  # quiet epochs before it are no part of it
            compile_anew(recorder, 1, 1.0)
        steps.run(5, compiled=True, times=100)
        messages.append(said(watch))
    assert [len(told) for told in messages] == [0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0]
    assert "compiling anew took 3.0 s of the last 300 steps, in which compiled steps save 1.5 s" in messages[6][0]


def test_steps_of_varying_shapes_that_became_slower_are_told(recorder):
    steps, chance = Steps(), random.Random(0)

    def run(factor, times, *, compiled):
        for _ in range(times):
            size = chance.randint(100, 300)
            steps.run(factor * (5 + size / 20), compiled=compiled, work=Work("train", "tokens", ((size,),)))

    run(1, 12, compiled=False)
    watch = Watch(recorder, steps.timer)
    run(0.6, 100, compiled=True)
    assert said(watch) == []
    recorder.add("recompile", NET, reason="tensor 'x' size mismatch at index 0: expected 4, actual 5")
    run(1.4, LATEST_SAMPLES, compiled=True)
    (message,) = said(watch)
    assert "as for the usual batch where hardly two are of the same shapes" in message
    assert "size mismatch" in message
    assert "never pay" not in message


@pytest.mark.parametrize(("times", "seconds"), [(2, 10), (4, 0.1)])
def test_a_new_shape_or_cheap_recompiles_are_nothing_to_speak_of(recorder, steps, times, seconds):
    watch = Watch(recorder, steps.timer)
    recorder.add("compile", NET, part="graph", seconds=60, graphs=1)
    compile_anew(recorder, times, seconds)
    steps.run(5, compiled=True, times=100)
    assert said(watch) == []


def test_a_run_of_many_shapes_is_told_that_compiling_anew_does_not_pay():
    sizes = [4] * 12 + [5, 6, 7, 8, 9]
    batches = [(torch.randn(size, FEATURES), torch.randint(CLASSES, (size,))) for size in sizes]
    ours = InductorCompile({"dynamic": False}, None, baseline_steps=5)
    with pytest.warns(
        CompileWarning, match=r"compiling anew took .* of the last .* steps.*the last recompile of target"
    ):
        trainer(ours).fit(Classifier(), DataLoader(batches, batch_size=None))
    assert ours.report.train.recompiles >= 3
