"""`TuningPolicy`: runs the steps of a phase with the candidates of a `Tune` in turn, and then with the fastest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch

from compile_callbacks._utils.fingerprints import digest
from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import EAGER
from compile_callbacks.config.tune import Tune
from compile_callbacks.config.variant import EAGER_VARIANT, Variant
from compile_callbacks.profiling.events import CompileEvent
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.profiling.spans import Span
from compile_callbacks.profiling.step_timer import WARMUP_STEPS
from compile_callbacks.profiling.steps import Step
from compile_callbacks.profiling.workload import Workload
from compile_callbacks.tuning.candidates import candidates_of
from compile_callbacks.tuning.ranks import Ranks
from compile_callbacks.tuning.trial import Block, Trial, Verdict, compared_workload
from compile_callbacks.tuning.tuner import Tuner

_T = TypeVar("_T")


class _Winners(Protocol):
    """The file with the winners of earlier runs."""

    @property
    def path(self) -> object: ...

    def load(self) -> dict[str, dict[str, dict[str, object]]]: ...

    def update(self, section: str, key: str, value: object) -> str | None: ...


class TuningPolicy:
    """Runs a block of steps with each candidate in turn, until a candidate is chosen.

    Rank zero decides. In training, all ranks use rank zero's measurements at the end of each block. In the infer phase,
    ranks may have different numbers of batches, so each rank decides for itself, and all ranks use rank zero's winner
    at the end of the stage.
    """

    def __init__(
        self,
        phase: Phase,
        tune: Tune,
        recorder: CompileRecorder,
        ranks: Ranks,
        print_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._phase, self._tune, self._recorder, self._ranks = phase, tune, recorder, ranks
        self._print_line = print_line
        # One step compiles. The number is fixed, so that a block ends at the same step on all ranks.
        self._steps_per_block = 1 + WARMUP_STEPS + tune.steps
        self._device = torch.device("cpu")
        self._no_freezing: str | None = None
        self._no_cudagraphs: str | None = None
        self._winners: _Winners | None = None
        self._conditions: Mapping[str, str] = {}
        self._earlier: dict[str, object] = {}  # keys of conditions -> keys of earlier winners
        self._reset()

    def _reset(self) -> None:
        self._tuner = Tuner(self._tune, self._device.type)
        self._workloads: Counter[Workload] = Counter()  # workloads of the first block, which is eager
        self._compared: Workload | None = None
        self._made_for: dict[str, str] = {}
        self._first_event = len(self._recorder.events)
        self._timed: list[tuple[Workload, Span]] = []  # the step times of the current block
        self._block_steps, self._block_seconds = 0, 0.0

    # ------------------------------------------------------------------------------------------ a run

    def begin(
        self,
        device: torch.device,
        conditions: Mapping[str, str],
        *,
        no_freezing: str | None = None,
        no_cudagraphs: str | None = None,
        winners: _Winners | None = None,
    ) -> None:
        """Begin a Trainer run, and keep the winner of the last run, if that run was long enough to choose one.

        A winner depends on the ``conditions``. ``no_freezing`` and ``no_cudagraphs`` are the reasons why the
        module cannot have frozen weights or CUDA graphs.
        """
        self._device, self._conditions, self._winners = device, conditions, winners
        self._no_freezing, self._no_cudagraphs = no_freezing, no_cudagraphs
        for key, winner in winners.load()["winners"].items() if winners is not None else ():
            self._earlier[key] = winner.get("config_key")
        if not self._tuner.lasts:
            self._reset()

    def plan(self, steps_left: float) -> None:
        """Set the number of remaining steps of the phase, which is the same on all ranks."""
        self._tuner.steps_left = steps_left

    def next(self) -> tuple[Variant, bool]:
        """Return the variant of the next step, and whether it must be timed."""
        return self._tuner.trials[self._tuner.candidate].variant, self._tuner.winner is None

    def done(self, step: Step) -> None:
        """End a step."""
        if self._tuner.winner is not None or step.workload is None:
            return
        if not self._tuner.started:
            self._workloads[step.workload] += 1
        if step.span is not None:
            self._timed.append((step.workload, step.span))
        self._block_steps += 1
        self._block_seconds += time.perf_counter() - step.began
        if self._block_steps >= self._steps_per_block:
            self._block_ends()

    def stage_ends(self) -> None:
        """End a stage on all ranks. In the infer phase, all ranks use the winner of rank zero, if it has one."""
        if self._phase == "train" or self._ranks.size == 1:
            return
        winner = self._tuner.winner
        mine = None if winner is None else self._key(winner)
        chosen, complete = self._ranks.gather((mine, self._tuner.complete))[0]
        if chosen is None:
            return
        if chosen != mine:
            if chosen not in self._names:
                self._start(shapes_vary=True)  # includes each candidate that rank zero may have
            self._tuner.adopt(self._names.get(chosen, EAGER), "rank 0 chose it")
            self._announce()
        self._tuner.complete = complete
        self._keep()

    # ------------------------------------------------------------------------------------------ results

    @property
    def chosen(self) -> Variant:
        """The winner, or eager before the choice."""
        return EAGER_VARIANT if self._tuner.winner is None else self._tuner.trials[self._tuner.winner].variant

    @property
    def is_decided(self) -> bool:
        """Whether a candidate is chosen."""
        return self._tuner.winner is not None

    @property
    def in_play(self) -> frozenset[str | None]:
        """The names of the variants that may still run."""
        trials = self._tuner.trials.values()
        return frozenset(trial.candidate for trial in trials if trial.verdict in ("undecided", "chosen"))

    def trials(self) -> list[Trial]:
        """Return the result of each candidate so far. Empty if the phase did not run."""
        trials = list(self._tuner.trials.values())
        return trials if self._tuner.winner is not None or any(trial.blocks for trial in trials) else []

    # ------------------------------------------------------------------------------------------ blocks

    def _block_ends(self) -> None:
        if self._compared is None:
            self._compared = self._of_rank_zero(compared_workload(self._workloads))
        self._tuner.block_ends(self._of_rank_zero(self._block()))
        self._timed, self._block_steps, self._block_seconds = [], 0, 0.0
        if not self._tuner.started and self._tuner.first_block_is_over:
            vary = self._compared not in self._workloads and len({w.shapes for w in self._workloads}) > 1
            work = {"phase": self._phase, "tune": self._tune.key(), "work": repr(self._compared)}
            self._made_for = {**self._conditions, **work}
            earlier = self._earlier.get(digest(self._made_for))
            shapes_vary, earlier = self._of_rank_zero((vary, earlier))
            self._start(shapes_vary=shapes_vary, earlier=earlier)
        if self._tuner.winner is not None:
            self._announce()
            if self._phase == "train" or self._ranks.size == 1:
                self._keep()

    def _of_rank_zero(self, value: _T) -> _T:
        """Return rank zero's value in training, and this rank's value in the infer phase."""
        return self._ranks.gather(value)[0] if self._phase == "train" else value

    def _block(self) -> Block:
        """Return the measurements of this rank."""
        began = time.perf_counter()
        self._recorder.collect()
        compared = (self._compared,)
        milliseconds = [  # reading a span synchronizes the GPU
            span.milliseconds() for w, span in self._timed if w in compared or w._replace(shapes=()) in compared
        ]
        compile_seconds = sum(event.seconds or 0 for event in self._events() if event.kind == "compile")
        seconds = self._block_seconds + time.perf_counter() - began
        return Block(milliseconds, seconds, compile_seconds, self._problem(), self._block_steps)

    def _events(self, since: int = 0) -> list[CompileEvent]:
        """Return the compile events of the candidate."""
        name = self._tuner.candidate
        return [e for e in self._recorder.events[since:] if e.phase == self._phase and e.candidate == name]

    def _problem(self) -> tuple[Verdict, str] | None:
        """Return a verdict and a reason if the candidate's compile events show that it cannot win."""
        if self._tuner.candidate == EAGER:
            return None
        for event in self._events(self._first_event):
            if event.kind == "verify" and event.verdict == "differs":
                return "wrong", event.reason or "its results differ from eager's"
            if event.kind == "fallback":
                return "failed", event.reason or "torch gives no reason"
        compiled = any(event.graphs for event in self._events())
        return None if compiled else ("failed", "nothing was compiled in its steps")

    def _start(self, *, shapes_vary: bool, earlier: object = None) -> None:
        """Start with the candidates after eager was measured, or use the winner of an earlier run."""
        trials = list(
            candidates_of(
                self._tune,
                self._phase,
                self._device,
                no_freezing=self._no_freezing,
                no_cudagraphs=self._no_cudagraphs,
                shapes_vary=shapes_vary,
            )
        )
        without_effect = {trial.candidate for trial in trials if trial.verdict == "not tried"}
        self._tuner.start(trials)
        name = self._names.get(earlier)
        if self._winners is not None and name is not None and name not in without_effect:
            self._tuner.adopt(name, f"won in an earlier run; delete {self._winners.path} to measure again")

    # ------------------------------------------------------------------------------------------ the winner

    @property
    def _names(self) -> dict[object, str]:
        """Return the names of the candidates by their keys."""
        return {self._key(name): name for name in self._tuner.trials}

    def _key(self, name: str) -> str:
        config = self._tuner.trials[name].variant.config
        return EAGER if config is None else config.key()

    def _announce(self) -> None:
        eager, chosen = self._tuner.trials[EAGER], self._tuner.trials[self._tuner.winner or EAGER]
        line = f"{self._phase} phase: {chosen.candidate} is chosen"
        if chosen is not eager and chosen.stats and eager.stats:
            line += f" ({chosen.stats.median_ms:.2f} ms a step, eager {eager.stats.median_ms:.2f} ms)"
        self._print_line(f"{line}: {chosen.reason}" if chosen.reason else line)

    def _keep(self) -> None:
        """Write the winner, which is the same on all ranks, to the file for later runs."""
        winner = self._tuner.winner
        if winner is None or not self._tuner.worth_keeping or self._winners is None:
            return
        key, config_key = digest(self._made_for), self._key(winner)
        if self._earlier.get(key) == config_key:
            return
        self._earlier[key] = config_key
        entry = {"candidate": winner, "config_key": config_key, "made_for": self._made_for}
        if problem := self._winners.update("winners", key, entry):
            self._print_line(f"{self._phase} phase: the winner could not be written for later runs: {problem}")
