"""`Policies`: chooses the `StepPolicy` of each stage, which chooses the `Variant` of each step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from compile_callbacks._utils.phases import Phase
from compile_callbacks.cache.folder import ModelRecord, conditions
from compile_callbacks.config.inductor_config import EAGER_VARIANT, InductorConfig, Variant
from compile_callbacks.graphs.requests import RequestQueue
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.profiling.step_timer import WARMUP_STEPS
from compile_callbacks.profiling.steps import Stage, Step
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.session.background_policy import BackgroundPolicy
from compile_callbacks.targets.fsdp import WEIGHTS_ARE_SHARDED
from compile_callbacks.tuning.ranks import Ranks
from compile_callbacks.tuning.trial import Trial
from compile_callbacks.tuning.tune import Tune
from compile_callbacks.tuning.tuning_policy import TuningPolicy


class StepPolicy(Protocol):
    """Chooses the variant of each step of a phase."""

    def next(self) -> tuple[Variant, bool]:
        """Return the variant of the next step, and whether the step must be timed. A repeated call returns the same.

        If the step need not be timed, the session may only count it, and not call `done`.
        """

    def done(self, step: Step) -> None:
        """End a step."""


class Fixed:
    """Runs each step with the same variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant

    def next(self) -> tuple[Variant, bool]:
        """Return the variant. The timer samples the steps."""
        return self.variant, False

    def done(self, step: Step) -> None:
        """Do nothing."""


class Baseline:
    """Runs the first steps of a phase eagerly. Their times are the baseline of the speedup.

    If one stage has too few steps, the eager steps continue in later stages. They take at most half of the steps of the
    run. If the run is too short for a baseline, it runs compiled from its first step.
    """

    def __init__(self, steps: int) -> None:
        self._wanted = steps
        self._samples = self._steps = 0
        self._max_steps: float = 0
        self.running = False
        """Whether the next step runs eagerly."""
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
        self._update()

    def next(self) -> tuple[Variant, bool]:
        """Return eager. Each step is timed."""
        return EAGER_VARIANT, True

    def done(self, step: Step) -> None:
        """Count an eager step, and its sample if it gave one."""
        self._steps += 1
        self._samples += step.is_sample
        self._update()

    def _update(self) -> None:
        self.running = self._samples < self._wanted and self._steps < self._max_steps


_EAGER = Fixed(EAGER_VARIANT)


class Policies:
    """The policies of both phases."""

    def __init__(
        self,
        arguments: CompileArguments,
        recorder: CompileRecorder,
        ranks: Ranks,
        print_line: Callable[[str], None],
        background: Callable[[Phase, Variant], BackgroundPolicy] | None,
        requests: RequestQueue | None,
    ) -> None:
        self._passes = arguments.target_settings.passes
        self._ranks = ranks
        self._baselines: dict[Phase, Baseline] = {}
        self._fixed: dict[Phase, Fixed | BackgroundPolicy] = {}
        self._tunings: dict[Phase, TuningPolicy] = {}
        for phase, settings in arguments.configs.items():
            config = settings if isinstance(settings, InductorConfig) else None
            # A phase with a Tune needs no baseline, because eager is one of the candidates.
            self._baselines[phase] = Baseline(arguments.baseline_steps if config else 0)
            self._fixed[phase] = Fixed(Variant(config)) if config else _EAGER
            if config and background is not None:
                self._fixed[phase] = background(phase, Variant(config))
            if isinstance(settings, Tune):
                waits = functools.partial(requests.waits, phase) if requests is not None else lambda candidate: False
                self._tunings[phase] = TuningPolicy(phase, settings, recorder, ranks, print_line, waits)
        self.comparing = frozenset(self._tunings)
        """The phases that compare variants with each other, and choose one together with other ranks."""

    def begin(
        self,
        device: torch.device,
        model: str,
        targets: Sequence[str],
        precision: str,
        record: ModelRecord | None,
        *,
        sharded: bool,
    ) -> None:
        """Begin a Trainer run."""
        if not self._tunings:
            return
        known = conditions(
            model=model,
            targets=targets,
            passes=self._passes,
            precision=precision,
            device=device,
            ranks=self._ranks.size,
        )
        no_freezing = WEIGHTS_ARE_SHARDED if sharded else None
        on_gpu = device.type == "cuda"
        no_cudagraphs = WEIGHTS_ARE_SHARDED if sharded else None if on_gpu else "the module is not on a GPU"
        for tuning in self._tunings.values():
            tuning.begin(device, known, record, no_freezing=no_freezing, no_cudagraphs=no_cudagraphs)

    def plan(self, phase: Phase, remaining_steps: float) -> None:
        """Plan the policies of a phase for its remaining steps, which are ``math.inf`` if unknown."""
        self._baselines[phase].plan(remaining_steps)
        if isinstance(fixed := self._fixed[phase], BackgroundPolicy):
            fixed.steps_left = remaining_steps
        if phase in self._tunings:
            self._tunings[phase].plan(remaining_steps)

    def policy_of(self, stage: Stage) -> StepPolicy:
        """Return the policy of the next step."""
        if stage.eager:
            return _EAGER
        if self._baselines[stage.phase].running:
            return self._baselines[stage.phase]
        return self._tunings.get(stage.phase) or self._fixed[stage.phase]

    def stage_ends(self, phase: Phase) -> None:
        """End a stage on all ranks."""
        if phase in self._tunings:
            self._tunings[phase].stage_ends()

    # ------------------------------------------------------------------------------------------ results

    def chosen(self, phase: Phase) -> Variant:
        """Return the variant of a phase after the baseline, or eager while a `Tune` has not chosen a candidate."""
        tuning = self._tunings.get(phase)
        return self._fixed[phase].variant if tuning is None else tuning.chosen or EAGER_VARIANT

    def remaining_variants(self, phase: Phase) -> tuple[frozenset[str | None], bool]:
        """Return the names of the variants that may still run, and whether a `Tune` has not chosen one of them yet."""
        tuning = self._tunings.get(phase)
        if tuning is None:
            return frozenset({self._fixed[phase].variant.name}), False
        return tuning.remaining_variants, tuning.chosen is None

    def trials(self, phase: Phase) -> list[Trial]:
        """Return the candidates of a `Tune` with their results so far."""
        return self._tunings[phase].trials() if phase in self._tunings else []
