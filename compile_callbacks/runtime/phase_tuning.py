"""`PhaseTuning`: runs the steps of one phase with the candidates of a `Tune`, and then with the winner."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compile_callbacks._utils.fingerprints import digest
from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.mode import EAGER
from compile_callbacks.config.tune import AUTO, LEAST_SAMPLES, Tune
from compile_callbacks.profiling.compile_events import CompileEvent, CompileRecorder
from compile_callbacks.profiling.step_series import Span
from compile_callbacks.profiling.step_timer import WARMUP_STEPS, StepTimer
from compile_callbacks.profiling.workload import Workload
from compile_callbacks.runtime.dispatcher import PhaseSwitch
from compile_callbacks.runtime.fsdp import WEIGHTS_ARE_SHARDED
from compile_callbacks.runtime.model_record import ModelRecord
from compile_callbacks.tuning.candidates import candidates_of, why_not_compiled
from compile_callbacks.tuning.trial import Block, Trial, Verdict, compared_workload
from compile_callbacks.tuning.tuner import Tuner

BLOCK_STEPS = 1 + WARMUP_STEPS + LEAST_SAMPLES
"""One step that compiles, the warm-up steps after it, and the samples. Blocks are counted in steps, not in samples, so
that they end at the same step on all ranks."""


class PhaseTuning:
    """Runs the steps of one phase with each candidate in turn, and then with the winner.

    A candidate is active during measured steps only. When it loses, its compiled code is freed.

    In the train phase all ranks decide together, at the end of each block. In the infer phase ranks may take different
    numbers of steps, so each rank decides for itself, and at the end of the stage all of them take rank zero's winner.

    Args:
        phase: The phase.
        tune: The candidates and the limits.
        switch: Runs the targets with a candidate.
        recorder: Has the compile events.
        timer: Has the step times.
        print_line: Takes a line of text for the user.
        gather: Returns the values of all ranks, by rank. All ranks call it at the same points: at the end of each block
            of training steps, and of each stage of the infer phase.
        clock: Returns increasing seconds.
    """

    def __init__(
        self,
        phase: Phase,
        tune: Tune,
        *,
        switch: PhaseSwitch,
        recorder: CompileRecorder,
        timer: StepTimer,
        print_line: Callable[[str], None],
        gather: Callable[[Any], Sequence[Any]] = lambda value: [value],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.phase = phase
        self.tune = tune
        self._switch = switch
        self._recorder = recorder
        self._timer = timer
        self._print_line = print_line
        self._gather = gather
        self._clock = clock
        self._device = torch.device("cpu")
        self._record: ModelRecord | None = None
        self._conditions: Mapping[str, str] = {}
        self._earlier: dict[str, tuple[str, str]] = {}  # by the key of the conditions, see `_remember`
        self._steps_left = self._seconds_left = math.inf
        self._active_candidate: str | None = None
        self._reset()

    def _reset(self) -> None:
        """Forget all measurements: a run that decided nothing does not count for the next one."""
        self._tuner = Tuner(self.tune, self._why_not)
        self._configs: dict[str, InductorConfig] = {}
        self._workloads: Counter[Workload] = Counter()  # of the first block
        self._made_for: dict[str, str] = {}
        self._adopted = self._agreed = self._lasts = False
        self._first_event = len(self._recorder.events)
        self._samples: list[tuple[Workload, Span]] = []  # of the block
        self._block_steps, self._block_seconds, self._started = 0, 0.0, 0.0

    # ------------------------------------------------------------------------------------------ a run

    def begin(
        self, device: torch.device, *, record: ModelRecord | None = None, conditions: Mapping[str, str] | None = None
    ) -> None:
        """Begin a trainer run. The winner of the run before is kept, unless that run was too short to decide.

        Args:
            device: The device of the module.
            record: The file that keeps winners for later runs.
            conditions: What may change which candidate is the fastest, see `conditions`.
        """
        self._device, self._record, self._conditions = device, record, conditions or {}
        if record is not None:
            for winner in record.load()["winners"].values():
                self._remember(winner, f"won in an earlier run; delete {record.path} to measure again")
        if not self._lasts:
            if self.winner not in (None, EAGER):
                self._switch.free_candidate(self.phase, str(self.winner))
            self._reset()
        self._use(self.winner or EAGER)

    def expect(self, steps_left: float, seconds_left: float = math.inf) -> None:
        """Tell how many steps of the phase and how many seconds of the run remain; the same on all ranks."""
        self._steps_left, self._seconds_left = steps_left, seconds_left

    def state(self) -> dict[str, Any] | None:
        """The winner as JSON-ready data; ``None`` unless a resumed run may rely on it."""
        if not self._tuner.worth_keeping:
            return None
        return {"key": digest(self._made_for), "candidate": self.winner, "config_key": self._key(str(self.winner))}

    def restore(self, state: object) -> None:
        """Resume from the `state` of an earlier run; data of another form is ignored."""
        self._remember(state, "won in the run that this one resumes")

    def finalize(self, reason: str) -> None:
        """Choose now, until the next run, among the candidates that are faster than eager so far."""
        if self.winner is None:
            self._tuner.conclude(reason)
            self._apply()

    # ------------------------------------------------------------------------------------------ steps and stages

    def step_begins(self, *, measured: bool) -> InductorConfig | None:
        """Begin a step, whose time may be a sample if it is ``measured``; returns its settings, ``None`` for eager."""
        name = self.winner or (self._tuner.candidate if measured else EAGER)
        if self.winner is None and measured:
            if self._block_steps == 0:
                self._timer.restart_warmup(self.phase, compiled=name != EAGER, candidate=_candidate(name))
            self._started = self._clock()
        return self._use(name)

    def step_ends(self, workload: Workload, *, measured: bool) -> None:
        """End a step with this workload, after the timer has stopped."""
        if self.winner is not None or not measured:
            return
        if not self._tuner.started:
            self._workloads[workload] += 1
        if self._timer.last_step is not None:
            self._samples.append((workload, self._timer.last_step))
        self._steps_left -= 1
        self._block_steps += 1
        self._block_seconds += self._clock() - self._started
        if self._block_steps >= BLOCK_STEPS:
            self._block_ends()
        self._use(self.winner or EAGER)

    def stage_ends(self) -> None:
        """End a stage, on all ranks: in the infer phase they take the winner of rank zero, if it has one."""
        if self.phase == "train" or self._agreed:
            return
        mine = None if self.winner is None else self._key(self.winner)
        chosen, complete = self._gather((mine, self._tuner.complete))[0]
        if chosen is None:
            return
        if chosen != mine:
            if chosen not in self._names:
                self._start(shapes_vary=True)  # with all candidates that rank zero may have
            self._tuner.adopt(self._names.get(chosen, EAGER), "rank 0 chose it")
            self._apply()
        self._agreed, self._tuner.complete = True, complete
        self._keep()

    # ------------------------------------------------------------------------------------------ results

    @property
    def winner(self) -> str | None:
        """The chosen candidate; ``None`` before the choice."""
        return self._tuner.winner

    @property
    def active_candidate(self) -> str | None:
        """The candidate that the targets run with now; ``None`` for eager."""
        return self._active_candidate

    @property
    def config(self) -> InductorConfig | None:
        """The settings of `active_candidate`."""
        return None if self._active_candidate is None else self._configs[self._active_candidate]

    def trials(self) -> Sequence[Trial]:
        """The result of each candidate so far; empty if the phase did not run."""
        trials = list(self._tuner.trials.values())
        return trials if self.winner is not None or any(trial.blocks for trial in trials) else ()

    @property
    def _names(self) -> dict[str, str]:
        """The names of the candidates by the keys of their configs."""
        return {self._key(name): name for name in (EAGER, *self._configs)}

    def _key(self, name: str) -> str:
        return EAGER if name == EAGER else self._configs[name].key()

    # ------------------------------------------------------------------------------------------ blocks

    def _use(self, name: str) -> InductorConfig | None:
        if (candidate := _candidate(name)) != self._active_candidate:
            self._active_candidate = candidate
            self._switch.set_config(self.phase, self.config, candidate)
        return self.config

    def _block_ends(self) -> None:
        gather = self._gather if self.phase == "train" else lambda value: [value]
        block = Block.of_ranks(gather(self._block()))
        self._samples, self._block_steps, self._block_seconds = [], 0, 0.0
        self._seconds_left -= block.seconds
        self._tuner.block_ends(block)
        if not self._tuner.started:
            compared = compared_workload(self._workloads)
            shapes_vary = compared not in self._workloads and len({workload.shapes for workload in self._workloads}) > 1
            self._made_for = {
                **self._conditions,
                "phase": self.phase,
                "tune": self.tune.key(),
                "workload": repr(compared),
            }
            told = gather((shapes_vary, self._earlier.get(digest(self._made_for))))
            self._start(any(shapes_vary for shapes_vary, _ in told), told[0][1])
        self._apply()
        if self.phase == "train" and self.winner is not None:
            self._keep()

    def _block(self) -> Block:
        began = self._clock()
        self._recorder.collect()
        times = defaultdict[Workload, list[float]](list)
        for workload, sample in self._samples:
            times[workload].append(sample.milliseconds())  # waits for the GPU
        compile_seconds = sum(event.seconds or 0 for event in self._events() if event.kind == "compile")
        return Block(dict(times), self._block_seconds + self._clock() - began, compile_seconds, self._problem())

    def _events(self, since: int = 0) -> list[CompileEvent]:
        """The compile events of the candidate."""
        name = self._tuner.candidate
        return [e for e in self._recorder.events[since:] if e.phase == self.phase and e.candidate == name]

    def _problem(self) -> tuple[Verdict, str] | None:
        """Why the candidate cannot win, by its compile events."""
        if self._tuner.candidate == EAGER:
            return None
        for event in self._events(self._first_event):
            if event.kind == "verify" and event.verdict == "differs":
                return "wrong", event.reason or "its results differ from eager's"
            if event.kind == "fallback":
                return "failed", event.reason or "torch gives no reason"
        compiled = any(event.graphs for event in self._events())
        return None if compiled else ("failed", "nothing was compiled in its steps")

    def _start(self, shapes_vary: bool, earlier: tuple[str, str] | None = None) -> None:
        """Eager was measured: start with the candidates, or use the winner of an earlier run."""
        sharded = any(member.sharded for target in self._switch.targets for member in target.members)
        no_freezing = "repeated blocks share a graph without weights" if self._switch.shares_graphs else None
        no_cudagraphs = "the module is not on a GPU" if self._device.type != "cuda" else None
        self._configs, skipped = candidates_of(
            self.tune,
            self.phase,
            self._device,
            no_freezing=WEIGHTS_ARE_SHARDED if sharded else no_freezing,
            no_cudagraphs=WEIGHTS_ARE_SHARDED if sharded else no_cudagraphs,
            shapes_vary=shapes_vary,
        )
        self._tuner.start(skipped)
        if earlier is not None and (name := self._names.get(earlier[0])) is not None and not skipped.get(name):
            self._tuner.adopt(name, earlier[1])
            self._adopted = True

    def _why_not(self, name: str, eager_ms: float, best_ms: float, budget_left: float) -> str | None:
        steps_left = min(self._steps_left, self._seconds_left * 1000 / eager_ms)
        trials = self._tuner.trials.items()
        return why_not_compiled(
            self._configs[name],
            self._device,
            compiled={self._configs[name]: one.compile_seconds for name, one in trials if one.compile_seconds},
            budget_seconds=budget_left,
            steps_left=steps_left if self.tune.candidates == AUTO else math.inf,
            eager_ms=eager_ms,
            best_ms=best_ms,
        )

    # ------------------------------------------------------------------------------------------ the winner

    def _apply(self) -> None:
        """Free the compiled code of the candidates that lost, and announce the winner."""
        self._use(self.winner or EAGER)
        for name, trial in self._tuner.trials.items():
            if trial.verdict not in ("undecided", "chosen"):
                self._switch.free_candidate(self.phase, name)
        if self.winner is None:
            return
        self._switch.end_trial(self.phase, self.winner)
        eager, chosen = self._tuner.trials[EAGER], self._tuner.trials[self.winner]
        line = f"{self.phase} phase: {self.winner} is chosen"
        if chosen is not eager and chosen.stats and eager.stats:
            line += f" ({chosen.median_ms():.2f} ms a step, eager {eager.median_ms():.2f} ms)"
        self._print_line(f"{line}: {chosen.reason}" if chosen.reason else line)

    def _keep(self) -> None:
        """All ranks have the same winner: keep it for the next run, and in the file for later ones."""
        self._lasts = self._tuner.complete or self.winner != EAGER
        if self._record is None or self._adopted or (state := self.state()) is None:
            return
        trials = [trial.to_dict() for trial in self._tuner.trials.values()]
        entry = {**state, "made_for": self._made_for, "trials": trials}
        if problem := self._record.update("winners", state["key"], entry):
            self._print_line(f"{self.phase} phase: the winner could not be written for later runs: {problem}")

    def _remember(self, winner: object, where: str) -> None:
        """Keep the key of the config that won in an earlier run until the conditions of this run are known."""
        data = winner if isinstance(winner, Mapping) else {}
        key, config_key = data.get("key"), data.get("config_key")
        if isinstance(key, str) and isinstance(config_key, str):
            self._earlier[key] = config_key, where


def _candidate(name: str) -> str | None:
    return None if name == EAGER else name
