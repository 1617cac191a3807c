"""`Session`: compiles the targets of one module, and measures its steps.

The hooks of `InductorCompile`, `compile_phases` and `InductorBackend` call the session.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.device import device_of
from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.cache.folder import CompileCache, ModelRecord, model_fingerprint
from compile_callbacks.calls.new_shapes import ShapeRecords
from compile_callbacks.calls.phase_switch import EAGERLY, ActiveConfig, PhaseSwitch
from compile_callbacks.calls.target_search import TargetSearch
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.tune import Tune
from compile_callbacks.profiling.compile_events import CompileRecorder
from compile_callbacks.profiling.progress import CompileProgress
from compile_callbacks.profiling.workload import workload_of
from compile_callbacks.report.build import build_phase_report
from compile_callbacks.report.report import CompileReport
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.session.measurements import Measurements, Stage, Step
from compile_callbacks.session.phase_tuning import PhaseTuning
from compile_callbacks.session.ranks import ProcessGroupSync
from compile_callbacks.session.stage_warnings import SessionWarnings
from compile_callbacks.session.steps_on_gpu import StepsOnGpu
from compile_callbacks.targets.fsdp import is_sharded
from compile_callbacks.targets.repeated import REPEATED, group_repeated, group_targets
from compile_callbacks.targets.target import AnyTarget

STATE_VERSION = 1
"""The version of `Session.state_dict`."""


class Session:
    """Compiles the targets of one module, and measures both phases over any number of Trainer runs.

    The session owns the active config of each phase, and one `Step` at a time.
    """

    def __init__(
        self,
        module: nn.Module,
        targets: Sequence[AnyTarget],
        arguments: CompileArguments,
        *,
        finds_targets: bool = False,
        resolve: Callable[[], Sequence[AnyTarget]] | None = None,
        print_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.module = module
        self._arguments = arguments
        self._finds_targets = finds_targets and arguments.compiles
        self._processes = ProcessGroupSync()
        warn = WarnOnce()
        folder = arguments.cache_dir if arguments.compiles else None
        self._cache = CompileCache(folder, functools.partial(warn.warn, "CC401")) if folder else None
        self._model_record: ModelRecord | None = None
        self._progress = CompileProgress(print_line)
        # torch keeps a reference to an active recorder, so the recorder must not keep the session and its module alive.
        self._recorder = CompileRecorder(progress=self._progress, mode_argument=arguments.mode_argument)
        self._shapes = ShapeRecords()
        self._active: dict[Phase, ActiveConfig] = {
            phase: ActiveConfig(config) if isinstance(config, InductorConfig) else EAGERLY
            for phase, config in arguments.configs.items()
        }
        # A phase with a Tune needs no baseline, because eager is one of the candidates.
        self._measurements = Measurements(
            module, {phase: arguments.baseline_steps if active.config else 0 for phase, active in self._active.items()}
        )
        self._switch = PhaseSwitch(
            targets,
            uncompiled=arguments.uncompiled,
            passes=arguments.passes,
            recorder=self._recorder,
            settings=arguments.target_settings,
            warn=warn,
            shapes=self._shapes,
        )
        group = group_repeated if arguments.targets == REPEATED else group_targets
        self._search = TargetSearch(
            module,
            self._switch,
            warn,
            group=group if self._finds_targets else None,
            resolve=resolve,
            uncompiled=arguments.uncompiled,
        )
        self._tunings = {
            phase: PhaseTuning(phase, config, self._switch, self._recorder, self._processes, print_line)
            for phase, config in arguments.configs.items()
            if isinstance(config, Tune)
        }
        self._warnings = SessionWarnings(
            warn, self._switch, self._recorder, self._measurements.timer, finds_targets=finds_targets
        )
        self._trace = _torch.events.StructuredTrace(arguments.trace_dir) if arguments.trace_dir else None
        self.gpu = StepsOnGpu(module)
        self.running = False
        """Whether a Trainer run is in progress."""
        self._stage, self._step = Stage(), Step()
        self._counted: Step | None = None  # stands for the next steps, if the session only counts them
        self._runs_compiled = False  # whether the selected config compiles
        self._before: CompileReport | None = None  # the report of the run that this run resumes

    # ------------------------------------------------------------------------------------------ a Trainer run

    def begin(
        self,
        *,
        precision: str = "",
        together: bool = False,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin a Trainer run, and install the targets.

        All processes of the default process group begin the run ``together``, or only this process. ``stopping`` must
        not refer to the module.
        """
        self.running = True
        self._recorder.stopping = stopping
        device = device_of(self.module)
        self.gpu.begin(device)
        self._processes.join(together=together and self._arguments.compiles, decides=bool(self._tunings))
        self._measurements.begin(device, precision, self._processes.size)
        for phase, active in self._active.items() if self._processes.is_global_zero else ():
            self._warnings.check_settings(phase, active.config, sharded=is_sharded(self.module), device=device)
        if self._arguments.compiles:
            self._recorder.import_seconds += _torch.inductor.import_inductor()
        model = model_fingerprint(self.module) if self._cache is not None or self._tunings else ""
        if self._cache is not None:
            self._cache.begin()
            self._model_record = ModelRecord(self._cache.folder, model, read_only=not self._processes.is_global_zero)
            known = self._model_record.load()
            self._shapes.restore(known["shapes"])
            self._progress.restore(known["compile_seconds"])
        if self._trace is not None:
            self._trace.start()
        self._recorder.listen()
        self._switch.install()
        for tuning in self._tunings.values():
            tuning.begin(device, model, passes=self._arguments.passes, precision=precision, record=self._model_record)
            self._active[tuning.phase] = tuning.active

    def end(self, *, keep_compiled: bool = False) -> None:
        """End the Trainer run, and restore the module unless ``keep_compiled`` is set."""
        self.running = False
        self._recorder.stopping = lambda: False  # because the trainer stays interrupted after an exception
        cache = self._cache if self._cache is not None and self._cache.active else None
        parts = (
            self._search.remove,
            self.gpu.end,
            self._processes.leave,
            self._recorder.stop,
            self._measurements.timer.discard_step,
            *((self._trace.stop,) if self._trace is not None else ()),
            *((self._warnings.check_cache_dir, cache.end, self._save_record) if cache is not None else ()),
            functools.partial(self._switch.select_by_grad_mode, self._active) if keep_compiled else self._switch.remove,
        )
        with contextlib.ExitStack() as remaining:  # calls each part, even if another part raises
            for part in reversed(parts):
                remaining.callback(part)

    def pause(self) -> None:
        """Run the targets eagerly, and measure nothing, until `unpause`."""
        self._measurements.timer.discard_step()
        self._search.step_ends()
        self._step, self._counted = Step(), None  # not measured
        self._switch.select(self._stage.phase, EAGERLY)

    def unpause(self) -> None:
        """Continue the stage. The rest of the step is not measured."""
        self.stage_begins(self._stage)

    def free_compiled(self) -> None:
        """Free the memory of compiled code. The next call of a target compiles it again."""
        self._switch.free_compiled()

    # ------------------------------------------------------------------------------------------ stages and steps

    def plan(self, steps: Mapping[Phase, float]) -> None:
        """Plan the baselines and the tuning for the remaining steps, which are ``math.inf`` if unknown."""
        of_ranks = self._processes.gather(dict(steps))
        for phase in steps:
            least = min(of_rank[phase] for of_rank in of_ranks)
            self._measurements.baselines[phase].plan(least)
            if (tuning := self._tunings.get(phase)) is not None:
                tuning.plan(least)

    def stage_begins(self, stage: Stage) -> None:
        """Begin or continue a stage. It runs compiled until a step runs eagerly."""
        self._stage, self._counted = stage, None
        self._select(compiled=True)

    def step_begins(self, *, first: bool = False) -> bool:
        """Begin a step: decide whether it is eager, and select its config. Return whether it is timed.

        A callback may have swapped the weights before the ``first`` step of a stage.
        """
        # Most steps of a long run on a CPU are only counted, so these lines do as little as possible. The compiles are
        # compared here, too, because the user may compile between two steps.
        counted, recorder = self._counted, self._recorder
        may_count = not first and counted is not None and recorder.compiles_seen == counted.marker[0]
        if may_count and self._measurements.timer.start_untimed():
            assert counted is not None
            counted.number += 1
            self._step, recorder.step = counted, counted.number
            self._search.in_step = True
            return False
        self._counted = None
        if first:
            self._switch.invalidate_weights()
        stage, phase, tuning = self._stage, self._stage.phase, self._tunings.get(self._stage.phase)
        recorded = not stage.sanity
        self._step = step = Step(first, recorded, self._recorder.marker)
        if tuning is not None:
            self._active[phase] = tuning.step_begins(measured=step.measured)
            if step.measured and tuning.begins_block:
                self._measurements.restart_warmup(phase, self._active[phase])
        eagerly = stage.sanity or self._in_baseline(stage)
        if eagerly or tuning is not None:  # otherwise, the phase is already selected
            self._select(compiled=not eagerly)
        step.compiled = self._runs_compiled
        self._search.step_begins(phase, first=first, eager=not step.compiled)
        self.gpu.step_begins(trains_compiled=step.compiled and phase == "train")
        if recorded:
            self._recorder.step = self._measurements.timer.next_step(phase)
            tries = tuning is not None and tuning.winner is None
            step.timed = self._measurements.step_begins(step, phase, self._active[phase], tries=tries)
        return step.timed

    def after_backward(self) -> None:
        """Copy the gradients out of the memory of CUDA graphs, because they outlive the step."""
        config = self._active["train"].config
        if self.gpu.on_gpu and self._runs_compiled and config is not None and config.uses_cudagraphs:
            self.gpu.keep_gradients()

    def step_ends(self, loader: str, batch: Any, part: str = "") -> None:
        """End a step: record its time, and count it for the baseline or the candidate."""
        recorder = self._recorder
        self._search.step_ends()
        if self._step is self._counted and recorder.compiles_seen == self._step.marker[0]:
            self._measurements.timer.passed += 1
            recorder.step = None
            return
        stage, step, tuning = self._stage, self._step, self._tunings.get(self._stage.phase)
        step.disturbed, step.traced = self._recorder.compiled_since(step.marker)
        if step.traced and self._recorder.step is not None and gc.isenabled():
            # A compile leaves many objects. An automatic collection in a later step would take longer than most steps.
            gc.collect()
        self._recorder.step = None
        self.gpu.step_ends()
        workload = workload_of(loader, batch, part) if step.timed else None
        workload = self._measurements.step_ends(step, stage, self._active[stage.phase], workload, tuned=bool(tuning))
        if tuning is not None:
            if tuning.winner is None:
                # torch frees the memory pool with the last CUDA graph, even if gradients are still in the pool.
                self.after_backward()
            if workload is not None and step.measured:
                tuning.step_ends(workload, self._measurements.timer.last_step)
            self._active[tuning.phase] = tuning.active
        if tuning is not None or not step.compiled:  # otherwise, the phase is already selected
            self._select(compiled=True)
        if tuning is None and not self.gpu.on_gpu and step.compiled == self._runs_compiled:
            self._counted = self._measurements.counted_step(step, stage.phase, self._recorder.marker)

    def stage_ends(self, phase: Phase) -> None:
        """End a stage: synchronize the winner of a `Tune` with other ranks, and issue warnings."""
        if (tuning := self._tunings.get(phase)) is not None:
            tuning.stage_ends()
            self._active[tuning.phase] = tuning.active
        self._progress.stage_ends(phase)
        self.check(phase)

    def check(self, phase: Phase) -> None:
        """Warn once about each target that ran uncompiled in a phase, and about slow steps."""
        self._warnings.check_stage(phase, self._active[phase])

    def check_run(self) -> None:
        """Warn at the end of a run about slow steps, and about targets that no step called."""
        for phase in PHASES:
            self._warnings.check_step_times(phase, self._active[phase].candidate)
        if self._measurements.timer.next_step("train") > 1:
            self._warnings.check_targets()

    # ------------------------------------------------------------------------------------------ results

    def report(self, *, details: bool = True) -> CompileReport:
        """Return the report of this process so far.

        ``details`` synchronizes the GPU, and adds the verdict, the series and the events. Without them, the report
        contains only the figures that `CompileReport.scalars` needs during a stage.
        """
        self._recorder.collect()
        if details:
            self._measurements.timer.synchronize()
        phases = {
            phase: build_phase_report(
                phase,
                config,
                self._reported_targets(phase),
                self._recorder,
                self._measurements.timer,
                self._measurements.memory,
                trials=self._tunings[phase].trials() if phase in self._tunings and details else (),
                details=details,
            )
            for phase, config in self._arguments.configs.items()
        }
        return CompileReport(train=phases["train"], infer=phases["infer"], before=self._before)

    def state_dict(self) -> dict[str, Any]:
        """Return the report, the baseline's step times and the observed shapes as plain data for a checkpoint."""
        return {
            "version": STATE_VERSION,
            "report": self.report().to_dict(),
            "baselines": self._measurements.state_dict(),
            "device": self._measurements.device_name(),
            "shapes": self._shapes.state(),
        }

    def resume(self, state: object) -> None:
        """Continue from the `state_dict` of an earlier run. On the same device, keep the baseline of that run.

        The method ignores a state of another version, and parts that are missing, unknown or of a wrong type.
        """
        data = state if isinstance(state, Mapping) and state.get("version") == STATE_VERSION else {}
        report, baselines = (one if isinstance(one, Mapping) else {} for one in map(data.get, ("report", "baselines")))
        if report:
            self._before = CompileReport.from_dict({**report, "before": None})
        self._shapes.restore(data.get("shapes"))
        device = data.get("device")
        if all(self._processes.gather(isinstance(device, str) and device == self._measurements.device_name())):
            self._measurements.resume(baselines)

    # ------------------------------------------------------------------------------------------ parts of the above

    def _in_baseline(self, stage: Stage) -> bool:
        return not stage.sanity and self._measurements.baselines[stage.phase].running

    def _select(self, *, compiled: bool) -> None:
        """Run the targets with the active config of the phase, or eagerly."""
        stage, active = self._stage, self._active[self._stage.phase] if compiled else EAGERLY
        self._runs_compiled = active.config is not None
        observes = not self._runs_compiled and self._arguments.configs[stage.phase] is not None
        self._switch.select(stage.phase, active, weights_frozen=stage.weights_frozen, observes=observes)

    def _reported_targets(self, phase: Phase) -> Sequence[AnyTarget]:
        """Return the targets for the report of a phase: named targets, or the targets that compiled steps called."""
        called = self._switch.called_targets(phase)
        return [one for one in self._switch.targets_of(phase) if not self._finds_targets or one.name in called]

    def _save_record(self) -> None:
        """Write the observed shapes and the compile times to the model's file."""
        if self._model_record is not None:
            for phase, varying in self._shapes.state().items():
                self._model_record.update("shapes", phase, varying)
            for phase, seconds in self._progress.state().items():
                self._model_record.update("compile_seconds", phase, seconds)
