"""`Session`: compiles the targets of one module, and measures its steps.

The hooks of `InductorCompile`, `compile_phases` and `InductorBackend` call the session.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.device import device_of
from compile_callbacks._utils.errors import WarnOnce, with_code
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.background.helper import Helper
from compile_callbacks.cache.folder import CompileCache, ModelRecord, conditions, model_fingerprint
from compile_callbacks.calls.phase_switch import PhaseSwitch
from compile_callbacks.calls.target_search import TargetSearch
from compile_callbacks.config.inductor_config import EAGER_VARIANT
from compile_callbacks.graphs.requests import RequestQueue
from compile_callbacks.profiling import clock
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.progress import CompileProgress
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.profiling.step_times import Step, StepKind
from compile_callbacks.report.declaration import PhaseFacts
from compile_callbacks.report.report import CompileReport
from compile_callbacks.session import findings
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.session.phase_run import PhaseRun, Stage
from compile_callbacks.session.steps_on_gpu import StepsOnGpu
from compile_callbacks.targets.fsdp import WEIGHTS_ARE_SHARDED
from compile_callbacks.targets.target import Target
from compile_callbacks.tuning.ranks import Ranks
from compile_callbacks.tuning.tune import Tune
from compile_callbacks.tuning.tuning import Conditions


class Session:
    """Compiles the targets of one module, and measures both phases over any number of Trainer runs.

    For each step, the `PhaseRun` of the stage tells which variant the step runs, and gets to know how long it took.
    """

    def __init__(
        self,
        module: nn.Module,
        targets: Sequence[Target],
        arguments: CompileArguments,
        *,
        resolve: Callable[[], Sequence[Target]] | None = None,
        print_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.module = module
        self._arguments = arguments
        self._finds_targets = resolve is not None and arguments.targets is None and arguments.compiles
        self._ranks = Ranks()
        warn = self._warn = WarnOnce()
        self._requests = RequestQueue() if arguments.background and arguments.compiles else None
        settings = replace(arguments.target_settings, requests=self._requests)
        folder = settings.cache_dir if arguments.compiles else None
        self._cache = CompileCache(folder, functools.partial(warn.warn, "CC401")) if folder else None
        self._model_record: ModelRecord | None = None
        # torch keeps a reference to an active recorder, so the recorder must not keep the session and its module alive.
        self._recorder = CompileRecorder(progress=CompileProgress(print_line), mode_arguments=arguments.mode_arguments)
        self._switch = PhaseSwitch(
            targets,
            uncompiled=arguments.uncompiled,
            recorder=self._recorder,
            settings=settings,
            warn=warn,
        )
        self._phases = {
            phase: PhaseRun(
                phase,
                config,
                module=module,
                recorder=self._recorder,
                requests=self._requests,
                ranks=self._ranks,
                baseline_steps=arguments.baseline_steps,
                record=functools.partial(self._record, phase),
                print_line=print_line,
            )
            for phase, config in arguments.configs.items()
        }
        self._search = TargetSearch(
            module,
            self._switch,
            warn,
            searched={*PHASES} - arguments.uncompiled if self._finds_targets else (),
            resolve=resolve,
        )
        self._helper = None if self._requests is None else Helper(self._requests, self._helper_failed)
        self.gpu = StepsOnGpu(module)
        self.running = False
        """Whether a Trainer run is in progress."""
        self.stage = Stage()
        """The running stage."""
        self._stage_is_new = True  # whether no step of the stage has begun
        self._step: Step | None = None  # the running step, if it is measured
        self._counted: Step | None = None  # stands for the next untimed steps, which the session only counts
        self._validation = contextlib.ExitStack()  # restores the argument validation of torch.distributions

    # ------------------------------------------------------------------------------------------ a Trainer run

    def add_note(self, error: BaseException) -> None:
        """Name target, setting and remedy in an error of compiled code, such as in a later backward pass."""
        if _torch.inductor.is_from_compiled_code(error):
            phase, names = self.stage.phase, ", ".join(target.name for target in self._switch.targets)
            remedy = f"set {self._arguments.mode_arguments[phase]}='eager', or remove dynamo settings that guess sizes"
            text = f"raised by compiled code of {names} in the {phase} phase; if eager code does not raise it, {remedy}"
            error.add_note(with_code("CC301", text))

    def begin(
        self,
        *,
        precision: str = "",
        all_ranks: bool = False,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin a Trainer run, and install the targets.

        ``all_ranks`` of the default process group begin the run, or only this process. ``stopping`` must
        not refer to the module.
        """
        self.running = True
        self._recorder.stopping = stopping
        device, sharded = device_of(self.module), _torch.distributed.is_sharded(self.module)
        self.gpu.begin(device)
        tunes = any(isinstance(run.settings, Tune) for run in self._phases.values())
        self._ranks.join(all_ranks=all_ranks and self._arguments.compiles, synchronizes=tunes)
        for run in self._phases.values():
            run.device, run.precision, run.is_freed = device, precision, False
            for kind, message, _ in findings.settings_without_effect(run, sharded=sharded):
                if self._ranks.is_global_zero:
                    self._warn.warn("CC204", message, about=(run.phase, kind))
        if self._requests is not None:
            self._requests.in_run, self._requests.failure = True, None
            self._requests.takes_trials = self._ranks.size == 1
        if self._arguments.compiles:
            self._tell(findings.at_begin(background=self._requests is not None))
            self._validation.callback(_torch.dynamo.validate_arguments, _torch.dynamo.validate_arguments(False))
            self._recorder.executions.import_seconds += _torch.inductor.import_inductor()
        model = model_fingerprint(self.module) if self._cache is not None or tunes else ""
        if self._cache is not None:
            self._cache.begin()
            self._model_record = ModelRecord(self._cache.folder, model, read_only=not self._ranks.is_global_zero)
            known = self._model_record.load()
            self._switch.observed.restore(known["shapes"])
            self._recorder.progress.restore(known["compile_seconds"])
        self._recorder.listen()
        self._switch.install()
        if tunes:
            targets, passes = self._arguments.targets or (), self._arguments.target_settings.passes
            known = conditions(
                model=model, targets=targets, passes=passes, precision=precision, device=device, ranks=self._ranks.size
            )
            not_whole = WEIGHTS_ARE_SHARDED if sharded else None
            for run in self._phases.values():
                run.policy.begin(Conditions(known, self._model_record, device, not_whole))
        self._free_unused()

    def end(self, *, keep_compiled: bool = False) -> None:
        """End the Trainer run, and restore the module unless ``keep_compiled`` is set."""
        self.running = False
        self._recorder.stopping = lambda: False  # because the trainer stays interrupted after an exception
        chosen = {phase: run.chosen for phase, run in self._phases.items()}
        actions: list[Callable[[], object]] = [
            self._search.remove,
            self.gpu.end,
            self._ranks.leave,
            self._recorder.stop,
        ]
        if self._helper is not None:
            actions.append(self._helper.stop)
        if self._requests is not None and keep_compiled:
            actions.append(self._requests.end_run)
        if self._cache is not None and self._cache.active:
            actions += [self._check_cache, self._cache.end, self._save_record]
        if keep_compiled:
            actions.append(functools.partial(self._switch.select_by_grad_mode, chosen))
        else:
            actions += [self._validation.close, self._switch.remove]  # guards of compiled code check this setting
        with contextlib.ExitStack() as remaining:  # calls each action, even if another action raises
            for action in reversed(actions):
                remaining.callback(action)

    def discard(self) -> None:
        """End the run, and free the memory of compiled code."""
        self.end()
        self._switch.free_compiled()

    # ------------------------------------------------------------------------------------------ stages and steps

    def plan(self, steps: Mapping[Phase, float]) -> None:
        """Plan for the remaining steps of each phase, which are ``math.inf`` if unknown."""
        of_ranks = self._ranks.gather(dict(steps))
        for phase in steps:
            self._phases[phase].policy.plan(min(of_rank[phase] for of_rank in of_ranks))

    def stage_begins(self, stage: Stage) -> None:
        """Begin or continue a stage. A running step is not measured."""
        self._search.step_ends()
        self.stage, self._stage_is_new, self._step, self._counted = stage, True, None, None
        if self._helper is not None and not stage.eager and stage.phase not in self._arguments.uncompiled:
            self._helper.start(ranks=self._ranks.size)
        variant = EAGER_VARIANT if stage.eager else self._phases[stage.phase].policy.next()[0]
        self._switch.select(stage.phase, variant, weights_frozen=stage.weights_frozen)

    def step_begins(self, *, first: bool = False) -> bool:
        """Begin a step, and select its variant. Return whether the step is timed.

        A callback may have swapped the weights before the ``first`` step of a stage.
        """
        # Most steps of a long run are only counted, so these lines do as little as possible. The compiles are compared
        # here, too, because the user may compile between two steps.
        stage, counted, recorder, ran = self.stage, self._counted, self._recorder, self._recorder.executions
        run = self._phases[stage.phase]
        record = run.times.last
        if counted is not None and not first and record.untimed_left and ran.compiles == counted.compiles:
            record.untimed_left -= 1
            counted.began = clock.seconds()
            counted.graphs_before = ran.graphs
            self._step, recorder.step, self._search.in_step = counted, run.times.number + 1, True
            if self.gpu.on_gpu:
                self.gpu.step_begins(stage.phase, counted.variant)
            return False
        self._counted, ran.mixed = None, False
        if first:
            self._switch.invalidate_weights()
        variant, wanted = (EAGER_VARIANT, False) if stage.eager else run.policy.next()
        self._switch.select(stage.phase, variant, weights_frozen=stage.weights_frozen)
        if not run.is_freed:  # not when the last step ends, because its outputs still need their compiled code
            self._free_unused()
        looks_up, self._stage_is_new = first or self._stage_is_new, False
        self._search.in_step = True
        if looks_up or self._search.records_methods:
            self._search.step_begins(stage.phase, first=looks_up, eager=variant.config is None)
        if self.gpu.on_gpu:
            self.gpu.step_begins(stage.phase, variant)
        self._step = None
        if stage.eager:
            return False
        self._step = step = Step(
            variant=variant,
            first=first,
            wanted=wanted,
            began=clock.seconds(),
            compiles=ran.compiles,
            graphs_before=ran.graphs,
        )
        recorder.step = run.times.number + 1
        if self._helper is not None:
            self._helper.poll()
        run.begin_step(step)
        return step.span is not None

    def after_backward(self) -> None:
        """Copy the gradients out of the memory of CUDA graphs, because they outlive the step."""
        config = self._step.variant.config if self._step is not None else None
        if self.gpu.on_gpu and config is not None and config.uses_cudagraphs:
            self.gpu.keep_gradients()

    def step_ends(self, loader: str, batch: Any, accumulated: str = "") -> None:
        """End a step, and give its time to the policy."""
        stage, step, recorder, search = self.stage, self._step, self._recorder, self._search
        recorder.step, search.in_step = None, False
        if search.called:
            search.step_ends()
        if self.gpu.on_gpu:
            self.gpu.step_ends()
        if step is None:
            return
        ran, run = recorder.executions, self._phases[stage.phase]
        kind: StepKind = "eager" if ran.graphs == step.graphs_before else "compiled"
        if step is self._counted and kind == step.kind and ran.compiles == step.compiles:
            run.times.number += 1
            run.times.last.steps += 1
            return
        step.kind, step.mixed = kind, ran.mixed
        if ran.compiles != step.compiles:
            recorder.collect()
            step.compiling = True
        if self.gpu.on_gpu:
            self.gpu.free_cached(stage.phase, compiled=step.variant.config is not None)
        run.end_step(step, stage, loader, batch, accumulated)
        waits = self._requests is not None and self._requests.active
        if not (step.wanted or waits or step.compiling):
            self._counted = Step(variant=step.variant, compiles=ran.compiles, kind=kind)

    def stage_ends(self, phase: Phase) -> None:
        """End a stage: synchronize decisions with other ranks, and issue warnings."""
        self._phases[phase].policy.stage_ends()
        self._phases[phase].is_freed = False
        self._free_unused()
        self.check(phase)

    def check(self, phase: Phase) -> None:
        """Warn once about each target that ran uncompiled in a phase, and about slow steps."""
        run, sharded = self._phases[phase], _torch.distributed.is_sharded(self.module)
        self._recorder.collect()
        self._tell(findings.of_stage(run, self._switch, finds_targets=self._finds_targets, sharded=sharded))

    def check_run(self) -> None:
        """Warn at the end of a run about slow steps, and about targets that no step called."""
        for run in self._phases.values():
            self._tell(findings.slow_steps(run))
        if self._phases["train"].times.number and not self._finds_targets:
            self._tell(findings.never_called(self._switch))

    # ------------------------------------------------------------------------------------------ results

    def report(self, *, details: bool = True) -> CompileReport:
        """Return the report of this process so far.

        ``details`` synchronizes the GPU, and computes all figures. Without it, each figure is computed when it is read,
        because `CompileReport.scalars` needs few of them during a stage.
        """
        self._recorder.collect()
        for run in self._phases.values() if details else ():
            run.times.synchronize()
        facts = {
            phase: PhaseFacts(
                phase=phase,
                settings=run.settings,
                target_labels={target.name: target.label for target in self._reported_targets(phase)},
                recorder=self._recorder,
                timer=run.times,
                memory=run.memory,
                waits=self._requests is not None and self._requests.waits(phase, None),
                trials=tuple(trial.to_dict() for trial in run.policy.reported),
            )
            for phase, run in self._phases.items()
        }
        report = CompileReport(facts=facts)
        return CompileReport.from_dict(report.to_dict()) if details else report

    # ------------------------------------------------------------------------------------------ parts of the above

    def _tell(self, found: Iterable[findings.Finding]) -> None:
        """Record each finding, unless an event of its kind has a reason already, and warn once."""
        for code, message, about, event in found:
            if event is not None:
                kind, key, reason = event
                if not any(event.reason for event in self._recorder.events_of(key, kind)):
                    self._recorder.record(kind, key, reason=reason, code=code or None)
            if message:
                self._warn.warn(code, message, about=about)

    def _helper_failed(self, problem: str, keys: Collection[CompileKey]) -> None:
        reason = f"the helper process that compiles in the background failed: {problem}"
        for key in keys:
            self._recorder.record("fallback", key, reason=reason, code="CC308")
        remedy = "The steps whose code is not loaded yet run eagerly; background=False compiles in this process"
        self._warn.warn("CC308", f"{reason}. {remedy}")

    def _free_unused(self) -> None:
        """Free the compiled code of variants that will not run again."""
        for phase, run in self._phases.items():
            if not run.is_freed:
                # torch frees the memory pool with the last CUDA graph, even if gradients are still in the pool.
                self.after_backward()
                self._switch.free_other_variants(phase, run.policy.alive, on_trial=run.policy.chosen is None)
                run.is_freed = True

    def _record(self, phase: Phase, kind: str, reason: str) -> None:
        names = ", ".join(target.name for target in self._switch.targets) or "the module"
        self._recorder.record(kind, CompileKey(names, phase), reason=reason)

    def _reported_targets(self, phase: Phase) -> Sequence[Target]:
        """Return the targets for the report of a phase: named targets, or the targets that compiled steps called."""
        called = self._switch.called_targets(phase)
        return [target for target in self._switch.targets if not self._finds_targets or target.name in called]

    def _check_cache(self) -> None:
        self._tell(findings.unused_cache(self._recorder.events))

    def _save_record(self) -> None:
        if self._model_record is not None:
            for phase, varying in self._switch.observed.state().items():
                self._model_record.update("shapes", phase, varying)
            for phase, seconds in self._recorder.progress.state().items():
                self._model_record.update("compile_seconds", phase, seconds)
