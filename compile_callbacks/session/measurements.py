"""`Measurements`: measures step times and the peak memory of both phases for a `Session`."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from compile_callbacks._utils.phases import Phase
from compile_callbacks._utils.signatures import signature
from compile_callbacks.profiling.memory import PeakMemory
from compile_callbacks.profiling.spans import Span
from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.profiling.steps import Stage, Step, workload_of


class Measurements:
    """Measures the steps of one session."""

    def __init__(self, module: nn.Module) -> None:
        self.timer = StepTimer()
        self.memory = PeakMemory()
        self._module = module
        self._device = torch.device("cpu")
        self._precision = ""
        self._stage: Stage | None = None  # the stage of `_conditions`
        self._conditions = ""

    def begin(self, device: torch.device, precision: str) -> None:
        """Begin a Trainer run."""
        self._device, self._precision = device, precision

    def step_begins(self, step: Step, phase: Phase, *, wanted: bool) -> None:
        """Begin to measure a step. It is timed at least if this is ``wanted``."""
        if self._device.type == "cuda":
            self.memory.start(phase, step.variant.name)
        if wanted or not self.timer.untimed_left:
            step.span = Span(self._device)
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
