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
from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks._utils.phases import EAGER, PHASES, Phase
from compile_callbacks.background.helper import Helper
from compile_callbacks.cache.folder import ModelRecord, facts_of_run, model_fingerprint, use_cache
from compile_callbacks.calls.phase_switch import PhaseSwitch
from compile_callbacks.calls.target_search import TargetSearch
from compile_callbacks.config.inductor_config import EAGER_VARIANT
from compile_callbacks.graphs.requests import RequestQueue
from compile_callbacks.profiling import clock
from compile_callbacks.profiling.events import CompileKey
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
from compile_callbacks.tuning.contest import Conditions
from compile_callbacks.tuning.tune import Tune


class Session:
    """Compiles the targets of one module, and measures both phases over any number of Trainer runs."""

    def __init__(
        self,
        module: nn.Module,
        targets: Sequence[Target],
        arguments: CompileArguments,
        *,
        resolve: Callable[[], Sequence[Target]] | None = None,
        print_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.module, self._warn = module, WarnOnce()
        requests = RequestQueue()
        settings = replace(arguments.target_settings, requests=requests)
        self._arguments = arguments = replace(arguments, target_settings=settings)
        self._helper = Helper(requests, self._helper_failed) if arguments.background and arguments.compiles else None
        # torch keeps a reference to an active recorder, so the recorder must not keep the session and its module alive.
        self._recorder = CompileRecorder(print_line=print_line, mode_arguments=arguments.mode_arguments)
        self._switch = PhaseSwitch(
            targets, uncompiled=arguments.uncompiled, recorder=self._recorder, settings=settings, warn=self._warn
        )
        self._phases = {
            phase: PhaseRun(phase, config, module, self._recorder, requests, print_line)
            for phase, config in arguments.configs.items()
        }
        finds_targets = resolve is not None and arguments.targets is None
        searched = {*PHASES} - arguments.uncompiled if finds_targets else ()
        self._search = TargetSearch(module, self._switch, self._warn, searched=searched, resolve=resolve)
        self.gpu, self.stage = StepsOnGpu(module), Stage()
        self._step: Step | None = None  # the running step, if it is measured
        self._undo: contextlib.ExitStack | None = None  # ends the Trainer run, without references to the module

    def begin(self, conditions: Conditions) -> None:
        """Begin a Trainer run, and install the targets."""
        undo = self._undo = contextlib.ExitStack()
        arguments, settings, recorder = self._arguments, self._arguments.target_settings, self._recorder
        device = device_of(self.module)
        sharded = WEIGHTS_ARE_SHARDED if _torch.dynamo.is_sharded(self.module) else None
        recorder.stopping = conditions.stopping
        self.gpu.begin(device)
        record, requests, in_background = None, settings.requests, self._helper is not None
        requests.in_run, requests.failure, requests.takes_trials = in_background, None, conditions.ranks == 1
        if arguments.compiles:
            self._tell(findings.at_begin())
            _torch.dynamo.validate_arguments(restores=False)
            undo.callback(_torch.dynamo.validate_arguments, restores=True)
            if not in_background:  # otherwise, while the helper process compiles, and not in a short run
                recorder.executions.import_seconds += _torch.inductor.import_inductor()
        if arguments.compiles and settings.cache_dir:
            if problem := use_cache(settings.cache_dir, undo):
                self._warn.warn("CC401", problem)
            model, targets = model_fingerprint(self.module), arguments.targets or ()
            path = settings.cache_dir / f"model-{model}.json"
            facts = facts_of_run(model, targets, settings.passes, conditions.precision, device, conditions.ranks)
            record = ModelRecord(path, facts, read_only=bool(conditions.rank or problem))
            self._switch.observed.restore(record.load()["shapes"])
        recorder.listen()
        undo.callback(recorder.stop)
        self._switch.install()
        conditions = conditions._replace(device=device, devices=self._switch.devices, sharded=sharded, record=record)
        conditions = conditions._replace(baseline_steps=arguments.baseline_steps, in_background=in_background)
        for phase, run in self._phases.items():
            run.begin(conditions._replace(shapes=functools.partial(self._switch.observed.shares, phase)))
            self._settle(run)

    def end(self, *, keep_compiled: bool = False) -> None:
        """End the Trainer run, and restore the module unless ``keep_compiled`` is set."""
        undo, self._undo = self._undo or contextlib.ExitStack(), None
        self._recorder.stopping = lambda: False  # because the trainer stays interrupted after an exception
        requests, runs = self._arguments.target_settings.requests, self._phases
        with undo:  # calls each action, the last one first, even if another action raises
            if keep_compiled:
                for run in runs.values():
                    run.end_baseline()
                undo.callback(self._switch.select_by_grad_mode, {phase: run.chosen for phase, run in runs.items()})
                undo.callback(requests.end_run)
            else:
                undo.callback(self._switch.remove)
            undo.callback(self._save_record)
            undo.callback(self._search.remove)
            undo.callback(self.gpu.end)
            undo.callback(self._helper.stop if self._helper is not None else lambda: None)
        for run in runs.values():
            run.conditions = run.conditions._replace(of_rank_zero=lambda value: value)  # refers to the trainer
        if keep_compiled and self._arguments.compiles:
            _torch.dynamo.validate_arguments(restores=False)  # because guards of compiled code check this setting
            for phase in [phase for phase, run in runs.items() if run.decision is None]:
                message = f"keep_compiled leaves the {phase} phase eager, because its Tune has chosen no candidate yet"
                self._warn.warn("CC204", message, about=(phase, "keep_compiled"))

    def discard(self) -> None:
        """End the run, and free the memory of compiled code."""
        self.end()
        self._switch.free_compiled()

    def stage_begins(self, stage: Stage, remaining: Mapping[Phase, float]) -> None:
        """Plan for the ``remaining`` steps of each phase, and begin or continue a stage. Do not measure its step."""
        for phase, steps in remaining.items():
            if steps:  # otherwise, a later call may run the phase
                self._phases[phase].plan(steps)
        self._search.step_ends()
        self.stage, self._step = stage, None
        run = self._phases[stage.phase]
        variant = EAGER_VARIANT if stage.eager else run.next()[0]
        self._switch.select(stage.phase, variant, weights_frozen=stage.weights_frozen)

    def step_begins(self, *, first: bool = False) -> bool:
        """Begin a step, and select its variant. Return whether the step is timed."""
        # Most steps of a long run are only counted, so these lines do as little as possible. The compiles are compared
        # here, too, because the user may compile between two steps.
        step, ran = self._step, self._recorder.executions
        if step and (times := step.repeats) and not first and times.last.untimed and ran.compiles == step.before[0]:
            times.last.untimed -= 1
            ran.step, step.start, step.before = times.number + 1, clock.seconds(), (ran.compiles, ran.graphs)
            if self.gpu.on_gpu:
                self.gpu.step_begins(self.stage.phase, step.variant)
            return False
        self._step, stage, run = None, self.stage, self._phases[self.stage.phase]
        if first:  # a callback may have swapped the weights
            self._switch.invalidate_weights()
        variant, wanted = (EAGER_VARIANT, False) if stage.eager else run.next()
        self._switch.select(stage.phase, variant, weights_frozen=stage.weights_frozen)
        if run.settled != (run.decision, run.turn):  # not before, because outputs of the last step need their code
            self._settle(run)
        ran.step = run.times.number + 1
        looks_up = first or stage.phase != self._search.phase
        if looks_up or self._search.records_methods:
            self._search.step_begins(stage.phase, first=looks_up, eager=variant.config is None)
        if self.gpu.on_gpu:
            self.gpu.step_begins(stage.phase, variant)
        if stage.eager:
            return False
        self._step = step = Step(variant=variant, first=first, before=(ran.compiles, ran.graphs), start=clock.seconds())
        if self._helper is not None:
            captures, ranks = variant.config is not None, run.conditions.ranks
            ran.import_seconds += self._helper.poll(captures=captures, ranks=ranks)
        run.times.begin(step, run.conditions.device, wanted=wanted)
        return step.timed_on is not None

    def keep_gradients(self) -> None:
        """Copy the gradients out of the memory of CUDA graphs, because they outlive the step."""
        config = self._step.variant.config if self._step is not None else None
        if self.gpu.on_gpu and config is not None and config.uses_cudagraphs:
            self.gpu.keep_gradients()

    def step_ends(self, batch: Any, describe: Callable[..., tuple[str, str]], *arguments: Any) -> None:
        """End a step. If it is measured, ``describe(*arguments)`` returns its loader, and how it accumulates."""
        step, ran = self._step, self._recorder.executions
        ran.step = None
        if self._search.called:
            self._search.step_ends()
        if self.gpu.on_gpu:
            self.gpu.step_ends()
        if step is None:
            return
        kind: StepKind = "eager" if ran.graphs == step.before[1] else "compiled"
        if (times := step.repeats) and kind == step.kind and ran.compiles == step.before[0]:
            times.number += 1
            times.last.steps += 1
            return
        step.kind, run = kind, self._phases[self.stage.phase]
        if ran.compiles != step.before[0]:
            self._recorder.collect()
            step.compiling = True
            self.gpu.free_cached()
        run.end_step(step, self.stage, batch, *describe(*arguments))
        if is_changed := run.settled != (run.decision, run.turn):
            # torch frees the memory pool with the last CUDA graph, even if gradients are still in the pool.
            self.keep_gradients()
        self._step, wanted = None, run.turn is not None and run.next()[1]
        if not (is_changed or wanted or step.compiling or self._arguments.target_settings.requests.active):
            self._step = Step(variant=step.variant, before=(ran.compiles, 0), kind=kind, repeats=run.times)

    def check(self, phase: Phase | None = None) -> None:
        """At the end of a stage, or of the run, warn once about targets that ran uncompiled, and about slow steps."""
        self._recorder.collect()
        switch, finds_targets = self._switch, bool(self._search.searched)
        if phase is None:
            self._tell(findings.of_run(self._phases["train"], switch, finds_targets=finds_targets))
        else:
            self._tell(findings.of_stage(self._phases[phase], switch, finds_targets=finds_targets))
            self._tell(findings.slow_steps(phase, self.report(details=False).phase(phase)))

    def report(self, *, details: bool = True) -> CompileReport:
        """Return the report so far. With ``details``, wait for the GPU, and compute figures before they are read."""
        self._recorder.collect()
        facts: dict[Phase, PhaseFacts] = {}
        for phase, run in self._phases.items():
            if details:
                run.times.synchronize()
            called, requests = self._switch.called_targets(phase), self._arguments.target_settings.requests
            trials = run.trials.values() if isinstance(run.settings, Tune) and run.times.number else ()
            settings = run.chosen.config or (None if run.decision else run.settings)
            facts[phase] = PhaseFacts(
                phase=phase,
                mode=settings.describe() if settings else EAGER,
                mode_reason=run.chosen.reason,
                target_labels={target.name: target.label for target in self._switch.targets if target.name in called},
                recorder=self._recorder,
                phase_times=run.times,
                waits=requests.waits(phase, None),
                trials=tuple(trial.to_dict() for trial in trials),
            )
        report = CompileReport(facts=facts)
        return CompileReport.from_dict(report.to_dict()) if details else report

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

    def _settle(self, run: PhaseRun) -> None:
        """Act on a decision: warn about settings without effect, and free compiled code that will not run again."""
        run.settled = run.decision, run.turn
        found = findings.without_effect(run, self._arguments.mode_arguments[run.phase])
        warns = run.conditions.rank == 0  # for all ranks
        self._tell(each if warns else each._replace(message="") for each in found)
        self._switch.free_other_variants(run.phase, run.alive, on_trial=run.decision is None)
        self.gpu.free_cached(again=True)

    def _save_record(self) -> None:
        if (record := self._phases["train"].conditions.record) is not None:
            self._recorder.collect()
            events = self._recorder.events
            used = record.read_only or any(event.cache_hits or event.cache_misses for event in events)
            if not used and any(event.graphs for event in events):
                message = "cache_dir has no effect: torch did not use its cache, which is disabled or bypassed"
                self._warn.warn("CC204", message, about="cache_dir")
            for phase, varying in self._switch.observed.state().items():
                record.update("shapes", phase, varying)
