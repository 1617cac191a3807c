"""`PhaseTuning`: chooses the config of one phase from the candidates of a `Tune`. `Session` calls it for each step."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from compile_callbacks._utils.fingerprints import digest
from compile_callbacks._utils.phases import Phase
from compile_callbacks.cache.folder import ModelRecord, conditions
from compile_callbacks.calls.phase_switch import EAGERLY, ActiveConfig, PhaseSwitch
from compile_callbacks.config.inductor_config import EAGER
from compile_callbacks.config.tune import LEAST_SAMPLES, Tune
from compile_callbacks.profiling.compile_events import CompileEvent, CompileRecorder
from compile_callbacks.profiling.spans import Span
from compile_callbacks.profiling.step_timer import WARMUP_STEPS
from compile_callbacks.profiling.workload import Workload
from compile_callbacks.session.ranks import ProcessGroupSync
from compile_callbacks.targets.fsdp import WEIGHTS_ARE_SHARDED
from compile_callbacks.tuning.candidates import candidates_of
from compile_callbacks.tuning.trial import Block, Trial, Verdict, compared_workload
from compile_callbacks.tuning.tuner import Tuner

_T = TypeVar("_T")

BLOCK_STEPS = 1 + WARMUP_STEPS + LEAST_SAMPLES
"""The steps of a block: one step that compiles, the warm-up steps, and the timed steps. The number is fixed, so that a
block ends at the same step on all ranks."""


class PhaseTuning:
    """Runs blocks of steps of one phase with each candidate in turn, until a candidate is chosen.

    In training, all ranks decide together at the end of each block. In the infer phase, ranks may have different
    numbers of batches, so each rank decides for itself. At the end of the stage, all ranks use rank zero's winner.
    """

    def __init__(
        self,
        phase: Phase,
        tune: Tune,
        switch: PhaseSwitch,
        recorder: CompileRecorder,
        processes: ProcessGroupSync | None = None,
        print_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.phase = phase
        self.tune = tune
        self._switch = switch
        self._recorder = recorder
        self._print_line = print_line
        self._processes = processes or ProcessGroupSync()
        self._device = torch.device("cpu")
        self._record: ModelRecord | None = None
        self._conditions: Mapping[str, str] = {}
        self._earlier: dict[str, str] = {}  # keys of conditions -> keys of earlier winners
        self._reset()

    def _reset(self) -> None:
        self._tuner = Tuner(self.tune, self._device.type)
        self._configs: dict[str, ActiveConfig] = {EAGER: EAGERLY}
        self._workloads: Counter[Workload] = Counter()  # workloads of the first block, which is eager
        self._made_for: dict[str, str] = {}
        self._first_event = len(self._recorder.events)
        self._samples: list[tuple[Workload, Span]] = []  # step times of the current block
        self._block_steps, self._block_seconds, self._step_began = 0, 0.0, 0.0

    # ------------------------------------------------------------------------------------------ a run

    def begin(
        self,
        device: torch.device,
        model: str,
        *,
        passes: Sequence[Any] = (),
        precision: str = "",
        record: ModelRecord | None = None,
    ) -> None:
        """Begin a Trainer run, and keep the winner of the last run, if that run was long enough to choose one."""
        self._device, self._record = device, record
        self._conditions = conditions(
            model=model,
            targets=[target.name for target in self._switch.targets],
            passes=passes,
            precision=precision,
            device=device,
            ranks=self._processes.size,
        )
        for key, winner in record.load()["winners"].items() if record is not None else ():
            if isinstance(config_key := winner.get("config_key"), str):
                self._earlier[key] = config_key
        if not self._tuner.lasts:
            self._switch.free_candidates(self.phase, *self._configs)
            self._reset()

    def plan(self, steps_left: float) -> None:
        """Set the number of remaining steps of the phase, which is the same on all ranks."""
        self._tuner.steps_left = steps_left

    # ------------------------------------------------------------------------------------------ steps and stages

    def step_begins(self, *, measured: bool) -> ActiveConfig:
        """Begin a step, and return its config. Only measured steps run with a candidate."""
        if not measured or self.winner is not None:
            return self.active
        self._step_began = time.perf_counter()
        return self._configs[self._tuner.candidate]

    def step_ends(self, workload: Workload, span: Span | None) -> None:
        """End a measured step. ``span`` is ``None`` if the time of the step must not be used."""
        if self.winner is not None:
            return
        if not self._tuner.started:
            self._workloads[workload] += 1
        if span is not None:
            self._samples.append((workload, span))
        self._block_steps += 1
        self._block_seconds += time.perf_counter() - self._step_began
        if self._block_steps >= BLOCK_STEPS:
            self._block_ends()

    def stage_ends(self) -> None:
        """End a stage on all ranks. In the infer phase, all ranks use the winner of rank zero, if it has one."""
        if self.phase == "train" or self._processes.size == 1:
            return
        mine = None if self.winner is None else self._key(self.winner)
        chosen, complete = self._processes.gather((mine, self._tuner.complete))[0]
        if chosen is None:
            return
        if chosen != mine:
            if chosen not in self._names:
                self._start(shapes_vary=True)  # includes each candidate that rank zero may have
            self._tuner.adopt(self._names.get(chosen, EAGER), "rank 0 chose it")
            self._apply()
        self._tuner.complete = complete
        self._keep()

    # ------------------------------------------------------------------------------------------ results

    @property
    def winner(self) -> str | None:
        """The chosen candidate, or ``None`` before the choice."""
        return self._tuner.winner

    @property
    def active(self) -> ActiveConfig:
        """The config outside measured steps: the winner's config, or eager before the choice."""
        return self._configs[self.winner or EAGER]

    @property
    def begins_block(self) -> bool:
        """Whether the next measured step is the first step of a block."""
        return self.winner is None and self._block_steps == 0

    def trials(self) -> Sequence[Trial]:
        """Return the result of each candidate so far. Empty if the phase did not run."""
        trials = list(self._tuner.trials.values())
        return trials if self.winner is not None or any(trial.blocks for trial in trials) else ()

    # ------------------------------------------------------------------------------------------ blocks

    def _block_ends(self) -> None:
        self._tuner.block_ends(Block.of_ranks(self._gather_in_training(self._block())))
        self._samples, self._block_steps, self._block_seconds = [], 0, 0.0
        if not self._tuner.started:
            compared = compared_workload(self._workloads)
            vary = compared not in self._workloads and len({workload.shapes for workload in self._workloads}) > 1
            self._made_for = {**self._conditions, "phase": self.phase, "tune": self.tune.key(), "work": repr(compared)}
            known = self._gather_in_training((vary, self._earlier.get(digest(self._made_for))))
            self._start(shapes_vary=any(vary for vary, _ in known), earlier=known[0][1])
        self._apply()
        if self.winner is not None and (self.phase == "train" or self._processes.size == 1):
            self._keep()

    def _gather_in_training(self, value: _T) -> list[_T]:
        return self._processes.gather(value) if self.phase == "train" else [value]

    def _block(self) -> Block:
        """Return the measurements of this rank."""
        began = time.perf_counter()
        self._recorder.collect()
        times = defaultdict[Workload, list[float]](list)
        for workload, span in self._samples:
            times[workload].append(span.milliseconds())  # synchronizes the GPU
        compile_seconds = sum(event.seconds or 0 for event in self._events() if event.kind == "compile")
        seconds = self._block_seconds + time.perf_counter() - began
        return Block(dict(times), seconds, compile_seconds, self._problem(), self._block_steps)

    def _events(self, since: int = 0) -> list[CompileEvent]:
        """Return the compile events of the candidate."""
        name = self._tuner.candidate
        return [e for e in self._recorder.events[since:] if e.phase == self.phase and e.candidate == name]

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

    def _start(self, *, shapes_vary: bool, earlier: str | None = None) -> None:
        """Start with the candidates after eager was measured, or use the winner of an earlier run."""
        sharded = any(member.sharded for target in self._switch.targets for member in target.members)
        no_freezing = "repeated blocks share a graph, but not their weights" if self._switch.shares_graphs else None
        no_cudagraphs = None if self._device.type == "cuda" else "the module is not on a GPU"
        candidates = candidates_of(
            self.tune,
            self.phase,
            self._device,
            no_freezing=WEIGHTS_ARE_SHARDED if sharded else no_freezing,
            no_cudagraphs=WEIGHTS_ARE_SHARDED if sharded else no_cudagraphs,
            shapes_vary=shapes_vary,
        )
        trials = []
        for config, trial in candidates:
            self._configs[trial.candidate] = ActiveConfig(config, trial.candidate)
            trials.append(trial)
        without_effect = {trial.candidate for trial in trials if trial.verdict == "not tried"}
        self._tuner.start(trials)
        name = self._names.get(earlier or "")
        if self._record is not None and name is not None and name not in without_effect:
            self._tuner.adopt(name, f"won in an earlier run; delete {self._record.path} to measure again")

    # ------------------------------------------------------------------------------------------ the winner

    @property
    def _names(self) -> dict[str, str]:
        """Return the names of the candidates by their keys."""
        return {self._key(name): name for name in self._configs}

    def _key(self, name: str) -> str:
        config = self._configs[name].config
        return EAGER if config is None else config.key()

    def _apply(self) -> None:
        """Free the compiled code of the candidates that lost, and announce the winner."""
        for name, trial in self._tuner.trials.items():
            if trial.verdict not in ("undecided", "chosen"):
                self._switch.free_candidates(self.phase, name)
        if self.winner is None:
            return
        self._switch.end_trial(self.phase, self.winner)
        eager, chosen = self._tuner.trials[EAGER], self._tuner.trials[self.winner]
        line = f"{self.phase} phase: {self.winner} is chosen"
        if chosen is not eager and chosen.stats and eager.stats:
            line += f" ({chosen.median_ms():.2f} ms a step, eager {eager.median_ms():.2f} ms)"
        self._print_line(f"{line}: {chosen.reason}" if chosen.reason else line)

    def _keep(self) -> None:
        """Write the winner, which is the same on all ranks, to the file for later runs."""
        if self.winner is None or not self._tuner.worth_keeping:
            return
        key, config_key = digest(self._made_for), self._key(self.winner)
        if self._record is None or self._earlier.get(key) == config_key:
            return
        self._earlier[key] = config_key
        winner = {"candidate": self.winner, "config_key": config_key, "made_for": self._made_for}
        if problem := self._record.update("winners", key, winner):
            self._print_line(f"{self.phase} phase: the winner could not be written for later runs: {problem}")
