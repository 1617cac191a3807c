"""A clock for steps: they take as long as a test says."""

from __future__ import annotations

from types import SimpleNamespace

from compile_callbacks.config.inductor_config import Variant
from compile_callbacks.profiling.spans import Span
from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.profiling.steps import Step, Workload


class TimedSteps:
    """A `StepTimer` with a simulated clock."""

    def __init__(self):
        self.now = 0.0
        self.timer = StepTimer(lambda: self.now)

    def run(self, milliseconds, *, compiled, workload="w", compiling=False, variant=None):
        """Run steps of these lengths in the train phase; return which of them are samples."""
        kept = []
        kind = "compiled" if compiled else "eager"
        for length in milliseconds:
            step = Step(variant=Variant(None, variant if compiled else "eager"), kind=kind, compiling=compiling)
            step.span = Span(None, self.timer.clock)
            self.now += length / 1000
            step.workload = workload if isinstance(workload, Workload) else Workload(workload)
            self.timer.stop("train", step, step.workload.stage)
            kept.append(step.is_sample)
            self.now += 5  # the data loader's time is no part of a step
        return kept


class Times:
    """Replaces the clock: milliseconds by ``"eager"`` or candidate, or a function of that and the workload."""

    def __init__(self, monkeypatch, train=None, infer=None):
        self._ms = {"train": train or {}, "infer": infer or {}}
        real_stop = StepTimer.stop

        def stop(timer, phase, step, stage):
            ms = None if step.workload is None else self._fixed(phase, step.variant.name, step.workload)
            if step.span is not None and ms is not None and not step.compiling:
                step.span = SimpleNamespace(stop=lambda: None, passed=lambda: True, milliseconds=lambda: ms)
            real_stop(timer, phase, step, stage)

        monkeypatch.setattr(StepTimer, "stop", stop)

    def _fixed(self, phase, name, workload):
        of_phase = self._ms[phase]
        ms = of_phase(name, workload) if callable(of_phase) else of_phase.get(name)
        return None if ms is None else float(ms)
