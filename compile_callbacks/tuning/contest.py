"""`Contest`: decides which variant each step of a phase runs, by blocks of steps that run after each other.

The first step with new shapes may take several times as long: libraries select their kernels (100 ms for cuDNN's
attention on an H200, against 16 ms for the step), and torch records a CUDA graph. Such steps are not compared, because
the first candidates would have most of them.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from compile_callbacks._utils.files import digest
from compile_callbacks._utils.phases import EAGER, Phase
from compile_callbacks.cache.folder import ModelRecord
from compile_callbacks.config.inductor_config import EAGER_VARIANT, WAITING_VARIANT, InductorConfig, Variant
from compile_callbacks.profiling.comparison import MIN_SAMPLES
from compile_callbacks.profiling.step_times import WARMUP_STEPS, Step, Workload
from compile_callbacks.tuning import rule
from compile_callbacks.tuning.candidates import CompileFacts, Trial, candidates_of, trial_of
from compile_callbacks.tuning.tune import AUTO, PhaseConfig, Tune

BLOCK_SAMPLES = 10
"""The number of samples in a block that compares a config with eager, with ``background=True``."""


class Conditions(NamedTuple):
    """The conditions of a run, which are known when it begins."""

    device: torch.device = torch.device("cpu")
    sharded: str | None = None  # why neither freezing nor CUDA graphs work, if weights are sharded
    shapes: Callable[[], Mapping[str, float]] = dict  # of each target, the share of its most frequent set of sizes
    baseline_steps: int = 0  # the wanted number of eager samples before a config
    rank: int = 0
    ranks: int = 1
    of_rank_zero: Callable[[Any], Any] = lambda value: value  # returns the value of rank zero on each rank
    known: Mapping[str, str] = {}  # on which the winner of a `Tune` depends
    record: ModelRecord | None = None  # the file with the winners of earlier runs


class Contest:
    """Runs a block of eager steps, then blocks of the candidates, until a candidate is chosen.

    The only config of a phase is chosen after the eager steps, which are the baseline of the speedup. They take at most
    half of the steps of the run. With ``background=True``, the phase goes back to eager if the config is slower in
    rounds of two blocks. Of a `Tune`, each candidate runs one block, and the fastest runs rounds against eager. A block
    has a fixed number of steps, and no clock and no random numbers decide, so that all ranks change together.

    In training, all ranks use rank zero's measurements at the end of each block. In the infer phase, ranks may have
    different numbers of batches, so each rank decides for itself.

    With ``background=True``, ``waits`` returns the variant to run while another one waits for its code. ``tell``
    prints the choice of a `Tune`, or records that a config is slower.
    """

    def __init__(
        self,
        phase: Phase,
        settings: PhaseConfig,
        *,
        facts: Callable[[Variant], CompileFacts],
        waits: Callable[[Variant], Variant | None] | None,
        tell: Callable[[str], None],
    ) -> None:
        self.steps_left = math.inf
        """The steps of the phase that remain in the run."""
        self.conditions = Conditions()
        self.settings = settings
        """The settings of the phase, and after its eager steps its only config."""
        self._phase, self._facts, self._waits, self._tell = phase, facts, waits, tell
        self._begin_with_eager()

    def _begin_with_eager(self) -> None:
        self.chosen: Variant | None = None
        """The variant of the phase after its eager steps. Its only config may be in a comparison with eager yet."""
        self.trials = {EAGER: Trial(EAGER_VARIANT)}
        self.turns = [self.trials[EAGER]]
        """The trials of the next blocks. While there is one, each step must be timed and passed to `done`."""
        self._block: list[Step] = []
        self._usual: Workload | None = None  # the workload to compare

    @property
    def alive(self) -> frozenset[str | None]:
        """The names of the variants that may still run."""
        alive = [trial.variant for trial in self.trials.values() if trial.verdict == "undecided"]
        return frozenset(variant.name for variant in ([self.chosen] if self.chosen else alive))

    @property
    def reported(self) -> list[Trial]:
        """The result of each candidate of a `Tune` so far. Empty if the phase did not run."""
        ran = self.chosen or self.trials[EAGER].blocks
        return list(self.trials.values()) if isinstance(self.settings, Tune) and ran else []

    # ------------------------------------------------------------------------------------------ steps

    def begin(self, conditions: Conditions) -> None:
        """Begin a Trainer run. Keep the winner of the last run, unless a longer run may choose another one."""
        self.conditions, self.steps_left, eager_won = conditions, math.inf, self.chosen is EAGER_VARIANT
        if isinstance(self.settings, Tune) and (self.chosen is None or (eager_won and self._lacked_steps)):
            self._begin_with_eager()
        self._end_block()

    def plan(self, steps_left: float) -> bool:
        """Plan for the remaining steps of the phase, ``math.inf`` if unknown. Return whether this ends a block."""
        self.steps_left = steps_left
        return self._end_block()

    def next(self) -> tuple[Variant, bool]:
        """Return the variant of the next step, and whether the step must be timed. A repeated call returns the same.

        If the step need not be timed, the caller may only count it, and not call `done`. While a candidate waits for
        its code, the fastest so far runs.
        """
        variant = self.turns[0].variant if self.turns else self.chosen or EAGER_VARIANT
        waiting = None if variant.config is None or self._waits is None else self._waits(variant)
        if waiting is None:
            return variant, bool(self.turns)
        is_faster = [trial for trial in rule.undecided(self.trials) if trial.ms < self.trials[EAGER].ms]
        return (is_faster[0].variant if is_faster and waiting is WAITING_VARIANT else waiting), False

    def done(self, step: Step) -> bool:
        """End a step without a winner. Return whether a block has ended, so that `alive` may have changed."""
        self.steps_left -= 1
        if step.variant is not self.turns[0].variant:
            return False
        self._block.append(step)
        return self._end_block()

    # ------------------------------------------------------------------------------------------ blocks

    @property
    def _block_steps(self) -> int:
        # One step compiles, and the next may record a CUDA graph.
        return 2 + WARMUP_STEPS + getattr(self.settings, "steps", BLOCK_SAMPLES)

    def _is_over(self) -> bool:
        """Return whether the running block has enough samples or steps."""
        steps = len(self._block)
        if isinstance(self.settings, Tune) or len(self.trials) > 1:
            return steps >= self._block_steps
        half = math.inf if self.steps_left == math.inf else (self.steps_left + steps) // 2
        wanted = min(self.conditions.baseline_steps if self.settings else 0, half - WARMUP_STEPS)
        # Twice the number of samples, because a step with a smaller batch, or a compile of the user's code, gives none.
        return sum(step.is_sample for step in self._block) >= wanted or steps >= min(2 * wanted + WARMUP_STEPS, half)

    def _end_block(self) -> bool:
        """Act on the running block if it is over, and return whether it is."""
        if not self.turns or not self._is_over():
            return False
        if not isinstance(self.settings, Tune) and len(self.trials) == 1:
            self.end_baseline()
            return True
        trial, block, self._block = self.turns[0], self._block, []
        usual = self._usual = self._usual or _usual([step.workload for step in block if step.workload])
        samples = [(step, step.workload) for step in block if step.is_sample and step.workload]
        compared = [step for step, workload in samples if usual in (workload, workload._replace(shapes=()))]
        ms = [step.milliseconds(wait=True) for step in compared]
        # Plain data only, because a rank whose data cannot be pickled would let the others wait.
        measured = ms, self._facts(trial.variant), self.steps_left
        ms, trial.facts, self.steps_left = self._of_rank_zero(measured)
        trial.blocks.append(ms)
        if trial.facts.problem and isinstance(self.settings, Tune):
            trial.decide(*trial.facts.problem)
        elif len(trial.samples) < MIN_SAMPLES and len(trial.blocks) < rule.MAX_ROUNDS:
            # With CUDA graphs, the first two steps of each shape give no sample.
            return True
        self.turns.pop(0)
        if isinstance(self.settings, Tune) and len(self.trials) == 1:
            conditions = self.conditions
            self._add(candidates_of(self.settings, self._phase, conditions.device, conditions.sharded))
            if len(trial.samples) < MIN_SAMPLES:
                self.turns.clear()
            elif self._adopts_earlier_winner():
                return True
        config, is_healed = trial.variant.config, any(each.variant.healed for each in self.trials.values())
        has_rounds = any(each.rounds for each in self.trials.values())  # then another candidate could not win any more
        if (
            self._is_auto
            and config
            and trial.facts.healing
            and trial.verdict != "wrong"
            and not is_healed
            and not has_rounds
        ):
            self._add([trial_of(replace(config, dynamo=dict.fromkeys(trial.facts.healing, True)))])
        self._next_turn()
        return True

    def end_baseline(self) -> None:
        """Choose the only config of the phase, unless it is chosen. If a helper process compiles it, compare it."""
        if self.chosen is not None or isinstance(self.settings, Tune):
            return
        device, sharded, shapes, *_ = self.conditions
        self.settings = self.settings and self.settings.config(device, sharded is not None, shapes())
        self.chosen = Variant(self.settings) if self.settings else EAGER_VARIANT
        self.turns, self._block = [], []
        # Each step takes as long as that of the slowest rank, so a rank cannot decide by its own times.
        if self._waits is not None and self.settings and self.conditions.ranks == 1:
            self._add([Trial(self.chosen)])

    def _of_rank_zero(self, value: Any) -> Any:
        return self.conditions.of_rank_zero(value) if self._phase == "train" else value

    def _add(self, trials: Iterable[Trial]) -> None:
        new = list(trials)
        self.trials |= {trial.candidate: trial for trial in new}
        self.turns[:0] = [trial for trial in new if trial.verdict == "undecided"]

    def _next_turn(self) -> None:
        """Find the next block to run. After the last block, begin a round or choose."""
        trials, eager, on_gpu = self.trials, self.trials[EAGER], self.conditions.device.type == "cuda"
        if self._is_auto and on_gpu and not self.turns and not any(trial.autotunes for trial in trials.values()):
            for config in [t.variant.config for t in rule.undecided(trials) if t.samples and t.variant.config][:1]:
                mode = "max-autotune" if config.uses_cudagraphs else "max-autotune-no-cudagraphs"
                self._add([trial_of(replace(config, mode=mode))])
        while self._is_auto and self.turns and not self.turns[0].blocks:
            if not (why := rule.why_not_compiled(self.turns[0], trials, self.steps_left, on_gpu=on_gpu)):
                break
            self.turns[0].lacks_steps = True
            self.turns.pop(0).decide("not tried", why)
        if self.turns:
            return
        tunes = isinstance(self.settings, Tune)
        finalist = rule.finalist(trials) if tunes else rule.undecided(trials)[0]
        wins = False if finalist is None else rule.wins(finalist, eager) if tunes else rule.stays(finalist, eager)
        has_steps = not tunes or self.steps_left >= 2 * self._block_steps
        if finalist is not None and wins is None and (has_steps or not finalist.rounds):
            finalist.rounds += 1
            # The order alternates, so that a machine that becomes faster or slower favors neither of them.
            self.turns = [eager, finalist][:: 1 if finalist.rounds % 2 else -1]
        elif finalist is not None and wins:
            self._choose(finalist)
        else:
            for trial in rule.undecided(trials):
                trial.lacks_steps = wins is None
                trial.decide("not faster", f"{rule.speedup(trial, eager)}, which is within noise")
            self._choose(eager)

    # ------------------------------------------------------------------------------------------ the winner

    def _choose(self, winner: Trial, reason: str | None = None) -> None:
        self.chosen, self.turns, eager = winner.variant, [], self.trials[EAGER]
        if not isinstance(self.settings, Tune):
            if winner is eager:
                *_, trial = self.trials.values()
                self._tell(f"compiled steps were slower in alternating blocks ({eager.ms:.2f} → {trial.ms:.2f} ms)")
            return
        for trial in self.trials.values():
            if trial.verdict == "undecided":
                trial.decide(*(("beaten",) if trial.blocks else ("not tried", f"{winner.candidate} was chosen before")))
        winner.decide("chosen", reason)
        line = f"{self._phase} phase: {winner.candidate} is chosen"
        if winner is not eager and winner.samples:
            line += f" ({winner.ms:.2f} ms a step, eager {eager.ms:.2f} ms)"
        self._tell(f"{line}: {reason}" if reason else line)
        # Eager is not written, because a candidate may win on a machine with a compiler, or on one that is less busy.
        if (record := self.conditions.record) is None or winner is eager or self._lacked_steps:
            return
        config = winner.variant.config.to_dict() if self._is_auto and winner.variant.config else None
        if problem := record.update("winners", self._key, {"candidate": winner.candidate, "config": config}):
            self._tell(f"{self._phase} phase: the winner could not be written for later runs: {problem}")

    @property
    def _is_auto(self) -> bool:
        return isinstance(self.settings, Tune) and self.settings.candidates == AUTO

    @property
    def _lacked_steps(self) -> bool:
        return any(trial.lacks_steps for trial in self.trials.values())

    @property
    def _key(self) -> str:
        tune = self.settings.key() if self.settings else None
        return digest([dict(self.conditions.known), self._phase, tune, repr(self._usual)])

    def _adopts_earlier_winner(self) -> bool:
        """Choose the candidate that won in an earlier run, and return whether there is one."""
        if (record := self.conditions.record) is None:
            return False
        entry = self._of_rank_zero(record.load()["winners"].get(self._key, {}))
        if (name := entry.get("candidate")) not in self.trials and self._is_auto:  # a run adds it later
            with contextlib.suppress(ValueError, TypeError):
                self._add([trial_of(InductorConfig.from_dict(entry.get("config")))])
        if name not in self.trials or self.trials[name].verdict != "undecided":
            return False
        self._choose(self.trials[name], f"won in an earlier run; delete {record.path} to measure again")
        return True


def _usual(workloads: list[Workload]) -> Workload:
    """Return the workload to compare: the most frequent one, without shapes if it has less than half of the steps."""
    usual, count = Counter(workloads).most_common(1)[0]
    if 2 * count < len(workloads):
        usual, _ = Counter(workload._replace(shapes=()) for workload in workloads).most_common(1)[0]
    return usual
