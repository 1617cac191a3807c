"""A clock for steps: they take as long as a test says."""

from __future__ import annotations

from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.profiling.workload import Work


class Fixed:
    """A step time."""

    def __init__(self, ms):
        self.ms = ms

    def passed(self):
        return True

    def milliseconds(self):
        return float(self.ms)


class TimedSteps:
    """A `StepTimer` with a simulated clock."""

    def __init__(self):
        self.now = 0.0
        self.timer = StepTimer(lambda: self.now)

    def run(self, milliseconds, *, compiled, work="w", disturbed=False, settings=None):
        """Run steps of these lengths in the train phase; return which of them are samples."""
        kept = []
        for length in milliseconds:
            self.timer.start()
            self.now += length / 1000
            of = work if isinstance(work, Work) else Work(work)
            kept.append(self.timer.stop("train", compiled=compiled, work=of, disturbed=disturbed, settings=settings))
            self.now += 5  # the data loader's time is no part of a step
        return kept


class Times:
    """Stands in for the clock: a step takes as long as the test says for the settings that it runs with.

    Args:
        monkeypatch: pytest's fixture.
        train: Milliseconds by settings (``"eager"``, or a candidate), or a function of the settings and the work.
        infer: The same for the infer phase.
    """

    def __init__(self, monkeypatch, train=None, infer=None):
        self._ms = {"train": train or {}, "infer": infer or {}}
        real_samples, real_stop = StepTimer.samples, StepTimer.stop

        def samples(timer, phase, *, compiled, settings=None):
            found = real_samples(timer, phase, compiled=compiled, settings=settings)
            name = settings if compiled else "eager"
            fixed = {work: self._fixed(phase, name, work) for work in found}
            return {work: found[work] if ms is None else (ms,) * len(found[work]) for work, ms in fixed.items()}

        def stop(timer, phase, *, compiled, work, disturbed, settings=None):
            sample = real_stop(timer, phase, compiled=compiled, work=work, disturbed=disturbed, settings=settings)
            name = settings if compiled else "eager"
            ms = None if work is None else self._fixed(phase, name, work)  # not every step is timed
            if timer.last_step is not None and ms is not None:
                timer.last_step = Fixed(ms)
            return sample

        monkeypatch.setattr(StepTimer, "samples", samples)
        monkeypatch.setattr(StepTimer, "stop", stop)

    def _fixed(self, phase, name, work):
        of_phase = self._ms[phase]
        ms = of_phase(name, work) if callable(of_phase) else of_phase.get(name)
        return None if ms is None else float(ms)
