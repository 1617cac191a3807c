"""Compiled steps that become slower than eager ones are reported with the cause."""

from __future__ import annotations

import warnings

import pytest

from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks.profiling.compile_events import CompileKey, CompileRecorder
from compile_callbacks.runtime.diagnostics import RECENT_SAMPLES, SessionWarnings
from compile_callbacks.runtime.dispatcher import PhaseSwitch
from tests.support.step_times import TimedSteps

NET = CompileKey("net", "train")


@pytest.fixture
def recorder():
    return CompileRecorder()


@pytest.fixture
def steps():
    """Has an eager baseline of 10 ms."""
    steps = TimedSteps()
    steps.run([10] * 12, compiled=False)
    return steps


def messages(recorder, timer, phase="train"):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        SessionWarnings(WarnOnce(), PhaseSwitch([], recorder=recorder), recorder, timer).check_step_times(phase)
    return [str(warning.message) for warning in found]


def test_slower_steps_are_reported_with_the_last_recompile(recorder, steps):
    steps.run([5] * 100, compiled=True)
    assert messages(recorder, steps.timer) == []
    recorder.record("recompile", NET, reason="tensor 'x' size mismatch at index 0: expected 4, actual 5")
    steps.run([14] * RECENT_SAMPLES, compiled=True)
    (message,) = messages(recorder, steps.timer)
    assert "compiled train steps are slower than eager ones (14.00 ms in the last 20, eager 10.00 ms)." in message
    assert "The last recompile of target 'net': tensor 'x' size mismatch" in message
    assert "train_mode='eager'" in message


def test_noise_and_few_samples_are_not_reported(recorder):
    steps = TimedSteps()
    steps.run([8, 9, 10, 11, 12] * 4, compiled=False)
    steps.run([11] * 30, compiled=True)
    steps.run([90] * 2, compiled=True, workload="few")
    assert messages(recorder, steps.timer) == []
