"""When a phase with ``background=True`` requests compiled code, switches to it, and goes back to eager."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest

from compile_callbacks.config.inductor_config import InductorConfig, Variant
from compile_callbacks.graphs.requests import RequestQueue
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.profiling.steps import Step, Workload
from compile_callbacks.session.background_policy import BLOCK_SAMPLES, BackgroundPolicy

WAITING = SimpleNamespace(key=CompileKey("net", "train"))


class Run:
    """Steps of a phase, on a simulated clock."""

    def __init__(self, *, eager_ms=2.0, compiled_ms=1.0, known_seconds=0.0, steps_left=math.inf, baseline=12, ranks=1):
        self.recorded, self.names = [], []
        self.ms = {"eager": eager_ms, "waiting": eager_ms, None: compiled_ms}
        self.captured = False
        self.requests = RequestQueue()
        self.timer = StepTimer()
        self.policy = BackgroundPolicy(
            "train",
            Variant(InductorConfig()),
            self.requests,
            self.timer,
            lambda kind, reason: self.recorded.append((kind, reason)),
            lambda: known_seconds,
            SimpleNamespace(size=ranks),
        )
        self.policy.steps_left = steps_left
        for _ in range(baseline):
            self._time(Step(workload=Workload("train")), "eager")

    def steps(self, count, *, skipped=False):
        """Run steps, and return the names of their variants in order, each with the number of steps.

        If they are ``skipped``, they call no target.
        """
        names = []
        for _ in range(count):
            variant, _ = self.policy.next()
            waits = bool(self.requests.waiting) or skipped
            first = variant.config is not None and not self.captured and not skipped
            self.captured |= first
            kind = "compiled" if variant.config is not None and not (first or waits) else "eager"
            step = Step(variant=variant, kind=kind, compiling=first, workload=Workload("train"))
            if first:  # captures a graph
                self.requests.waiting.append(WAITING)
            self._time(step, variant.name)
            self.policy.done(step)
            names.append(variant.name)
            self.names.append(variant.name)
        return [(name, len(list(group))) for name, group in itertools.groupby(names)]

    def _time(self, step, name):
        ms = self.ms[name]
        ms = float(ms(len(self.names)) if callable(ms) else ms)
        step.span = SimpleNamespace(stop=lambda **step: None, passed=lambda: True, milliseconds=lambda: ms)
        self.timer.stop("train", step, "train")


def test_steps_run_eagerly_until_the_graphs_are_compiled():
    run = Run()
    assert run.steps(5) == [(None, 1), ("waiting", 4)]
    run.requests.waiting.clear()
    assert run.steps(1000) == [(None, 1000)]
    # A graph for a new shape waits, too, and the other graphs run compiled.
    run.requests.waiting.append(WAITING)
    assert run.steps(3) == [(None, 3)]
    assert not run.recorded


def test_a_step_that_calls_no_target_captures_nothing():
    run = Run()
    assert run.steps(3, skipped=True) == [(None, 3)]
    assert run.steps(5) == [(None, 1), ("waiting", 4)]


def test_slower_steps_go_back_to_eager_after_one_comparison():
    run = Run(compiled_ms=2.5)
    run.steps(5)
    run.requests.waiting.clear()
    names = run.steps(300)
    assert [name for name, _ in names] == [None, "eager", None, "eager", None, "eager", None, "eager"]
    assert run.recorded == [("sent_back", "compiled steps were slower in alternating blocks (2.00 → 2.50 ms)")]
    assert sum(count for name, count in names[1:-1]) <= 6 * (BLOCK_SAMPLES + 2)
    assert run.steps(1000) == [("eager", 1000)]


def test_a_rank_does_not_go_back_by_its_own_times():
    """Each step lasts as long as that of the slowest rank."""
    run = Run(compiled_ms=2.5, ranks=2)
    run.steps(5)
    run.requests.waiting.clear()
    assert run.steps(300) == [(None, 300)]


def test_steps_that_only_look_slower_stay_compiled():
    """The machine became slower after the baseline, for both."""
    run = Run(eager_ms=lambda step: 2.0 if step < 5 else 3.0, compiled_ms=2.5)
    run.steps(5)
    run.requests.waiting.clear()
    names = run.steps(300)
    assert [name for name, _ in names] == [None, "eager", None, "eager", None, "eager", None]
    assert not run.recorded
    assert run.steps(2000) == [(None, 2000)]


def test_steps_that_become_slower_later_are_compared_later():
    run = Run(compiled_ms=lambda step: 1.0 if step < 600 else 2.6)
    run.steps(5)
    run.requests.waiting.clear()
    assert run.steps(500) == [(None, 500)]
    names = run.steps(6000)
    assert names[-1][0] == "eager"
    assert [kind for kind, _ in run.recorded] == ["sent_back"]


@pytest.mark.parametrize(
    ("steps_left", "known_seconds", "requests"),
    [(29_000, 0.0, False), (31_000, 0.0, True), (29_000, 20.0, True), (29_000, 40.0, False), (math.inf, 40.0, True)],
)
def test_a_compile_that_the_run_cannot_repay_is_not_requested(steps_left, known_seconds, requests):
    run = Run(steps_left=steps_left, known_seconds=known_seconds)
    assert run.steps(3) == ([(None, 1), ("waiting", 2)] if requests else [("eager", 3)])
    assert [kind for kind, _ in run.recorded] == ([] if requests else ["not_requested"])


def test_after_a_failure_the_steps_stay_eager():
    run = Run()
    run.steps(5)
    run.requests.failure = "it died"
    assert run.steps(100) == [("eager", 100)]
