"""`Contest`: decides which variant each step of a phase runs, by blocks of steps that run after each other.

The first step with new shapes may take several times as long: libraries select their kernels (100 ms for cuDNN's
attention on an H200, against 16 ms for the step), and torch records a CUDA graph. Such steps are not compared, because
the first candidates would have most of them.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from compile_callbacks._utils.files import digest
from compile_callbacks._utils.phases import EAGER, Phase
from compile_callbacks.cache.folder import ModelRecord
from compile_callbacks.config.fast import Fast
from compile_callbacks.config.inductor_config import EAGER_VARIANT, WAITING_VARIANT, InductorConfig, Variant
from compile_callbacks.profiling.comparison import MIN_SAMPLES, compare
from compile_callbacks.profiling.step_times import WARMUP_STEPS, Step, Workload
from compile_callbacks.tuning.candidates import MAX_ROUNDS, CompileFacts, Trial, of_tune, why_not_compiled
from compile_callbacks.tuning.tune import AUTO, PhaseConfig, Tune

Blocks = Generator[Trial | None, Step | None, None]
"""Yields the trial of the next step, and receives the step, or ``None`` after a new plan."""


class Conditions(NamedTuple):
    """The conditions of a run, which are known when it begins."""

    device: torch.device = torch.device("cpu")
    devices: Callable[[], Collection[torch.device]] = tuple  # of the targets' weights
    sharded: str | None = None  # why neither freezing nor CUDA graphs work, if weights are sharded
    shapes: Callable[[], Mapping[str, float]] = dict  # of each target, the share of its most frequent set of sizes
    baseline_steps: int = 0  # the wanted number of eager samples before a config
    in_background: bool = False  # whether a helper process compiles
    rank: int = 0
    ranks: int = 1
    of_rank_zero: Callable[[Any], Any] = lambda value: value  # returns the value of rank zero on each rank
    precision: str = ""
    stopping: Callable[[], bool] = lambda: False  # whether no compile should begin; must not refer to the module
    record: ModelRecord | None = None  # the file with the winners of earlier runs


class Contest:
    """Runs a block of eager steps, then blocks of the candidates, until a candidate is chosen.

    A block has a fixed number of steps, and no clock and no random numbers decide, so that all ranks change together.
    In training, all ranks use rank zero's measurements at the end of each block. In the infer phase, ranks may have
    different numbers of batches, so each rank decides for itself.
    """

    facts: Callable[[Variant], CompileFacts]  # about the compiles of a variant
    waits: Callable[[Variant], Variant | None]  # the variant to run while another one waits for its code, if it waits
    tell: Callable[[str], None]  # prints the choice of a `Tune`, or records that the only config is slower

    def __init__(self, phase: Phase, settings: PhaseConfig) -> None:
        self.phase, self.settings = phase, settings
        self.conditions = Conditions()
        self.steps_left = math.inf  # of the phase, in the run
        self._is_auto = isinstance(settings, Tune) and settings.candidates == AUTO
        # One step compiles, and the next may record a CUDA graph.
        self._block_steps = 2 + WARMUP_STEPS + getattr(settings, "steps", Tune.steps)
        self._begin_with_eager()

    def _begin_with_eager(self) -> None:
        self.decision: Variant | None = None
        """The chosen variant. Only a config that another process compiled is compared with eager afterwards."""
        self.best = eager = Trial(EAGER_VARIANT)  # the fastest block so far
        self.trials = {EAGER: eager}
        self.turn: Trial | None = eager
        """The trial of the next step. While there is one, each step must be timed and passed to `done`."""
        self._usual: Workload | None = None  # the workload to compare, without shapes if none has half of the steps
        self._blocks = self._decide(eager)

    @property
    def chosen(self) -> Variant:
        """The variant of the phase. Eager, until its eager steps have ended and a `Tune` has chosen a candidate."""
        return self.decision or EAGER_VARIANT

    @property
    def alive(self) -> frozenset[str | None]:
        """The names of the variants that may still run."""
        running = self.turn.variant if self.turn else self.chosen
        return frozenset({running.name, (self.decision or self.best.variant).name})

    # ------------------------------------------------------------------------------------------ steps

    def begin(self, conditions: Conditions) -> None:
        """Begin a Trainer run. Begin again on another device, and if a longer run may choose another candidate."""
        is_open = self.decision is None or (self.decision is EAGER_VARIANT and self._was_short)
        if (isinstance(self.settings, Tune) and is_open) or conditions.device != self.conditions.device:
            self._begin_with_eager()
        self.conditions = conditions if self.phase == "train" else conditions._replace(of_rank_zero=lambda value: value)
        self.plan(math.inf)

    def plan(self, steps_left: float) -> None:
        """Plan for the remaining steps of the phase, ``math.inf`` if unknown."""
        self.steps_left = steps_left
        if self.turn is not None:
            self.turn = self._blocks.send(None)

    def next(self) -> tuple[Variant, bool]:
        """Return the variant of the next step, and whether the step must be timed. A repeated call returns the same.

        If the step need not be timed, the caller may only count it, and not call `done`. While a candidate waits for
        its code, the fastest so far runs.
        """
        variant = self.turn.variant if self.turn else self.chosen
        waiting = self.waits(variant) if variant.config is not None and self.conditions.in_background else None
        if waiting is None:
            return variant, self.turn is not None
        return (self.best.variant if self.best.variant.config and waiting is WAITING_VARIANT else waiting), False

    def done(self, step: Step) -> None:
        """End a step that had to be timed."""
        self.steps_left -= 1
        if self.turn is not None and step.variant is self.turn.variant:
            self.turn = self._blocks.send(step)

    # ------------------------------------------------------------------------------------------ blocks of steps

    def _decide(self, eager: Trial) -> Blocks:
        block: list[Step] = []
        if isinstance(self.settings, Tune):
            yield from self._tune(self.settings, eager)
        else:
            while self.decision is None and not self._has_baseline(block):
                block += filter(None, [(yield eager)])
            self.end_baseline()
            # Each step takes as long as that of the slowest rank, so a rank cannot decide by its own times.
            if self.settings and self.conditions.in_background and self.conditions.ranks == 1:
                yield from self._compare(eager, Trial(self.chosen))
        yield None

    def _has_baseline(self, block: list[Step]) -> bool:
        """Return whether the eager steps have enough samples, or take half of the steps of the run."""
        half = (self.steps_left + len(block)) / 2
        wanted = min(self.conditions.baseline_steps if self.settings else 0, half - WARMUP_STEPS)
        # Twice the number of samples, because a step with a smaller batch, or a compile of the user's code, gives none.
        is_long = len(block) + 1 > min(2 * wanted + WARMUP_STEPS, half)
        return is_long or sum(step.is_sample for step in block) >= wanted

    def end_baseline(self) -> None:
        """Choose the only config of the phase, unless it is chosen."""
        if self.decision is None and not isinstance(self.settings, Tune):
            only = Variant(self.settings) if isinstance(self.settings, InductorConfig) else EAGER_VARIANT
            self.decision = self._variant_of_fast(self.settings) if isinstance(self.settings, Fast) else only

    def _variant_of_fast(self, fast: Fast) -> Variant:
        return fast.variant(self.conditions.devices(), self.conditions.sharded, self.conditions.shapes())

    def give_up_cuda_graphs(self, variant: Variant, reason: str) -> bool:
        """Continue with the mode "default", and return whether this changes the phase, which has chosen ``variant``."""
        if self.decision is not variant:  # `facts` excludes a candidate
            return False
        if isinstance(self.settings, Tune):
            failed, default = self.trials[str(variant.name)], self.trials[InductorConfig().describe()]
            failed.verdict, failed.reason = "failed", reason
            self._choose(default if default.verdict == "beaten" else self.trials[EAGER], reason)
        else:
            self.decision, self.turn = Variant(InductorConfig(), reason=reason), None
        return True

    def _compare(self, eager: Trial, trial: Trial) -> Blocks:
        """Go back to eager if the only config is slower."""
        yield from self._measure(trial)
        while trial.rounds < 3:
            yield from self._round(eager, trial)
        if (found := compare(eager.blocks, trial.blocks)) and found.outcome == "slower":
            self.decision = EAGER_VARIANT
            self.tell(f"compiled steps were slower in alternating blocks ({eager.ms:.2f} → {trial.ms:.2f} ms)")

    def _round(self, eager: Trial, trial: Trial) -> Blocks:
        """Run two blocks, in alternating order: a machine that becomes faster or slower then favors neither."""
        trial.rounds += 1
        for each in [eager, trial][:: 1 if trial.rounds % 2 else -1]:
            yield from self._measure(each)

    def _measure(self, trial: Trial) -> Blocks:
        """Run a block, and repeat it if it lacks samples: with CUDA graphs, two steps of each shape give none."""
        for _ in range(MAX_ROUNDS):
            block: list[Step] = []
            while len(block) < self._block_steps:
                block += filter(None, [(yield trial)])
            common, count = Counter(step.workload for step in block if step.workload).most_common(1)[0]
            usual = self._usual = self._usual or (common if 2 * count >= len(block) else common._replace(shapes=()))
            samples = [(step, step.workload) for step in block if step.is_sample and step.workload]
            compared = [step for step, workload in samples if usual in (workload, workload._replace(shapes=()))]
            ms = [step.milliseconds(wait=True) for step in compared]
            # Plain data only, because a rank whose data cannot be pickled would let the others wait.
            measured = ms, self.facts(trial.variant), self.steps_left
            ms, trial.facts, self.steps_left = self.conditions.of_rank_zero(measured)
            trial.blocks.append(ms)
            if trial.facts.problem:
                trial.verdict, trial.reason = trial.facts.problem
            if trial.facts.problem or len(trial.samples) >= MIN_SAMPLES:
                return

    # ------------------------------------------------------------------------------------------ a `Tune`

    def _tune(self, tune: Tune, eager: Trial) -> Blocks:
        yield from self._measure(eager)
        conditions, record, trials = self.conditions, self.conditions.record, self.trials
        fast = self._variant_of_fast(Fast()) if conditions.ranks == 1 else EAGER_VARIANT  # the same on all ranks
        trials |= of_tune(tune, self.phase, conditions.device, conditions.sharded, fast)
        ahead = [trial for trial in trials.values() if trial.verdict == "undecided" and trial is not eager]
        keys = [config.key() for config in tune.configs]
        key = digest([record and dict(record.facts), self.phase, keys, tune.steps, repr(self._usual)])
        entry = conditions.of_rank_zero(record.load()["winners"].get(key, {}) if record else {})
        with contextlib.suppress(ValueError, TypeError):  # none, or of another version
            ahead += self._add(InductorConfig.from_dict(entry.get("config")))  # a run of "auto" adds it later
        if record and (winner := trials.get(str(entry.get("candidate")))) in ahead:
            return self._choose(winner, f"won in an earlier run; delete {record.path} to measure again")
        while ahead:
            trial = ahead.pop(0)
            if self._is_auto and (why := why_not_compiled(trial, self.best, trials, self.steps_left)):
                trial.verdict, trial.reason = "not tried", why
            elif len(eager.samples) >= MIN_SAMPLES:
                yield from self._measure(trial)
                self.best = trial if trial.verdict == "undecided" and trial.ms < self.best.ms else self.best
            ahead[:0] = self._further(trial, is_last=not ahead) if self._is_auto else ()
        yield from self._final(eager)
        # Eager is not written, because a candidate may win on a machine with a compiler, or on one that is less busy.
        best = self.best.variant
        if record and best.config and self.decision is best and not self._was_short:
            config = best.config.to_dict() if self._is_auto else None
            record.update("winners", key, {"candidate": best.name, "config": config})

    def _final(self, eager: Trial) -> Blocks:
        """Run rounds of eager and the fastest candidate, and choose one of them."""
        best = self.best
        while (wins := best.wins(eager)) is None and (not best.rounds or self.steps_left >= 2 * self._block_steps):
            yield from self._round(eager, best)
        for trial in self.trials.values():
            if trial is not eager and not (wins and trial.wins(eager) is not False):
                trial.lose(eager)
        self._choose(best if wins else eager)

    def _further(self, trial: Trial, *, is_last: bool) -> list[Trial]:
        """Return what ``"auto"`` tries next: settings that may remove graph breaks, or other kernels."""
        trials, config, best = self.trials, trial.variant.config, self.best.variant.config
        heals = trial.facts.healing and trial.verdict != "wrong" and not any(t.variant.healed for t in trials.values())
        if config and heals:
            config = replace(config, dynamo=dict.fromkeys(trial.facts.healing, True))
        elif is_last and best and self.conditions.device.type == "cuda":
            config = replace(best, mode="max-autotune" if best.uses_cudagraphs else "max-autotune-no-cudagraphs")
        return self._add(config) if config else []

    def _add(self, config: InductorConfig) -> list[Trial]:
        if (name := config.describe()) in self.trials:
            return []
        self.trials[name] = Trial(Variant(config, name, healed=bool(config.dynamo), static=config.uses_cudagraphs))
        return [self.trials[name]]

    def _choose(self, winner: Trial, reason: str | None = None) -> None:
        self.decision = winner.variant
        winner.verdict, winner.reason = "chosen", reason
        for trial in self.trials.values():
            if trial.verdict == "undecided":
                trial.verdict = "beaten" if trial.blocks else "not tried"
        self.tell(f"{self.phase} phase: {winner.variant.name} is chosen" + (f": {reason}" if reason else ""))

    @property
    def _was_short(self) -> bool:
        """Whether the run is too short for a candidate of ``"auto"``."""
        reasons = {trial.reason for trial in self.trials.values() if trial.verdict == "not tried"}
        return self._is_auto and bool(reasons - {self.conditions.sharded})
