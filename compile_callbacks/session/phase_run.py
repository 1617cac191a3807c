"""`PhaseRun`: everything about one phase of a `Session`: its settings, its policy, its step times and its memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_callbacks._utils.phases import Phase
from compile_callbacks._utils.signatures import signature
from compile_callbacks.config.dynamo_settings import healing_settings
from compile_callbacks.config.inductor_config import EAGER_VARIANT, WAITING_VARIANT, Variant
from compile_callbacks.graphs.requests import RequestQueue
from compile_callbacks.profiling.comparison import median_ms
from compile_callbacks.profiling.events import CompileEvent
from compile_callbacks.profiling.memory import PeakMemory
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.profiling.step_times import PhaseTimes, Step, Workload
from compile_callbacks.tuning.candidates import CompileFacts, Verdict
from compile_callbacks.tuning.contest import Contest
from compile_callbacks.tuning.ranks import Ranks
from compile_callbacks.tuning.tune import PhaseConfig, Tune
from compile_callbacks.tuning.tuning import Tuning

LEAST_SECONDS = 60.0
"""The duration of the rest of a run for which a compile is requested, unless an earlier run recorded its duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a Trainer run.

    Attributes:
        phase: The phase, train or infer.
        eager: Whether its steps run eagerly and are not measured, as in the sanity check.
        weights_frozen: Whether the weights are constant during the stage, so that compiled code may contain them.
    """

    phase: Phase = "train"
    eager: bool = False
    weights_frozen: bool = False


class PhaseRun:
    """One phase of a session, over any number of Trainer runs.

    Args:
        phase: The phase.
        settings: The config or the `Tune`, or ``None`` if the phase is not compiled.
        module: The module of the session.
        recorder: The recorder of the session.
        requests: The graphs that another process compiles, with ``background=True``.
        ranks: The ranks of the run.
        baseline_steps: The wanted number of eager samples.
        record: Records an event about the whole phase: its kind and its reason.
        print_line: Prints a line.
    """

    def __init__(
        self,
        phase: Phase,
        settings: PhaseConfig,
        *,
        module: nn.Module,
        recorder: CompileRecorder,
        requests: RequestQueue | None,
        ranks: Ranks,
        baseline_steps: int,
        record: Callable[[str, str], None],
        print_line: Callable[[str], None],
    ) -> None:
        self.phase, self.settings = phase, settings
        self.times, self.memory = PhaseTimes(phase), PeakMemory()
        self.is_freed = False
        """Whether the code of variants that will not run again is freed."""
        self.device, self.precision = torch.device("cpu"), ""  # of the run
        self._module, self._recorder, self._requests, self._record = module, recorder, requests, record
        self._loaded = False  # whether the code from another process is loaded
        self._conditions: tuple[Stage | None, str] = (None, "")
        waits = None if requests is None else self._waits
        self.policy: Contest
        if isinstance(settings, Tune):
            self.policy = Tuning(phase, settings, ranks, facts=self._facts, waits=waits, print_line=print_line)
        else:
            self.policy = Contest(
                Variant(settings) if settings else EAGER_VARIANT,
                baseline_steps if settings else 0,
                waits=waits,
                # Each step takes as long as that of the slowest rank, so a rank cannot decide by its own times.
                compares=lambda: requests is not None and settings is not None and ranks.size == 1,
                sent_back=lambda reason: record("sent_back", reason),
            )

    # ------------------------------------------------------------------------------------------ variants

    @property
    def chosen(self) -> Variant:
        """The variant of the phase after its eager steps, or eager while a `Tune` has not chosen a candidate."""
        return self.policy.chosen or EAGER_VARIANT

    @property
    def mode_argument(self) -> str:
        """The argument that sets the mode of the phase."""
        return self._recorder.mode_arguments[self.phase]

    def events(self, *kinds: str, candidate: str | None = None) -> list[CompileEvent]:
        """Return the events of these kinds, or of all kinds, about a candidate."""
        of_phase = [event for event in self._recorder.events if event.phase == self.phase]
        return [e for e in of_phase if e.candidate == candidate and (not kinds or e.kind in kinds)]

    def _facts(self, variant: Variant) -> CompileFacts:
        self._recorder.collect()
        events = self.events(candidate=variant.name)
        wrong = (e.reason or "its results differ from eager's" for e in events if e.verdict == "differs")
        failed = (e.reason or "torch gives no reason" for e in events if e.kind == "fallback")
        problem: tuple[Verdict, str] | None = None
        if (reason := next(wrong, None)) is not None:
            problem = "wrong", reason
        elif (reason := next(failed, None)) is not None:
            problem = "failed", reason
        elif variant.config is not None and not any(event.graphs for event in events):
            problem = "failed", "nothing was compiled in its steps"
        seconds = sum(event.seconds or 0 for event in events if event.kind in ("compile", "background"))
        breaks = [event.reason or "" for event in events if event.kind == "graph_break"]
        return CompileFacts(seconds, problem, tuple(healing_settings(breaks)[0]))

    # ------------------------------------------------------------------------------------------ background=True

    def _waits(self, variant: Variant) -> Variant | None:
        """Return the variant to run while another process compiles this one, or ``None`` if this one runs."""
        requests = self._requests
        if requests is None or self._loaded:
            return None
        if requests.waits(self.phase, variant.name):
            return WAITING_VARIANT
        if variant.name is not None:  # a candidate of a `Tune`
            return None
        if requests.failure is not None:
            return EAGER_VARIANT
        self._loaded = bool(self.events("compile"))
        return EAGER_VARIANT if not self._loaded and self._is_too_short() else None

    def _is_too_short(self) -> bool:
        """Return whether the rest of the run is too short to repay a compile, and record it once."""
        eager_ms = median_ms(self.times.times().eager_ms)
        seconds = self.policy.steps_left * eager_ms / 1000 if eager_ms else float("inf")
        is_short = seconds < (2 * self._recorder.progress.known_seconds(self.phase) or LEAST_SECONDS)
        if is_short and not any(event.kind == "not_requested" for event in self.events()):
            reason = f"the rest of the run is too short to repay a compile (about {seconds:.0f} s)"
            self._record("not_requested", reason)
        return is_short

    # ------------------------------------------------------------------------------------------ a step

    def begin_step(self, step: Step) -> None:
        """Begin to measure a step."""
        if self.device.type == "cuda":
            self.memory.start(step.variant.name)
        self.times.begin(step, self.device)

    def end_step(self, step: Step, stage: Stage, loader: str, batch: Any, accumulated: str) -> None:
        """End a step: measure it, and tell the policy about it."""
        if step.span is not None:
            if step.first or step.compiling or stage is not self._conditions[0]:
                self._conditions = stage, self._describe_conditions(step, stage)
            conditions = f"{accumulated}, {self._conditions[1]}" if accumulated else self._conditions[1]
            step.workload = Workload(loader, conditions, signature(batch))
            if step.first or step.compiling:
                self._conditions = None, ""  # because the next step may differ
        self.times.end(step, loader)
        if self.device.type == "cuda":
            # Replays of a CUDA graph allocate nothing, so the step that records it is measured. Other compiles are not.
            events = self.events("compile", "verify", candidate=step.variant.name) if step.compiling else ()
            parts = {event.part for event in events if event.step == self.times.number}
            self.memory.stop(step.variant.name, traced=step.compiling and parts != {"cudagraph"})
        if self.policy.winner is None:
            self.is_freed &= not self.policy.done(step)

    def _describe_conditions(self, step: Step, stage: Stage) -> str:
        """Describe the conditions on which the time of a step depends, in addition to its batch."""
        known: dict[str, object] = {"precision": self.precision}
        if stage.phase == "train":  # the backward pass depends on the weights that require grad
            known["trained"] = zlib.crc32(bytes(weight.requires_grad for weight in self._module.parameters()))
        if isinstance(self.settings, Tune):
            # The first step of a stage compares frozen weights, and frozen weights need other code.
            known |= {"first": step.first, "frozen": stage.weights_frozen}
        return ", ".join(f"{name}={value}" for name, value in known.items())
