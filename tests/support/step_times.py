"""A clock for steps: they take as long as a test says."""

from __future__ import annotations

from types import SimpleNamespace

from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.profiling.workload import Workload


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
            self.timer.start()
            self.now += length / 1000
            of = workload if isinstance(workload, Workload) else Workload(workload)
            name = variant if compiled else "eager"
            is_sample, _ = self.timer.stop("train", name, kind, workload=of, compiling=compiling)
            kept.append(is_sample)
            self.now += 5  # the data loader's time is no part of a step
        return kept


class Times:
    """Replaces the clock: milliseconds by ``"eager"`` or candidate, or a function of that and the workload."""

    def __init__(self, monkeypatch, train=None, infer=None):
        self._ms = {"train": train or {}, "infer": infer or {}}
        real_stop = StepTimer.stop

        def stop(timer, phase, variant, kind, *, workload, compiling):
            ms = None if workload is None else self._fixed(phase, variant, workload)
            if timer._span is not None and ms is not None and not compiling:
                timer._span = SimpleNamespace(stop=lambda: None, passed=lambda: True, milliseconds=lambda: ms)
            return real_stop(timer, phase, variant, kind, workload=workload, compiling=compiling)

        monkeypatch.setattr(StepTimer, "stop", stop)

    def _fixed(self, phase, name, workload):
        of_phase = self._ms[phase]
        ms = of_phase(name, workload) if callable(of_phase) else of_phase.get(name)
        return None if ms is None else float(ms)
