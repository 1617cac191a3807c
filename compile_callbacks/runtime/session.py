"""`Session`: what the callback's hooks, a loop without a Trainer and `InductorBackend` act on."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.device import device_name, device_of
from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks._utils.fingerprints import architecture_fingerprint, code_fingerprint, digest
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.tune import Settings, Tune
from compile_callbacks.profiling.baseline import Baseline
from compile_callbacks.profiling.compile_events import CompileRecorder
from compile_callbacks.profiling.memory import PeakMemory
from compile_callbacks.profiling.progress import CompileProgress
from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.profiling.workload import Workload, baseline_from_data
from compile_callbacks.report.build import build_phase_report
from compile_callbacks.report.report import CompileReport
from compile_callbacks.runtime.cache_dir import CompileCache
from compile_callbacks.runtime.called_targets import CalledTargets
from compile_callbacks.runtime.cudagraphs import BackwardInCallingThread, GradientCopies, drop_overwritten_gradients
from compile_callbacks.runtime.diagnostics import SessionWarnings
from compile_callbacks.runtime.dispatcher import PhaseSwitch
from compile_callbacks.runtime.distributed import ProcessGroupSync
from compile_callbacks.runtime.fsdp import is_sharded
from compile_callbacks.runtime.model_record import ModelRecord, conditions
from compile_callbacks.runtime.phase_tuning import PhaseTuning
from compile_callbacks.runtime.repeated import Compiled, group_targets
from compile_callbacks.runtime.target import Target, overlap
from compile_callbacks.runtime.target_settings import TargetSettings

STATE_VERSION = 1
"""The version of `Session.state_dict`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a trainer run.

    Attributes:
        phase: Its phase.
        name: The trainer's name: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        sanity: Whether it is the sanity check: its steps are eager, and no samples.
        nested: Whether a trainer call within another one runs it: its steps are compiled, and no samples.
        weights_frozen: Whether nobody trains meanwhile, so that the compiled code may contain the weights.
    """

    phase: Phase = "train"
    name: str = "train"
    sanity: bool = False
    nested: bool = False
    weights_frozen: bool = False


@dataclass(slots=True)
class _Step:
    """A batch, from its start to its end.

    Attributes:
        first: Whether it is the first one of its stage.
        measured: Whether its time may be a sample.
        timed: Whether the timer takes its time.
        compiles_before: Number of compiles before it.
        traces_before: Number of compiles before it, except recordings of CUDA graphs.
    """

    first: bool = False
    measured: bool = False
    timed: bool = False
    compiles_before: int = 0
    traces_before: int = 0


class Session:
    """Compiles the targets of one module and measures both phases, over as many trainer runs as there are.

    Args:
        module: The root module.
        targets: What is compiled of it.
        configs: The settings by phase, or candidates for them; ``None`` leaves a phase eager.
        left_alone: Phases in which targets run as the user compiled them, see `PhaseSwitch`.
        finds_targets: Whether the modules and methods that the first steps call become targets, too.
        others: Targets of other callbacks, which these steps do not make targets.
        taken: Targets of other callbacks, which do not become targets here.
        passes: Graph passes for both phases.
        baseline_steps: Eager samples wanted in each phase.
        settings: What to do on failures, differences from eager and new shapes.
        cache_dir: A folder in which compiled code, and what a `Tune` chose, are kept across runs.
        print_line: Takes a line of text while something compiles.
    """

    def __init__(
        self,
        module: nn.Module,
        targets: Sequence[Compiled],
        configs: Mapping[Phase, Settings],
        *,
        left_alone: frozenset[Phase] = frozenset(),
        finds_targets: bool = False,
        others: Sequence[Target] = (),
        taken: Sequence[Target] = (),
        passes: Sequence[Any] = (),
        baseline_steps: int = 0,
        settings: TargetSettings | None = None,
        cache_dir: Path | None = None,
        print_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.module = module
        self._settings = dict(configs)
        self._left_alone = left_alone
        self._called = CalledTargets(module, others) if finds_targets and any(configs.values()) else None
        self._taken = tuple(taken)
        self._stages: set[str] = set()
        self._processes = ProcessGroupSync()
        warn = WarnOnce()
        caches = cache_dir is not None and any(configs.values())
        self._cache = CompileCache(cache_dir, functools.partial(warn, "cache_dir")) if cache_dir and caches else None
        tunes = {phase: given for phase, given in configs.items() if isinstance(given, Tune)}
        self._configs: dict[Phase, InductorConfig | None] = {
            phase: given if isinstance(given, InductorConfig) else None for phase, given in configs.items()
        }
        self._progress = CompileProgress(print_line)
        # Torch knows the recorder as long as it listens, which is not to keep the session and its module.
        self._recorder = CompileRecorder(on_start=self._progress.compile_begins, on_end=self._progress.compile_ends)
        self._timer = StepTimer()
        self._memory = PeakMemory()
        self._switch = PhaseSwitch(
            targets,
            self._configs,
            left_alone=left_alone,
            passes=passes,
            recorder=self._recorder,
            settings=settings,
            warn=warn,
        )
        # A phase that is tuned measures eager steps among those of its candidates.
        self._baselines = {phase: Baseline(baseline_steps if config else 0) for phase, config in self._configs.items()}
        self._tunings = {
            phase: PhaseTuning(
                phase,
                tune,
                switch=self._switch,
                recorder=self._recorder,
                timer=self._timer,
                print_line=print_line,
                gather=self._processes.gather,
            )
            for phase, tune in tunes.items()
        }
        self._cache_dir = cache_dir
        self._passes = tuple(passes)
        self._gradient_copies = GradientCopies()
        self._backward_thread = BackwardInCallingThread()
        self._shared: Mapping[Phase, Baseline] = {}
        self._running = False
        self._stage = Stage()
        self._step = _Step()
        self._compiled = False
        self._device = torch.device("cpu")
        self._cuda = self._several_devices = False
        self._left_garbage = False
        self._trained: int | None = None
        self._before: CompileReport | None = None  # the report of the run that this one resumes
        self._precision = ""
        self._warnings = SessionWarnings(
            warn,
            switch=self._switch,
            recorder=self._recorder,
            timer=self._timer,
            tunings=self._tunings,
            finds_targets=finds_targets,
        )

    # ------------------------------------------------------------------------------------------ a trainer run

    @property
    def running(self) -> bool:
        """Whether a trainer run is under way."""
        return self._running

    def begin(
        self, *, precision: str = "", together: bool = False, shared: Mapping[Phase, Baseline] | None = None
    ) -> None:
        """A trainer run begins: compile in place.

        Args:
            precision: The trainer's precision.
            together: Whether all processes of the process group, if there is one, begin the same run here.
            shared: By phase, the baseline of another session of the run, which measures that phase's steps instead.
        """
        self._running = True
        self._shared = shared or {}
        self._device = device_of(self.module)
        self._cuda = self._device.type == "cuda"
        self._several_devices = len({weight.device for weight in self.module.parameters()}) > 1
        self._processes.join(together=together and any(self._settings.values()), decides=bool(self._tunings))
        if self._processes.is_global_zero:
            self._warnings.check_settings(self._configs, sharded=is_sharded(self.module), cuda=self._cuda)
        if any(self._settings.values()):
            _torch.inductor.import_inductor()
        if self._cache is not None:
            self._cache.begin(clean=self._processes.is_global_zero)
        self._recorder.listen()
        self._switch.install()
        self._precision = precision
        if self._tunings:
            self._begin_tunings(precision)

    def end(self, *, keep_compiled: bool = False) -> None:
        """The trainer run is over: the module is an ordinary one again, unless it is to stay compiled."""
        self._running = False
        parts = (
            self._stop_recording,
            self._backward_thread.end,  # an exception ends a run within a step
            self._drop_gradients,
            self._processes.leave,
            self._recorder.stop,
            self._timer.discard_step,
            self._end_cache,
            self._stay_compiled if keep_compiled else self._switch.remove,
        )
        with contextlib.ExitStack() as remaining:  # an exception in one part does not prevent the others
            for part in reversed(parts):
                remaining.callback(part)

    def interrupt(self) -> Callable[[], None]:
        """Another trainer call begins within this run; returns the function that continues the run afterwards."""
        stage, compiled = self._stage, self._compiled

        def go_on() -> None:
            self._stage = stage
            self._timer.discard_step()  # the step around the call, if it began in one, is no sample
            self._step = replace(self._step, measured=False, timed=False)
            self._select(compiled=compiled)

        return go_on

    def begin_by_grad_mode(self, *, weights_frozen: bool = False, found_from_module: bool = True) -> None:
        """Compile in place for a loop without a trainer: each call tells its phase by the grad mode.

        Args:
            weights_frozen: Whether nobody trains meanwhile, so that weights may be baked in.
            found_from_module: Whether `report_of` and `restore` are to find this session.
        """
        self.begin()
        if found_from_module:
            self._switch.set_session(self)
        self._switch.select_by_grad_mode(frozen=weights_frozen)

    def allow_shapes(self, args: Any, kwargs: Any) -> None:
        """Have inference with inputs of these shapes compile, whatever new shapes do."""
        for compiled_target in self._switch.compiled_targets("infer"):
            compiled_target.allow_shapes(args, kwargs)

    def free_compiled(self) -> None:
        """Give back the memory that compiled code takes; what is called again is compiled again."""
        self._switch.free_compiled()

    def listeners_end(self) -> Callable[[], None]:
        """What ends listening to torch once the module is gone, or the process; it does not keep the module."""
        recorder, trace_settings, cache = self._recorder, self._switch.trace_settings, self._cache
        compilers = [
            compiled_target.compiler for phase in PHASES for compiled_target in self._switch.compiled_targets(phase)
        ]

        def end() -> None:
            for compiler in compilers:
                compiler.free_folded()
            recorder.stop()
            if cache is not None:
                cache.end()
            trace_settings.remove()

        return end

    # ------------------------------------------------------------------------------------------ stages and steps

    def enter(self, stage: Stage) -> None:
        """A stage begins or continues; it runs compiled until a step runs eagerly."""
        self._stage = stage
        self._select(compiled=True)

    def expect(self, steps: Mapping[Phase, float], seconds: float = math.inf) -> None:
        """Plan the baselines and what is tried out, by the steps to come; what is planned already stays.

        Args:
            steps: Steps to come by phase, ``math.inf`` where that is not known.
            seconds: When the run ends by the clock.
        """
        of_ranks = self._processes.gather((dict(steps), seconds))
        for phase in steps:
            least = min(of_rank[phase] for of_rank, _ in of_ranks)
            if phase not in self._shared:
                self._baselines[phase].plan(least)
            if (tuning := self._tunings.get(phase)) is not None:
                tuning.expect(least, min(seconds for _, seconds in of_ranks))
                self._configs[phase] = tuning.config

    def step_begins(self, *, first: bool = False, turn: bool = True) -> bool:
        """A batch begins.

        Args:
            first: Whether it is the first batch of its stage: the weights may have been swapped for the stage.
            turn: Whether this session measures the step, if the run has several.

        Returns:
            Whether the step is timed.
        """
        if self._left_garbage:
            self._collect_garbage()
        if first:
            self._switch.invalidate_weights()
        self._recorder.listen_after_reset()
        stage = self._stage
        counts = not (stage.sanity or stage.nested)
        finds_targets = False
        if not stage.nested:
            finds_targets = self._called is not None and stage.name not in self._stages
            self._stages.add(stage.name)
        measured = turn and counts and not finds_targets
        self._step = step = _Step(first, measured, False, self._recorder.compiles_seen, self._recorder.traces_seen)
        if (tuning := self._tunings.get(stage.phase)) is not None:
            self._configs[stage.phase] = tuning.step_begins(measured=measured)
        in_baseline = counts and self.baseline(stage.phase).running
        compiled = not (stage.sanity or finds_targets or in_baseline)
        if compiled != self._compiled or self._selection_changes:
            self._select(compiled=compiled)
        if self._cuda:
            torch.compiler.cudagraph_mark_step_begin()
            if self._compiled and stage.phase == "train" and not self._several_devices:
                self._backward_thread.begin()
            if turn and counts:
                self._memory.start(stage.phase, compiled=self._compiled, candidate=self._candidate)
        if turn and counts:
            step.timed = self._timer.start(self._device, wanted=self.compares)
        if self._called is not None and finds_targets:
            self._called.start()
        return step.timed

    @property
    def has_cudagraphs(self) -> bool:
        """Whether training steps run CUDA graphs."""
        config = self._configs["train"]
        return self._cuda and self._compiled and config is not None and config.uses_cudagraphs

    def gradients_ready(self, *, kept: bool) -> None:
        """A backward pass is done.

        Args:
            kept: Whether the gradients may outlive the step, as in an accumulation.
        """
        if kept and self.has_cudagraphs:
            self._gradient_copies.keep(self.module.parameters())

    def step_ends(self, workload: Callable[[], Workload]) -> None:
        """A batch ends.

        Args:
            workload: Returns what was to be done in it; called if the step is timed.
        """
        phase, step = self._stage.phase, self._step
        if self._cuda:
            self._backward_thread.end()
        if self._called is not None:
            self._switch.add(self._new_targets(self._called.stop()))
        disturbed = self._recorder.compiles_seen != step.compiles_before
        traced = self._recorder.traces_seen != step.traces_before
        tuning = self._tunings.get(phase)
        found = self._describe(workload(), step, disturbed=disturbed) if step.timed else None
        if disturbed:
            self._trained = None
        sample = self._timer.stop(
            phase, compiled=self._compiled, workload=found, disturbed=disturbed, candidate=self._candidate
        )
        if self._cuda and step.measured:
            self._memory.stop(traced=traced)
        baseline = self._baselines[phase]
        if not self._compiled and self.measures and baseline.running:
            baseline.step(sample=sample)
        if tuning is not None:
            config = self._configs[phase]
            if tuning.winner is None and config is not None and config.uses_cudagraphs:
                # Torch frees the memory of CUDA graphs with the last of them, tensors that are still in it or not.
                self._gradient_copies.keep(self.module.parameters())
            if found is not None:
                tuning.step_ends(found, measured=step.measured)
            self._configs[phase] = tuning.config
        self._left_garbage = traced
        if not self._compiled or self._selection_changes:
            self._select(compiled=True)

    def leave(self, phase: Phase) -> None:
        """A stage of this phase ends: say what ran and was not compiled, unless that has been said."""
        self._recorder.collect()
        if (tuning := self._tunings.get(phase)) is not None:
            tuning.stage_ends()
            self._configs[phase] = tuning.config
        self._warnings.check_stage(phase, self._configs[phase])
        self._warnings.check_step_times([phase])

    # ------------------------------------------------------------------------------------------ several sessions

    def baseline(self, phase: Phase) -> Baseline:
        """The baseline of a phase, which all sessions of a run share: its steps are eager in all of them."""
        return self._shared.get(phase) or self._baselines[phase]

    @property
    def measures(self) -> bool:
        """Whether this session measures the steps of the active phase. One session of a run does."""
        return self._stage.phase not in self._shared

    @property
    def _selection_changes(self) -> bool:
        """Whether the compiled targets or their settings may change between two steps of a stage."""
        return self._called is not None or bool(self._tunings)

    @property
    def compares(self) -> bool:
        """Whether this session still compares step times in the active phase, and so needs a sample of each step."""
        phase = self._stage.phase
        if self._baselines[phase].running and self.measures:
            return True
        tuning = self._tunings.get(phase)
        return tuning is not None and not tuning.winner

    # ------------------------------------------------------------------------------------------ what was measured

    def report(self) -> CompileReport:
        """What this process measured so far."""
        self._recorder.collect()
        phases = {
            phase: build_phase_report(
                phase,
                settings,
                self._targets_of(phase),
                self._recorder,
                self._timer if phase not in self._shared else StepTimer(),
                self._memory,
                left_alone=phase in self._left_alone,
                trials=self._tunings[phase].trials() if phase in self._tunings else (),
            )
            for phase, settings in self._settings.items()
        }
        return CompileReport(train=phases["train"], infer=phases["infer"], before=self._before)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know, as plain data: the report, the baseline's samples, and what was chosen."""
        baselines = {phase: [[list(w), list(ms)] for w, ms in self._timer.baseline(phase).items()] for phase in PHASES}
        return {
            "version": STATE_VERSION,
            "report": self.report().to_dict(),
            "baselines": baselines,
            "device": self._device_name(),
            "winners": {phase: winner for phase, tuning in self._tunings.items() if (winner := tuning.state())},
        }

    def resume(self, state: object) -> None:
        """Continue from the `state_dict` of an earlier run. On the same device, its baseline is not measured again.

        A part that is missing, unknown or of a wrong type is ignored, and so is a state of another version.
        """
        data = state if isinstance(state, Mapping) and state.get("version") == STATE_VERSION else {}
        report, winners, baselines = (_mapping(data.get(name)) for name in ("report", "winners", "baselines"))
        if report:
            self._before = CompileReport.from_dict({**report, "before": None})
        device = data.get("device")
        if not all(self._processes.gather(isinstance(device, str) and device == self._device_name())):
            return
        for phase, tuning in self._tunings.items():
            tuning.restore(winners.get(phase))
        for phase in PHASES:
            baseline = baseline_from_data(baselines.get(phase))
            self._timer.restore(phase, baseline)
            if baseline:
                self._baselines[phase].skip()

    def warn_about_slow_steps(self) -> None:
        """Warn where compiled steps turn out slower than eager ones, and of the cause."""
        self._warnings.check_step_times(PHASES)
        if self._called is None and "train" in self._stages:
            self._warnings.check_targets()

    # ------------------------------------------------------------------------------------------ what these call

    def _stop_recording(self) -> None:
        if self._called is not None:
            self._called.stop()

    def _drop_gradients(self) -> None:
        if self._cuda:
            drop_overwritten_gradients(self.module.parameters())

    def _end_cache(self) -> None:
        if self._cache is None:
            return
        try:
            if self._cache.active:
                self._warnings.check_cache_dir()
        finally:
            self._cache.end()

    def _stay_compiled(self) -> None:
        for tuning in self._tunings.values():
            tuning.finalize("the run ended before all steps were taken")
        self._switch.select_by_grad_mode()

    def _collect_garbage(self) -> None:
        """Collect what a compile left: so many objects that an automatic collection takes longer than most steps."""
        self._left_garbage = False
        if gc.isenabled():
            gc.collect()

    def _new_targets(self, called: Sequence[Target]) -> Sequence[Compiled]:
        """The called modules and methods that are no targets yet; those that look alike share a graph."""
        known = {(id(member.module), member.method) for target in self._switch.targets for member in target.members}
        new = [one for one in called if (id(one.module), one.method) not in known]
        return group_targets(self.module, [one for one in new if not any(overlap(one, other) for other in self._taken)])

    def _targets_of(self, phase: Phase) -> Sequence[Compiled]:
        """The targets for the report of a phase: the named ones, or those that compiled steps called."""
        called = {
            compiled_target.key.target
            for compiled_target in self._switch.compiled_targets(phase)
            if compiled_target.called
        }
        return [target for target in self._switch.targets if self._called is None or target.name in called]

    def _describe(self, workload: Workload, step: _Step, *, disturbed: bool) -> Workload:
        """The workload of a step with the conditions that this session knows."""
        conditions: dict[str, object] = {"precision": self._precision}
        if self._stage.phase == "train":  # below a frozen backbone there is less to do
            if step.first or disturbed or self._trained is None:
                self._trained = zlib.crc32(bytes(weight.requires_grad for weight in self.module.parameters()))
            conditions["trained"] = self._trained
        if self._stage.phase in self._tunings:
            # The first batch of a stage folds weights again, and with frozen weights other code runs.
            conditions |= {"first": step.first, "frozen": self._stage.weights_frozen}
        return workload.with_conditions(**conditions)

    def _select(self, *, compiled: bool) -> None:
        self._compiled = compiled and self._configs[self._stage.phase] is not None
        self._switch.select(self._stage.phase, compiled=compiled, frozen=self._stage.weights_frozen)

    @property
    def _candidate(self) -> str | None:
        """The candidate that the step runs with, where the phase is tuned."""
        tuning = self._tunings.get(self._stage.phase)
        return tuning.active_candidate if tuning is not None else None

    def _begin_tunings(self, precision: str) -> None:
        device, record = device_of(self.module), None
        model = digest([architecture_fingerprint(self.module), code_fingerprint(self.module)])
        if self._cache_dir is not None:
            record = ModelRecord(self._cache_dir, model, read_only=not self._processes.is_global_zero)
        made_for = conditions(
            model=model,
            targets=[target.name for target in self._switch.targets],
            passes=self._passes,
            precision=precision,
            device=device,
            ranks=self._processes.size,
        )
        for phase, tuning in self._tunings.items():
            tuning.begin(device, record=record, conditions=made_for)
            self._configs[phase] = tuning.config

    def _device_name(self) -> str:
        """What step times are compared on."""
        device = device_of(self.module)
        name = device_name(device)
        if device.type == "cpu":
            name += f", {torch.get_num_threads()} threads"
        return name if self._processes.size == 1 else f"{self._processes.size} x {name}"


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
