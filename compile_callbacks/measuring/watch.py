"""Whether compiled steps are faster than eager ones still, and what made them slower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compile_callbacks.measuring.by_size import BySize, pairs
from compile_callbacks.measuring.events import CompileEvent, CompileRecorder, EventKind
from compile_callbacks.measuring.timing import LATEST_SAMPLES, StepTimer, median_ms, spread_ms
from compile_callbacks.phases import Phase

SAMPLES_TO_JUDGE = 5
"""Fewer say nothing about whether compiled steps are slower."""

RECOMPILES_TO_JUDGE = 3
"""Fewer are the price of a new shape, and not a habit; they are counted on to the next look."""

_CAUSES: tuple[EventKind, ...] = ("recompile", "fallback", "cudagraph_skip")


@dataclass
class _Seen:
    """What was there at the last look at a phase, and when what it has yet to judge began."""

    steps: int = 0
    events_judged: int = 0
    steps_judged: int = 0


class Watch:
    """Compares the latest compiled steps of a phase with its eager baseline: those of equal work, or of similar size.

    Args:
        recorder: Knows what compiled, and why.
        timer: Knows how long steps took.
    """

    def __init__(self, recorder: CompileRecorder, timer: StepTimer) -> None:
        self._recorder = recorder
        self._timer = timer
        self._seen: dict[tuple[Phase, str | None], _Seen] = {}
        self._compiled: set[tuple[str, Phase, str | None]] = set()

    def look(self, phase: Phase, settings: str | None = None) -> Iterator[tuple[object, str]]:
        """What there is to warn of since the last look: a subject, the same for the same cause, and a message.

        Args:
            phase: The phase.
            settings: The settings that are in force, where the phase has had several.
        """
        seen = self._seen.setdefault((phase, settings), _Seen())
        steps = self._timer.compiled_steps(phase, settings)
        if steps == seen.steps:
            return
        seen.steps = steps
        yield from self._slower_steps(phase, settings)
        events = self._recorder.events
        new = [e for e in events[seen.events_judged :] if e.phase == phase and e.settings == settings]
        recompiles = [event for event in new if event.kind == "recompile"]
        if 0 < len(recompiles) < RECOMPILES_TO_JUDGE:
            return
        since, seen.steps_judged, seen.events_judged = seen.steps_judged, steps, len(events)
        yield from self._recompiles_that_do_not_pay(phase, settings, new, recompiles, steps - since)

    def _slower_steps(self, phase: Phase, settings: str | None) -> Iterator[tuple[object, str]]:
        worst: tuple[float, str] | None = None
        for eager, compiled, recent, batches in self._compared(phase, settings):
            if min(len(eager), len(recent)) < SAMPLES_TO_JUDGE:
                continue
            eager_ms, recent_ms, overall_ms = median_ms(eager) or 0, median_ms(recent) or 0, median_ms(compiled) or 0
            slower_ms = recent_ms - eager_ms
            if slower_ms <= max(spread_ms(eager) or 0, spread_ms(recent) or 0):
                continue
            if worst is None or slower_ms > worst[0]:
                never = "" if overall_ms < eager_ms else " and never pay for compiling"
                figures = f"{recent_ms:.2f} ms in the last {len(recent)}, against {eager_ms:.2f} ms{batches}"
                worst = slower_ms, f"compiled {phase} steps are slower than eager ones ({figures}){never}"
        if worst is not None:
            cause = self._last_cause(phase, settings)
            kind_and_reason = (cause.kind, cause.reason) if cause else None
            yield (phase, "slower", kind_and_reason), f"{worst[1]}; {_in_words(cause)}; {_remedy(phase)}"

    def _compared(
        self, phase: Phase, settings: str | None
    ) -> Iterator[tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], str]]:
        """Eager samples, compiled ones, the latest of these, and of which batches where that has to be said."""
        eager, compiled = self._timer.baseline(phase), self._timer.samples(phase, compiled=True, settings=settings)
        latest = self._timer.latest(phase, settings)
        if (by_size := BySize.of(eager, [work for work, _ in latest])) is not None:
            batches = ", as for the usual batch where hardly two are of the same shapes"
            yield by_size.eager_ms(), by_size.scaled_ms(pairs(compiled)), by_size.scaled_ms(latest), batches
        for work in eager.keys() & compiled.keys():
            yield eager[work], compiled[work], compiled[work][-LATEST_SAMPLES:], ""

    def _recompiles_that_do_not_pay(
        self,
        phase: Phase,
        settings: str | None,
        new: Sequence[CompileEvent],
        recompiles: Sequence[CompileEvent],
        steps: int,
    ) -> Iterator[tuple[object, str]]:
        anew = [
            event for event in new if event.kind == "compile" and event.part == "graph" and not self._is_first(event)
        ]
        times = self._timer.times(phase, settings)
        eager_ms = median_ms(times.eager_ms)
        if not recompiles or eager_ms is None:
            return
        # Where no compiled step does what an eager one did, it can save no more than all of an eager step.
        saved_ms = max(0.0, eager_ms - (median_ms(times.compiled_ms) or 0))
        lost_seconds, saved_seconds = sum(event.seconds or 0 for event in anew), saved_ms * steps / 1000
        if lost_seconds <= saved_seconds:
            return
        message = (
            f"compiled {phase} steps are slower than eager ones: compiling anew took {lost_seconds:.1f} s of the last "
            f"{steps} steps, in which compiled steps save {saved_seconds:.1f} s at most; {_in_words(recompiles[-1])}; "
            f"dynamic=True or fewer shapes need fewer graphs where shapes are the cause, and {_remedy(phase)}"
        )
        yield (phase, "recompiles", recompiles[-1].reason), message

    def _is_first(self, event: CompileEvent) -> bool:
        """Whether a compile is the first of its target, which is no compiling anew."""
        key = event.target, event.phase, event.settings
        first = key not in self._compiled
        self._compiled.add(key)
        return first

    def _last_cause(self, phase: Phase, settings: str | None) -> CompileEvent | None:
        events = (e for e in reversed(self._recorder.events) if e.phase == phase and e.settings == settings)
        return next((event for event in events if event.kind in _CAUSES), None)


def _in_words(cause: CompileEvent | None) -> str:
    if cause is None:
        return "nothing that torch tells of explains it: no recompile, fallback or CUDA graph that was skipped"
    kind = {"recompile": "recompile", "fallback": "fallback to eager"}.get(cause.kind, "CUDA graph that was skipped")
    return f"the last {kind} of target {cause.target!r}: {' '.join((cause.reason or 'torch gives no reason').split())}"


def _remedy(phase: Phase) -> str:
    return f"{phase}_mode=None leaves the phase eager"
