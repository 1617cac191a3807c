"""`RecompileBudget`: limits the seconds that a `CompiledTarget` may spend on recompiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks._utils.messages import in_one_line
from compile_callbacks._utils.phases import Phase
from compile_callbacks.profiling.compile_events import CompileKey, CompileRecorder, EventKind

LEAST_SECONDS = 30.0
"""The minimum budget for recompiles."""

_REASONS = 3  # the number of reasons in the message


@dataclass(kw_only=True)
class CompileLimits:
    """The limits of the compiles of a session. They do not refer to the module, because torch never frees a backend."""

    seconds_saved: Callable[[Phase], float] = lambda phase: 0.0  # the time that compiled steps have saved so far
    stopping: Callable[[], bool] = lambda: False  # whether the process was asked to stop, so no compile should begin


def allowed_seconds(first_compile: float, saved: float) -> float:
    """Return the budget of a target: the time of its first compile or `LEAST_SECONDS`, plus the time saved."""
    return max(LEAST_SECONDS, first_compile) + max(0.0, saved)


class RecompileBudget:
    """Counts the seconds that a compiled target spends on recompiles and on graphs after graph breaks.

    The first graph does not count. `allowed_seconds` is the budget for all other graphs.
    """

    def __init__(
        self, key: CompileKey, recorder: CompileRecorder, limits: CompileLimits, warn: WarnOnce, *, bounded: bool
    ) -> None:
        self.exhausted = False
        """Whether inputs of new shapes run eagerly."""
        self._key = key
        self._recorder = recorder
        self._limits = limits
        self._warn = warn
        self._bounded = bounded

    def may_compile(self) -> bool:
        """Return ``False`` if the budget is used up, or if the process was asked to stop."""
        if self._limits.stopping():
            self._recorder.record("fallback", self._key, reason="the run was asked to stop before the compile began")
            return False
        return self.check()

    def check(self) -> bool:
        """Return whether the target has spent less than its budget, and warn the first time that it has not."""
        if not self._bounded:
            return True
        first, *others = self._recorder.compile_seconds.get(self._key, [0.0])
        allowed = allowed_seconds(first, self._limits.seconds_saved(self._key.phase))
        was_exhausted, self.exhausted = self.exhausted, sum(others) > allowed
        if self.exhausted and not was_exhausted:
            self._report(sum(map(bool, others)), sum(others), allowed)
        return not self.exhausted

    def _report(self, compiles: int, spent: float, allowed: float) -> None:
        target, phase = self._key.target, self._key.phase
        self._recorder.collect()
        breaks, recompiles = self._reasons("graph_break"), self._reasons("recompile")
        if len(breaks) > len(recompiles):
            causes = f"the first of {len(breaks)} graph breaks: {'; '.join(breaks[:_REASONS])}"
            fix = f"name the parts of {target!r} between the graph breaks in targets=[...]"
        else:
            causes = f"the first of {len(recompiles)} reasons: {'; '.join(recompiles[:_REASONS]) or 'torch gives none'}"
            fix = "pad inputs to a few sizes"
        message = (
            f"target {target!r} compiled {compiles} more graphs in {spent:.0f} s after its first graph in the {phase} "
            f"phase, which is more than its recompile budget of {allowed:.0f} s. Inputs that none of its graphs "
            f"accepts now run eagerly; {causes}. To avoid this, {fix}; new_shapes='recompile' removes the budget"
        )
        self._recorder.record("budget", self._key, reason=message)
        if self._key.candidate is None:  # because the report describes the candidates of a Tune
            self._warn.warn("CC130", message, about=self._key)

    def _reasons(self, kind: EventKind) -> list[str]:
        key = self._key
        events = [
            e
            for e in self._recorder.events_of(key.phase, kind)
            if (e.target, e.candidate) == (key.target, key.candidate)
        ]
        return list(dict.fromkeys(_describe(e.reason or "", e.file, e.line) for e in events))


def _describe(reason: str, file: str | None, line: int | None) -> str:
    text = in_one_line(reason, 100)
    return f"{text} ({file}:{line})" if file else text
