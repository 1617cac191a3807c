"""`Tuning`: the `Contest` of a `Tune`.

Eager and each candidate run one block of steps in turn, or more if too few steps of the block can be compared. Then
eager and the fastest candidate run one more block each in the final, or more rounds of such blocks if noise hides which
is faster. No clock and no random numbers decide.

The first step with new shapes may take several times as long: libraries select their kernels (100 ms for cuDNN's
attention on an H200, against 16 ms for the step), and torch records a CUDA graph. Such steps are not compared, because
the first candidates would have most of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from compile_callbacks._utils.files import digest
from compile_callbacks._utils.phases import EAGER, Phase
from compile_callbacks.cache.folder import ModelRecord
from compile_callbacks.config.inductor_config import EAGER_VARIANT, WAITING_VARIANT, Variant
from compile_callbacks.profiling.comparison import MIN_SAMPLES
from compile_callbacks.profiling.step_times import WARMUP_STEPS, Step, Workload
from compile_callbacks.tuning import rule
from compile_callbacks.tuning.candidates import CompileFacts, Trial, candidates_of, healed
from compile_callbacks.tuning.contest import Block, Contest
from compile_callbacks.tuning.ranks import Ranks
from compile_callbacks.tuning.tune import AUTO, Tune

MAX_BLOCKS = 10
"""The number of blocks after which a variant without enough samples is not compared. With CUDA graphs, the first two
steps of each shape give no sample. With 40 shapes, that takes about 130 steps."""

_T = TypeVar("_T")


class Conditions(NamedTuple):
    """The conditions of a run, which are known when it begins."""

    known: Mapping[str, str]  # on which the winner depends
    record: ModelRecord | None  # the file with the winners of earlier runs
    device: torch.device
    sharded: str | None = None  # why neither freezing nor CUDA graphs work, if weights are sharded


class Tuning(Contest):
    """Runs a block of steps with each candidate of a `Tune` in turn, until a candidate is chosen.

    Rank zero decides. In training, all ranks use rank zero's measurements at the end of each block. In the infer phase,
    ranks may have different numbers of batches, so each rank decides for itself, and all ranks use rank zero's winner
    at the end of the stage.
    """

    def __init__(
        self,
        phase: Phase,
        tune: Tune,
        ranks: Ranks,
        *,
        facts: Callable[[Variant], CompileFacts],
        waits: Callable[[Variant], Variant | None] | None,
        print_line: Callable[[str], None],
    ) -> None:
        super().__init__(EAGER_VARIANT, waits=waits)
        self._phase, self._tune, self._ranks, self._facts, self._print_line = phase, tune, ranks, facts, print_line
        self._conditions = Conditions({}, None, torch.device("cpu"))
        self._begin_with_eager()

    def _begin_with_eager(self) -> None:
        self.winner, self.complete = None, True  # whether a longer run would choose the same winner
        self._eager = Trial(EAGER_VARIANT)
        self.trials: dict[str, Trial] = {EAGER: self._eager}
        self._turns, self._block = [self._eager], self._new_block()
        self._compared: Workload | None = None
        self._made_for: dict[str, Any] = {}

    def _new_block(self) -> Block:
        # One step compiles, and the next may record a CUDA graph. The number is fixed, so that a block ends at the same
        # step on all ranks.
        return Block(wanted=math.inf, limit=2 + WARMUP_STEPS + self._tune.steps)

    @property
    def chosen(self) -> Variant | None:
        """The winner, or ``None`` before the choice."""
        return None if self.winner is None else self.winner.variant

    @property
    def alive(self) -> frozenset[str | None]:
        """The names of the variants that may still run."""
        trials = self.trials.values()
        return frozenset(trial.candidate for trial in trials if trial.verdict in ("undecided", "chosen"))

    @property
    def reported(self) -> list[Trial]:
        """The result of each candidate so far. Empty if the phase did not run."""
        trials = list(self.trials.values())
        return trials if self.winner is not None or any(trial.blocks for trial in trials) else []

    # ------------------------------------------------------------------------------------------ a run

    def begin(self, conditions: Conditions) -> None:
        """Begin a Trainer run, and keep the winner of the last run, if that run was long enough to choose one."""
        self._conditions = conditions
        if self.winner is None or (self.winner is self._eager and not self.complete):
            self._begin_with_eager()

    def plan(self, steps_left: float) -> None:
        """Set the number of remaining steps of the phase, which is the same on all ranks."""
        self.steps_left = steps_left

    def next(self) -> tuple[Variant, bool]:
        """Return the variant of the next step: while a candidate waits for its code, the fastest so far."""
        variant, is_timed = super().next()
        if variant is WAITING_VARIANT:
            best = rule.fastest(self.trials)
            return (variant if best is None or best is self._eager else best.variant), False
        return variant, is_timed

    def done(self, step: Step) -> bool:
        """End a step without a winner. Return whether a block has ended."""
        self.steps_left -= 1
        return super().done(step)

    def stage_ends(self) -> None:
        """End a stage on all ranks. In the infer phase, all ranks use the winner of rank zero, if it has one."""
        if self._phase == "train" or self._ranks.size == 1:
            return
        mine = None if self.winner is None else self.winner.candidate
        winner, self.complete = self._ranks.gather((mine, self.complete))[0]
        if winner not in (None, mine):
            if winner not in self.trials:  # list each candidate that rank zero may have
                self._add_candidates(shapes_vary=True, winner=winner)
            self._adopt(winner, "rank 0 chose it")
        self._keep()

    # ------------------------------------------------------------------------------------------ blocks

    def _of_rank_zero(self, value: _T) -> _T:
        """Return rank zero's value in training, and this rank's value in the infer phase."""
        return self._ranks.gather(value)[0] if self._phase == "train" else value

    def _block_ends(self) -> None:
        trial, block, self._block = self._turns[0], self._block, self._new_block()
        if self._compared is None:
            self._compared = self._of_rank_zero(_usual(block.workloads))
        samples = [span for workload, span in block.samples if self._is_compared(workload)]
        ms = [span.milliseconds() for span in samples]  # synchronizes the GPU
        ms, trial.facts = self._of_rank_zero((ms, self._facts(trial.variant)))
        trial.blocks.append(ms)
        if trial.facts.problem is not None:
            trial.decide(*trial.facts.problem)
        elif len(trial.samples) < MIN_SAMPLES and len(trial.blocks) < MAX_BLOCKS:
            return
        self._turns.pop(0)
        if len(self.trials) == 1:
            if self._lists_winner(block):
                return
            if len(trial.samples) < MIN_SAMPLES:
                self._turns.clear()
        healing = trial.facts.healing if self._tune.candidates == AUTO and trial.verdict != "wrong" else ()
        if healing and not any(each.variant.healed for each in self.trials.values()):
            self._add([healed(trial, healing)])
        self._next_turn()

    def _is_compared(self, workload: Workload) -> bool:
        return self._compared in (workload, workload._replace(shapes=()))

    def _add(self, trials: Iterable[Trial]) -> None:
        new = list(trials)
        self.trials |= {trial.candidate: trial for trial in new}
        self._turns[:0] = [trial for trial in new if trial.verdict == "undecided"]

    def _add_candidates(self, *, shapes_vary: bool, winner: str | None) -> None:
        device, sharded = self._conditions.device, self._conditions.sharded
        self._add(
            candidates_of(self._tune, self._phase, device, sharded=sharded, shapes_vary=shapes_vary, winner=winner)
        )

    def _lists_winner(self, block: Block) -> bool:
        """List the candidates after the eager steps, and return whether one of them won in an earlier run."""
        vary = self._compared not in block.workloads and len({w.shapes for w in block.workloads}) > 1
        made_for = {**self._conditions.known, "phase": self._phase, "tune": self._tune.key()}
        self._made_for = {**made_for, "work": repr(self._compared)}
        record = self._conditions.record
        winner = None if record is None else record.load()["winners"].get(digest(self._made_for), {}).get("candidate")
        vary, name = self._of_rank_zero((vary, winner))
        self._add_candidates(shapes_vary=vary, winner=name)
        if record is None or name not in self.trials or self.trials[name].verdict != "undecided":
            return False
        self._adopt(name, f"won in an earlier run; delete {record.path} to measure again")
        return True

    def _next_turn(self) -> None:
        """Find the next block to run. After the last block, begin a round of the final or choose."""
        trials, on_gpu = self.trials, self._conditions.device.type != "cpu"
        while self._tune.candidates == AUTO and self._turns and not self._turns[0].blocks:
            reason, would_be_tried = rule.why_not_compiled(self._turns[0], trials, self.steps_left, on_gpu=on_gpu)
            if not reason:
                break
            self._turns.pop(0).decide("not tried", reason)
            self.complete &= not would_be_tried
        if self._turns:
            return
        finalist = rule.finalist(trials)
        if finalist is not None and rule.needs_round(finalist, self._eager):
            if not finalist.rounds or self.steps_left >= 2 * self._block.limit:
                finalist.rounds += 1
                # The order alternates, so that a machine that becomes faster or slower favors neither of them.
                self._turns = [self._eager, finalist][:: 1 if finalist.rounds % 2 else -1]
                return
            self.complete = False
        self._choose(*rule.winner(trials, finalist))
        if self._phase == "train" or self._ranks.size == 1:
            self._keep()

    # ------------------------------------------------------------------------------------------ the winner

    def _adopt(self, name: str, reason: str) -> None:
        """Choose a candidate that won in an earlier run or on another rank."""
        self.complete = True
        for trial in self.trials.values():
            if trial.candidate == name or trial.verdict == "chosen":
                trial.decide("undecided")
        self._choose(self.trials[name], reason)

    def _choose(self, winner: Trial, reason: str | None) -> None:
        self.winner, self._turns = winner, []
        for trial in self.trials.values():
            if trial.verdict == "undecided":
                trial.decide(*(("beaten",) if trial.blocks else ("not tried", f"{winner.candidate} was chosen before")))
        winner.decide("chosen", reason)
        line = f"{self._phase} phase: {winner.candidate} is chosen"
        if winner is not self._eager and winner.median_ms and self._eager.median_ms:
            line += f" ({winner.median_ms:.2f} ms a step, eager {self._eager.median_ms:.2f} ms)"
        self._print_line(f"{line}: {winner.reason}" if winner.reason else line)

    def _keep(self) -> None:
        """Write the winner, which is the same on all ranks, to the file for later runs.

        Eager is not written, because a candidate may win on a machine with a compiler, or on one that is less busy.
        """
        winner, record = self.winner, self._conditions.record
        if winner is None or winner is self._eager or record is None or not (self.complete and self._made_for):
            return
        entry = {"candidate": winner.candidate, "made_for": self._made_for}
        if problem := record.update("winners", digest(self._made_for), entry):
            self._print_line(f"{self._phase} phase: the winner could not be written for later runs: {problem}")


def _usual(steps: Counter[Workload]) -> Workload:
    """Return the workload to compare, from the number of eager steps of each workload.

    If less than half of the steps have the same workload, shapes vary. Then, the result has the most frequent stage and
    kind, but no shapes, and steps of all shapes are compared.
    """
    usual, count = steps.most_common(1)[0]
    if 2 * count >= steps.total():
        return usual
    kinds: Counter[Workload] = Counter()
    for workload, count in steps.items():
        kinds[workload._replace(shapes=())] += count
    return kinds.most_common(1)[0][0]
