"""`PhaseRun`: everything about one phase of a `Session`: its settings, its contest and its step times."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from compile_callbacks._utils.phases import Phase
from compile_callbacks._utils.signatures import signature
from compile_callbacks.config.dynamo_settings import healing_settings
from compile_callbacks.config.inductor_config import EAGER_VARIANT, WAITING_VARIANT, Variant
from compile_callbacks.graphs.requests import RequestQueue
from compile_callbacks.profiling.comparison import median_ms
from compile_callbacks.profiling.events import CompileEvent, CompileKey
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.profiling.step_times import PhaseTimes, Step, Workload
from compile_callbacks.tuning.candidates import CompileFacts
from compile_callbacks.tuning.contest import Contest
from compile_callbacks.tuning.tune import PhaseConfig, Tune

LEAST_SECONDS = 60.0
"""The duration of the rest of a run for which a compile is requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a Trainer run."""

    phase: Phase = "train"
    eager: bool = False  # whether its steps run eagerly and are not measured, as in the sanity check
    weights_frozen: bool = False  # whether the weights are constant, so that compiled code may contain them


class PhaseRun(Contest):
    """One phase of a session, over any number of Trainer runs."""

    def __init__(
        self,
        phase: Phase,
        settings: PhaseConfig,
        module: nn.Module,
        recorder: CompileRecorder,
        requests: RequestQueue,
        print_line: Callable[[str], None],
    ) -> None:
        super().__init__(phase, settings)
        self.times = PhaseTimes(phase)
        self.settled: Any = None  # the decision and the turn on which the session has acted
        self._module, self._recorder, self._requests, self._print_line = module, recorder, requests, print_line
        self._loaded = False  # whether the code from another process is loaded
        self._usual_conditions: tuple[Stage | None, str] = (None, "")

    def events(self, *kinds: str, candidate: str | None = None) -> list[CompileEvent]:
        """Return the events of these kinds, or of all kinds, about a candidate."""
        of_phase = [event for event in self._recorder.events if event.phase == self.phase]
        return [e for e in of_phase if e.candidate == candidate and (not kinds or e.kind in kinds)]

    def tell(self, line: str) -> None:
        """Print the choice of a `Tune`, or record that the only config is slower."""
        if isinstance(self.settings, Tune):
            self._print_line(line)
        else:
            self._recorder.record("sent_back", CompileKey("the module", self.phase), reason=line)

    def facts(self, variant: Variant) -> CompileFacts:
        """Return the facts about the compiles of a variant."""
        self._recorder.collect()
        events = self.events(candidate=variant.name)
        problems: list[Any] = [("wrong", e.reason or "it differs from eager") for e in events if e.verdict == "differs"]
        failures = self.events("fallback", "without_cudagraphs", candidate=variant.name)
        problems += [("failed", e.reason or "torch gives no reason") for e in failures]
        if variant.config is not None and not any(event.graphs for event in events):
            problems.append(("failed", "nothing was compiled in its steps"))
        seconds = sum(event.seconds or 0 for event in events if event.kind in ("compile", "background"))
        breaks = [event.reason or "" for event in events if event.kind == "graph_break"]
        return CompileFacts(seconds, next(iter(problems), None), tuple(healing_settings(breaks)))

    def waits(self, variant: Variant) -> Variant | None:
        """Return the variant to run while another process compiles this one, or ``None`` if this one runs."""
        if not self._loaded and self._requests.waits(self.phase, variant.name):
            return WAITING_VARIANT
        if self._loaded or variant.name is not None:  # or a candidate of a `Tune`
            return None
        if self._requests.failure is not None:
            return EAGER_VARIANT
        self._loaded = bool(self.events("compile"))
        return EAGER_VARIANT if not self._loaded and self._is_too_short() else None

    def _is_too_short(self) -> bool:
        """Return whether the rest of the run is too short to repay a compile, and record it once."""
        seconds = self.steps_left * (median_ms(self.times.compared().eager_ms) or math.inf) / 1000
        if (is_short := seconds < LEAST_SECONDS) and not self.events("not_requested"):
            reason = f"the rest of the run is too short to repay a compile (about {seconds:.0f} s)"
            self._recorder.record("not_requested", CompileKey("the module", self.phase), reason=reason)
        return is_short

    def end_step(self, step: Step, stage: Stage, batch: Any, loader: str, accumulated: str) -> None:
        """End a step: measure it, and tell the contest about it."""
        if step.timed_on is not None:
            if step.first or step.compiling or stage is not self._usual_conditions[0]:
                self._usual_conditions = stage, self._describe_conditions(step, stage)
            conditions = f"{accumulated}, {self._usual_conditions[1]}" if accumulated else self._usual_conditions[1]
            step.workload = Workload(loader, conditions, signature(batch))
            if step.first or step.compiling:
                self._usual_conditions = None, ""  # because the next step may differ
        if step.compiling:
            events = self.events("compile", "verify", candidate=step.variant.name)
            parts = {event.part for event in events if event.step == self.times.number + 1}
            if parts != {"cudagraph"}:  # the step did more than to record a CUDA graph
                self.times.peak_before = None
        self.times.end(step, loader)
        if self.turn is not None:
            self.done(step)
        given_up = self.events("without_cudagraphs", candidate=step.variant.name) if step.compiling else ()
        reasons = [event.reason or "" for event in given_up if event.step == self.times.number]
        if reasons and self.give_up_cuda_graphs(step.variant, reasons[-1]):
            self.times.forget(step.variant.name)
            self._loaded = False

    def _describe_conditions(self, step: Step, stage: Stage) -> str:
        """Describe the conditions on which the time of a step depends, in addition to its batch."""
        known: dict[str, object] = {"precision": self.conditions.precision}
        if stage.phase == "train":  # the backward pass depends on the weights that require grad
            known["trained"] = zlib.crc32(bytes(weight.requires_grad for weight in self._module.parameters()))
        if isinstance(self.settings, Tune):
            known |= {"first": step.first, "frozen": stage.weights_frozen}  # the first step compares frozen weights
        return ", ".join(f"{name}={value}" for name, value in known.items())
