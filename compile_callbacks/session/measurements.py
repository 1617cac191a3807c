"""`Measurements`: measures step times and the peak memory of both phases for a `Session`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compile_callbacks._utils.device import device_name
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks._utils.signatures import signature
from compile_callbacks.profiling.comparison import is_too_noisy
from compile_callbacks.profiling.memory import PeakMemory
from compile_callbacks.profiling.spans import Span
from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.profiling.steps import Stage, Step, Workload, workload_of


class Measurements:
    """Measures the steps of one session."""

    def __init__(self, module: nn.Module) -> None:
        self.timer = StepTimer()
        self.memory = PeakMemory()
        self._module = module
        self._device = torch.device("cpu")
        self._precision = ""
        self._world_size = 1
        self._stage: Stage | None = None  # the stage of `_conditions`
        self._conditions = ""

    def begin(self, device: torch.device, precision: str, world_size: int) -> None:
        """Begin a Trainer run."""
        self._device, self._precision, self._world_size = device, precision, world_size

    def step_begins(self, step: Step, phase: Phase, *, wanted: bool) -> None:
        """Begin to measure a step. It is timed at least if this is ``wanted``."""
        if self._device.type == "cuda":
            self.memory.start(phase, step.variant.name)
        if wanted or not self.timer.untimed_left:
            step.span = Span(self._device, self.timer.clock)
        else:
            self.timer.untimed_left -= 1

    def step_ends(self, step: Step, stage: Stage, loader: str, batch: Any, accumulated: str, *, compares: bool) -> None:
        """End the measurement of a step, and complete the step's data."""
        if step.span is not None:
            if step.first or step.compiling or stage is not self._stage:
                self._conditions, self._stage = self._describe_conditions(step, stage, compares=compares), stage
            conditions = f"{accumulated}, {self._conditions}" if accumulated else self._conditions
            step.workload = workload_of(loader, conditions, signature(batch))
            if step.first or step.compiling:
                self._stage = None  # because the next step may differ
        self.timer.stop(stage.phase, step, loader)
        if self._device.type == "cuda":
            self.memory.stop(traced=step.traced)

    def _describe_conditions(self, step: Step, stage: Stage, *, compares: bool) -> str:
        """Describe the conditions on which the time of a step depends, in addition to its batch."""
        known: dict[str, object] = {"precision": self._precision}
        if stage.phase == "train":  # the backward pass depends on the weights that require grad
            known["trained"] = zlib.crc32(bytes(weight.requires_grad for weight in self._module.parameters()))
        if compares:  # the first step of a stage compares frozen weights, and frozen weights need other code
            known |= {"first": step.first, "frozen": stage.weights_frozen}
        return ", ".join(f"{name}={value}" for name, value in known.items())

    # ------------------------------------------------------------------------------------------ across runs

    def device_name(self) -> str:
        """Return the name of the hardware. Step times of different hardware are not compared."""
        name = device_name(self._device)
        if self._device.type == "cpu":
            name += f", {torch.get_num_threads()} threads"
        return name if self._world_size == 1 else f"{self._world_size} x {name}"

    def state_dict(self) -> dict[str, Any]:
        """Return the eager step times by phase and the hardware, as plain data."""
        times = {phase: [[list(w), list(ms)] for w, ms in self.timer.baseline(phase).items()] for phase in PHASES}
        return {"baselines": times, "device": self.device_name()}

    def resume(self, state: Mapping[Any, Any]) -> list[Phase]:
        """Use the eager step times in an earlier `state_dict`. Return the phases that have any."""
        times = state.get("baselines")
        for phase in PHASES:
            baseline = _baseline_from_data(times.get(phase) if isinstance(times, Mapping) else None)
            self.timer.restore(phase, {w: ms for w, ms in baseline.items() if not is_too_noisy(ms)})
        return [phase for phase in PHASES if self.timer.baseline(phase)]


def _baseline_from_data(data: Any) -> dict[Workload, tuple[float, ...]]:
    """Return step times by workload, from pairs of lists, or an empty dict if the data has another form."""
    try:
        baseline = {Workload.from_data(workload): tuple(map(float, samples)) for workload, samples in data}
    except (TypeError, ValueError, OverflowError):
        return {}
    return baseline if all(0 < sample < math.inf for samples in baseline.values() for sample in samples) else {}
