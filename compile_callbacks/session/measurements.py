"""`Measurements`: measures step times, the eager baseline and the peak memory of both phases for a `Session`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_callbacks._utils.device import device_name
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.calls.phase_switch import ActiveConfig
from compile_callbacks.profiling.memory import PeakMemory
from compile_callbacks.profiling.step_timer import WARMUP_STEPS, StepTimer
from compile_callbacks.profiling.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a Trainer run.

    Attributes:
        phase: The phase, train or infer.
        name: The trainer's name: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        sanity: Whether this is the sanity check. Its steps run eagerly, and their times are not recorded.
        weights_frozen: Whether the weights are constant during the stage, so that compiled code may contain them.
    """

    phase: Phase = "train"
    name: str = "train"
    sanity: bool = False
    weights_frozen: bool = False


@dataclass(slots=True)
class Step:
    """One step: the processing of one batch, from its start to its end.

    Attributes:
        first: Whether the step is the first step of its stage.
        measured: Whether the time of the step may be used in the report.
        marker: The recorder's marker at the start of the step.
        number: The number of the step in its phase. The session only sets it for steps that it does not measure.
        timed: Whether the timer measures the step.
        compiled: Whether the step runs compiled.
        disturbed: Whether torch compiled during the step. Known at the end of the step.
        traced: Like ``disturbed``, but recording a CUDA graph does not count. Known at the end of the step.
    """

    first: bool = False
    measured: bool = False
    marker: tuple[int, int] = (0, 0)
    number: int = 0
    timed: bool = False
    compiled: bool = False
    disturbed: bool = False
    traced: bool = False


class Baseline:
    """Counts the eager steps of one phase, whose times are the baseline of the speedup.

    If one stage has too few steps, the eager steps continue in later stages. They take at most half of the steps of the
    run. If the run is too short for a baseline, it runs compiled from its first step.
    """

    def __init__(self, steps: int) -> None:
        self._wanted = steps
        self._samples = self._steps = 0
        self._max_steps: float = 0
        self._planned_for: float | None = None

    def plan(self, remaining_steps: float) -> None:
        """Plan for the remaining steps of the phase, ``math.inf`` if unknown. Only the first finite number counts."""
        if self._wanted == 0 or (self._planned_for is not None and math.isfinite(self._planned_for)):
            return
        self._planned_for = remaining_steps + self._steps
        half = math.inf if math.isinf(remaining_steps) else self._planned_for // 2
        self._wanted = int(min(self._wanted, half - WARMUP_STEPS))
        # Twice the number of samples, because a step with a smaller batch, or a compile of the user's code, gives no
        # sample.
        self._max_steps = min(2 * self._wanted + WARMUP_STEPS, half) if self._wanted > 0 else 0

    def skip(self) -> None:
        """Skip the eager steps, because an earlier run has measured the baseline."""
        self._planned_for = self._max_steps = 0

    @property
    def running(self) -> bool:
        """Whether the next step runs eagerly."""
        return self._samples < self._wanted and self._steps < self._max_steps

    def step(self, *, sample: bool) -> None:
        """Count an eager step, and its sample if it gave one."""
        self._steps += 1
        self._samples += sample


class Measurements:
    """Measures the steps of one session."""

    def __init__(self, module: nn.Module, baseline_steps: Mapping[Phase, int]) -> None:
        self.timer = StepTimer()
        self.memory = PeakMemory()
        self._module = module
        self.baselines = {phase: Baseline(steps) for phase, steps in baseline_steps.items()}
        self._device = torch.device("cpu")
        self._precision = ""
        self._processes = 1
        self._trained: int | None = None  # a hash of each weight's requires_grad

    def begin(self, device: torch.device, precision: str, processes: int) -> None:
        """Begin a Trainer run."""
        self._device, self._precision, self._processes = device, precision, processes

    def step_begins(self, step: Step, phase: Phase, active: ActiveConfig, *, tries: bool) -> bool:
        """Begin to measure a step."""
        if self._device.type == "cuda":
            self.memory.start(phase, compiled=step.compiled, candidate=active.candidate)
        return self.timer.start(self._device, wanted=tries or self.baselines[phase].running)

    def step_ends(
        self, step: Step, stage: Stage, active: ActiveConfig, workload: Workload | None, *, tuned: bool
    ) -> Workload | None:
        """End the measurement of a step."""
        phase = stage.phase
        if workload is not None:
            workload = workload.with_conditions(**self._conditions(step, stage, tuned=tuned))
        if step.disturbed:
            self._trained = None
        is_sample = self.timer.stop(
            phase, compiled=step.compiled, workload=workload, disturbed=step.disturbed, candidate=active.candidate
        )
        if self._device.type == "cuda" and step.measured:
            self.memory.stop(traced=step.traced)
        if not step.compiled and self.baselines[phase].running:
            self.baselines[phase].step(sample=is_sample)
        return workload

    def restart_warmup(self, phase: Phase, active: ActiveConfig) -> None:
        """Make the next step a warm-up step, because another config ran before it."""
        self.timer.restart_warmup(phase, compiled=active.config is not None, candidate=active.candidate)

    def counted_step(self, step: Step, phase: Phase, marker: tuple[int, int]) -> Step | None:
        """Return a step that stands for the next untimed steps, or ``None`` if they need more than a count."""
        if not self.timer.untimed_left or step.disturbed or not step.measured or self.baselines[phase].running:
            return None
        return Step(False, True, marker, self.timer.next_step(phase) - 1, compiled=step.compiled)

    def _conditions(self, step: Step, stage: Stage, *, tuned: bool) -> dict[str, object]:
        known: dict[str, object] = {"precision": self._precision}
        if stage.phase == "train":  # the backward pass depends on the weights that require grad
            if step.first or step.disturbed or self._trained is None:
                self._trained = zlib.crc32(bytes(weight.requires_grad for weight in self._module.parameters()))
            known["trained"] = self._trained
        if tuned:  # the first step of a stage compares frozen weights, and frozen weights need other code
            known |= {"first": step.first, "frozen": stage.weights_frozen}
        return known

    # ------------------------------------------------------------------------------------------ across runs

    def device_name(self) -> str:
        """Return the name of the hardware. Step times of different hardware are not compared."""
        name = device_name(self._device)
        if self._device.type == "cpu":
            name += f", {torch.get_num_threads()} threads"
        return name if self._processes == 1 else f"{self._processes} x {name}"

    def state_dict(self) -> dict[str, Any]:
        """Return the eager step times by phase, as plain data."""
        return {phase: [[list(w), list(ms)] for w, ms in self.timer.baseline(phase).items()] for phase in PHASES}

    def resume(self, state: Mapping[Any, Any]) -> None:
        """Use the eager step times of an earlier run on the same hardware instead of a new baseline."""
        for phase in PHASES:
            baseline = _baseline_from_data(state.get(phase))
            self.timer.restore(phase, baseline)
            if baseline:
                self.baselines[phase].skip()


def _baseline_from_data(data: Any) -> dict[Workload, tuple[float, ...]]:
    """Return step times by workload, from pairs of lists, or an empty dict if the data has another form."""
    try:
        found = {Workload.from_data(workload): tuple(map(float, samples)) for workload, samples in data}
    except (TypeError, ValueError, OverflowError):
        return {}
    return found if all(0 < sample < math.inf for samples in found.values() for sample in samples) else {}
