"""`TuningPolicy`: runs the steps of a phase with the candidates of a `Tune` in turn, and then with the fastest."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from compile_callbacks._utils.fingerprints import digest
from compile_callbacks._utils.phases import EAGER, Phase
from compile_callbacks.cache.folder import ModelRecord
from compile_callbacks.config.dynamo_settings import SWITCHES, healing_settings
from compile_callbacks.config.inductor_config import WAITING_VARIANT, Variant
from compile_callbacks.profiling.events import CompileEvent
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.profiling.spans import Span
from compile_callbacks.profiling.step_timer import WARMUP_STEPS
from compile_callbacks.profiling.steps import Step, Workload
from compile_callbacks.tuning.candidates import candidates_of
from compile_callbacks.tuning.ranks import Ranks
from compile_callbacks.tuning.trial import Block, Trial, Verdict, compared_workload
from compile_callbacks.tuning.tune import AUTO, Tune
from compile_callbacks.tuning.tuner import Tuner

_T = TypeVar("_T")


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
        print_line: Callable[[str], None],
        waits: Callable[[str], bool] = lambda candidate: False,
    ) -> None:
        self._phase, self._tune, self._recorder, self._ranks = phase, tune, recorder, ranks
        self._print_line = print_line
        self._waits = waits  # returns whether another process compiles a candidate
        # One step compiles, and the next may record a CUDA graph. The number is fixed, so that a block ends at the same
        # step on all ranks.
        self._steps_per_block = 2 + WARMUP_STEPS + tune.steps
        self._tuner = Tuner(tune)

    # ------------------------------------------------------------------------------------------ a run

    def begin(
        self,
        device: torch.device,
        conditions: Mapping[str, str],
        record: ModelRecord | None,
        *,
        no_freezing: str | None,
        no_cudagraphs: str | None,
    ) -> None:
        """Begin a Trainer run, and keep the winner of the last run, if that run was long enough to choose one.

        A winner depends on the ``conditions``. ``record`` is the file with the winners of earlier runs.
        """
        self._conditions, self._record = conditions, record
        self._candidates = functools.partial(
            candidates_of, self._tune, self._phase, device, no_freezing=no_freezing, no_cudagraphs=no_cudagraphs
        )
        if self._tuner.lasts:
            return
        self._tuner = Tuner(self._tune, device.type)
        self._workloads: Counter[Workload] = Counter()
        self._compared: Workload | None = None
        self._made_for: dict[str, Any] = {}
        self._first_event = len(self._recorder.events)
        self._begin_block()

    def plan(self, steps_left: float) -> None:
        """Set the number of remaining steps of the phase, which is the same on all ranks."""
        self._tuner.steps_left = steps_left

    def next(self) -> tuple[Variant, bool]:
        """Return the variant of the next step, and whether it must be timed."""
        if self._tuner.winner is None and self._waits(self._tuner.candidate):
            return self._tuner.best if self._tuner.best.config is not None else WAITING_VARIANT, False
        return self._tuner.trials[self._tuner.candidate].variant, self._tuner.winner is None

    def done(self, step: Step) -> None:
        """End a step."""
        if self._tuner.winner is not None:
            return
        if step.variant is not self._tuner.trials[self._tuner.candidate].variant or self._waits(self._tuner.candidate):
            self._tuner.steps_left -= 1  # another process compiles the candidate; most of these steps are not timed
            return
        if step.workload is None:
            return
        self._workloads[step.workload] += 1
        if step.span is not None:
            self._timed.append((step.workload, step.span, step.is_sample))
        self._block_steps += 1
        if self._block_steps >= self._steps_per_block:
            self._block_ends()

    def stage_ends(self) -> None:
        """End a stage on all ranks. In the infer phase, all ranks use the winner of rank zero, if it has one."""
        if self._phase == "train" or self._ranks.size == 1:
            return
        winner = None if self._tuner.winner is None else self._tuner.trials[self._tuner.winner]
        mine = None if winner is None else _key(winner)
        healing = () if winner is None else winner.healing
        chosen, complete, healing = self._ranks.gather((mine, self._tuner.complete, healing))[0]
        if chosen is None:
            return
        if chosen != mine:
            if chosen not in self._names:
                # Each candidate that rank zero may have.
                self._tuner.start(list(self._candidates(shapes_vary=True, healing=healing)))
            self._tuner.adopt(self._names.get(chosen, EAGER), "rank 0 chose it")
            self._announce()
        self._tuner.complete = complete
        self._keep()

    # ------------------------------------------------------------------------------------------ results

    @property
    def chosen(self) -> Variant | None:
        """The winner, or ``None`` before the choice."""
        return None if self._tuner.winner is None else self._tuner.trials[self._tuner.winner].variant

    @property
    def remaining_variants(self) -> frozenset[str | None]:
        """The names of the variants that may still run."""
        trials = self._tuner.trials.values()
        return frozenset(trial.candidate for trial in trials if trial.verdict in ("undecided", "chosen"))

    def trials(self) -> list[Trial]:
        """Return the result of each candidate so far. Empty if the phase did not run."""
        trials = list(self._tuner.trials.values())
        return trials if self._tuner.winner is not None or any(trial.blocks for trial in trials) else []

    # ------------------------------------------------------------------------------------------ blocks

    def _begin_block(self) -> None:
        self._timed: list[tuple[Workload, Span, bool]] = []  # whether it is a sample, not the first with its shapes
        self._block_steps = 0
        self._first_event_of_block = len(self._recorder.events)

    def _block_ends(self) -> None:
        if self._compared is None:
            self._compared = self._of_rank_zero(compared_workload(self._workloads))
            self._list_candidates(self._compared)
        self._tuner.block_ends(self._of_rank_zero(self._block()))
        self._begin_block()
        if self._tuner.needs_candidates or (self._earlier is not None and len(self._tuner.trials) == 1):
            self._tuner.start(self._listed)
            if self._record is not None and self._earlier is not None:
                self._tuner.adopt(self._earlier, f"won in an earlier run; delete {self._record.path} to measure again")
        if self._tuner.winner is not None:
            self._announce()
            if self._phase == "train" or self._ranks.size == 1:
                self._keep()

    def _list_candidates(self, compared: Workload) -> None:
        """List the candidates after the first block, and look for the winner of an earlier run."""
        vary = compared not in self._workloads and len({w.shapes for w in self._workloads}) > 1
        self._made_for = {
            **self._conditions,
            "phase": self._phase,
            "tune": self._tune.key(),
            "work": repr(compared),
        }
        winners = {} if self._record is None else self._record.load()["winners"]
        entry = winners.get(digest(self._made_for), {})
        shapes_vary, key, healing = self._of_rank_zero((vary, entry.get("config_key"), _healing_of(entry)))
        self._listed = list(self._candidates(shapes_vary=shapes_vary, healing=healing))
        possible = (self._tuner.trials[EAGER], *(trial for trial in self._listed if trial.verdict == "undecided"))
        self._earlier = {_key(trial): trial.candidate for trial in possible}.get(str(key))

    def _of_rank_zero(self, value: _T) -> _T:
        """Return rank zero's value in training, and this rank's value in the infer phase."""
        return self._ranks.gather(value)[0] if self._phase == "train" else value

    def _block(self) -> Block:
        self._recorder.collect()
        compared = (self._compared,)
        milliseconds: dict[bool, list[float]] = {True: [], False: []}
        for workload, span, is_sample in self._timed:
            if workload in compared or workload._replace(shapes=()) in compared:
                milliseconds[is_sample].append(span.milliseconds())  # synchronizes the GPU
        compiles = [event for event in self._events() if event.kind in ("compile", "background")]
        recent = self._events(self._first_event_of_block)
        compile_seconds = sum(event.seconds or 0 for event in compiles)
        breaks = [event.reason or "" for event in self._events() if event.kind == "graph_break"]
        settings = healing_settings(breaks)[0] if self._tune.candidates == AUTO else {}
        return Block(
            milliseconds[True],
            compile_seconds,
            self._problem(),
            self._block_steps,
            graphs=sum(event.graphs for event in self._events()),
            breaks=len(breaks),
            healing=tuple(settings),
            settled=all(event.part == "cudagraph" for event in recent if event.kind in ("compile", "background")),
            unseen_shapes_ms=milliseconds[False],
        )

    def _events(self, since: int = 0) -> list[CompileEvent]:
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

    # ------------------------------------------------------------------------------------------ the winner

    @property
    def _names(self) -> dict[object, str]:
        return {_key(trial): name for name, trial in self._tuner.trials.items()}

    def _announce(self) -> None:
        eager, chosen = self._tuner.trials[EAGER], self._tuner.trials[self._tuner.winner or EAGER]
        line = f"{self._phase} phase: {chosen.candidate} is chosen"
        if chosen is not eager and chosen.median_ms and eager.median_ms:
            line += f" ({chosen.median_ms:.2f} ms a step, eager {eager.median_ms:.2f} ms)"
        self._print_line(f"{line}: {chosen.reason}" if chosen.reason else line)

    def _keep(self) -> None:
        """Write the winner, which is the same on all ranks, to the file for later runs, if it is reliable."""
        winner = self._tuner.winner
        if winner is None or self._record is None or not (self._tuner.worth_keeping and self._made_for):
            return
        trial = self._tuner.trials[winner]
        entry = {"candidate": winner, "config_key": _key(trial), "made_for": self._made_for}
        if trial.healing:
            entry["healing"] = list(trial.healing)
        if problem := self._record.update("winners", digest(self._made_for), entry):
            self._print_line(f"{self._phase} phase: the winner could not be written for later runs: {problem}")


def _healing_of(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings of Dynamo that a file names for a winner."""
    named = entry.get("healing")
    return tuple(name for name in SWITCHES if name in named) if isinstance(named, list) else ()


def _key(trial: Trial) -> str:
    config = trial.variant.config
    return EAGER if config is None else config.key()
