"""One module, compiled and measured: what the callback's hooks act on. No Lightning in it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks.compiling.cudagraphs import LastingGradients
from compile_callbacks.compiling.errors import CompileError
from compile_callbacks.compiling.once import WarnOnce
from compile_callbacks.compiling.region_settings import RegionSettings
from compile_callbacks.compiling.sharding import is_sharded
from compile_callbacks.compiling.switch import PhaseSwitch
from compile_callbacks.compiling.targets import Compiled, Scope
from compile_callbacks.devices.placement import device_of
from compile_callbacks.links import see
from compile_callbacks.measuring.baseline import Baseline
from compile_callbacks.measuring.events import CompileRecorder, EventKind, Owner
from compile_callbacks.measuring.memory import PeakMemory
from compile_callbacks.measuring.progress import CompileProgress
from compile_callbacks.measuring.timing import StepTimer
from compile_callbacks.measuring.watch import Watch
from compile_callbacks.phases import PHASES, Phase
from compile_callbacks.processes.meetings import Meetings
from compile_callbacks.reporting.advice import Advisor
from compile_callbacks.reporting.costs_store import CostsStore
from compile_callbacks.reporting.idle import (
    differing_blocks,
    idle_cache_dir,
    idle_cudagraphs,
    idle_folding,
    idle_freezing,
    limits_reached,
    why_uncompiled,
)
from compile_callbacks.reporting.report import CompileReport, PhaseReport, build_phase_report
from compile_callbacks.reporting.slowest import Figures, figures_of, with_slowest
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.settings.tune import Settings, Tune
from compile_callbacks.tuning.choices_store import Choice, ChoicesStore, circumstances
from compile_callbacks.tuning.tuning import PhaseTuning
from compile_callbacks.warm_start.warm_start import WarmStart


class CompileSession:
    """Compiles the targets of one module and measures both phases, over as many trainer runs as there are.

    Args:
        module: The root module.
        targets: What is compiled of it.
        configs: The settings by phase, or candidates for them; ``None`` leaves a phase eager.
        passes: Graph passes for both phases.
        baseline_steps: Eager samples wanted in each phase.
        settings: What to do on failures, differences from eager and new shapes.
        cache_dir: Where compile artifacts, and choices among candidates, are kept across runs.
        say: Takes a line of text while something compiles.
        scope: How the targets compile the module, where they compile all of it: to be compared with the other way.
    """

    def __init__(
        self,
        module: nn.Module,
        targets: Sequence[Compiled],
        configs: Mapping[Phase, Settings],
        *,
        passes: Sequence[Any] = (),
        baseline_steps: int = 0,
        settings: RegionSettings | None = None,
        cache_dir: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
        scope: Scope | None = None,
    ) -> None:
        self.module = module
        self._settings = dict(configs)
        self._meetings = Meetings(say)
        self._warn = WarnOnce(self._meetings.warn_elsewhere)
        keeps = cache_dir is not None and any(configs.values())
        self._warm_start = WarmStart(cache_dir, configs, passes, self._warn) if cache_dir and keeps else None
        tunes = {phase: given for phase, given in configs.items() if isinstance(given, Tune)}
        self._configs: dict[Phase, InductorConfig | None] = {
            phase: given if isinstance(given, InductorConfig) else None for phase, given in configs.items()
        }
        self._progress = CompileProgress(say)
        # Torch knows the recorder as long as it listens, which is not to keep the session and its module.
        self._recorder = CompileRecorder(
            on_start=_while_there(self._compile_begins), on_end=_while_there(self._compile_ends)
        )
        self._timer = StepTimer()
        self._memory = PeakMemory()
        self._switch = PhaseSwitch(
            targets,
            self._configs,
            passes=passes,
            recorder=self._recorder,
            settings=settings,
            meetings=self._meetings,
        )
        self._meetings.on_failure = self._switch.give_up
        # What comes from other processes ends with a link already.
        self._meetings.on_warning = functools.partial(self._warn, entry="processes-do-not-meet")
        self._meetings.on_fatal = _raise
        # A phase that is tuned measures eager steps among those of its candidates.
        self._baselines = {phase: Baseline(baseline_steps if config else 0) for phase, config in self._configs.items()}
        self._tunings = {
            phase: PhaseTuning(
                phase,
                tune,
                switch=self._switch,
                recorder=self._recorder,
                timer=self._timer,
                say=say,
                gather=self._meetings.gather,
            )
            for phase, tune in tunes.items()
        }
        self._choices = ChoicesStore(cache_dir / "choices") if cache_dir else None
        self._scope = scope
        # Parts of sharded weights share graphs whatever the targets are.
        self._advisor = Advisor(
            module, None if is_sharded(module) else scope, CostsStore(cache_dir / "costs") if cache_dir else None
        )
        self._made_for: dict[tuple[Phase, str], dict[str, str]] = {}
        self._say = say
        self._passes = tuple(passes)
        self._precision = ""
        self._target_names = tuple(target.name for target in targets)
        self._lasting_gradients = LastingGradients()
        self._before: CompileReport | None = None
        self._running = False
        self._phase: Phase = "train"
        self._compiled = False
        self._frozen = False
        self._cuda = False
        self._seen_before_step = (0, 0)
        self._measured = self._first = False
        self._of_ranks: Sequence[Figures] = ()
        self._watch = Watch(self._recorder, self._timer)

    # ------------------------------------------------------------------------------------------ a trainer run

    @property
    def running(self) -> bool:
        """Whether a trainer run is under way."""
        return self._running

    def begin(self, expected_steps: Mapping[Phase, float], *, precision: str = "", together: bool = False) -> None:
        """A trainer run begins: compile in place, and plan the baselines.

        Args:
            expected_steps: Steps to come by phase, ``math.inf`` where that is not known.
            precision: The trainer's precision.
            together: Whether all processes of the process group, if there is one, begin the same run here.
        """
        self._running = True
        self._cuda = _on_cuda(self.module)
        self._meetings.begin(device_of(self.module), together=together and any(self._settings.values()))
        steps_of_ranks = self._meetings.gather(dict(expected_steps))
        expected_steps = {
            phase: min((steps[phase] for steps in steps_of_ranks), default=own) for phase, own in expected_steps.items()
        }
        self._warn_of_idle_settings()
        if self._warm_start is not None:
            self._warm_start.begin(self.module)
        self._recorder.listen()
        self._switch.install()
        for phase, steps in expected_steps.items():
            self._baselines[phase].plan(steps)
        self._precision = precision
        for phase, tuning in self._tunings.items():
            store = self._choices if self._meetings.speaks else None
            tuning.begin(device_of(self.module), expected_steps.get(phase, 0), store)
            self._configs[phase] = tuning.config

    def end(self, *, keep_compiled: bool = False) -> None:
        """The trainer run is over: the module is an ordinary one again, unless it is to stay compiled."""
        self._running = False
        self._recorder.stop()
        self._timer.abandon()
        self._keep_artifacts()
        if self._choices is not None and self._meetings.speaks:
            self._keep_costs()
        if self._warm_start is not None:
            for message in idle_cache_dir(self._warm_start, self._recorder):
                self._warn("cache_dir", message, "nothing-to-keep")
        if keep_compiled:
            for tuning in self._tunings.values():
                tuning.settle("the run ended before all steps were taken")
            self._switch.select_by_grad_mode()
        else:
            self._switch.remove()

    def begin_by_grad_mode(self, *, weights_stand_still: bool = False, found_from_module: bool = True) -> None:
        """Compile in place for a loop without a trainer: each call tells its phase by the grad mode.

        Args:
            weights_stand_still: Whether nobody trains meanwhile, so that weights may be baked in.
            found_from_module: Whether `report_of` and `restore` are to find this session.
        """
        self.begin({})
        if found_from_module:
            self._switch.belongs_to(self)
        self._switch.select_by_grad_mode(frozen=weights_stand_still)

    def admit_shapes(self, args: Any, kwargs: Any) -> None:
        """Have inference with inputs of these shapes compile, whatever new shapes do."""
        for region in self._switch.regions("infer"):
            region.admit_shapes(args, kwargs)

    def free_compiled(self) -> None:
        """Give back the memory that compiled code takes; what is called again is compiled again."""
        self._switch.free_compiled()

    def listeners_end(self) -> Callable[[], None]:
        """What ends listening to torch once the module is gone, or the process; it does not keep the module."""
        recorder, trace_settings, warm_start = self._recorder, self._switch.trace_settings, self._warm_start

        def end() -> None:
            recorder.stop()
            if warm_start is not None:
                warm_start.save()
            trace_settings.remove()

        return end

    # ------------------------------------------------------------------------------------------ stages and steps

    def enter(self, phase: Phase, *, weights_stand_still: bool = False) -> None:
        """A stage of this phase begins or goes on; it runs compiled until a step says otherwise.

        Args:
            phase: The phase.
            weights_stand_still: Whether nobody trains meanwhile, so that weights may be baked in.
        """
        self._phase = phase
        self._frozen = weights_stand_still
        self._select(compiled=True)

    def expect(self, phase: Phase, steps: float) -> None:
        """Tell how many steps of a phase the run has, where that was not known when it began."""
        if (tuning := self._tunings.get(phase)) is not None:
            tuning.expect(min(self._meetings.gather(steps), default=steps))

    def step_begins(self, *, first: bool = False, measured: bool = True) -> None:
        """A batch begins.

        Args:
            first: Whether it is the first of its stage: whatever swaps weights for a stage has done so by now.
            measured: Whether its time may be a sample, and whether it may be an eager step of the baseline.
        """
        if first:
            self._switch.suspect_weights()
        if self._settings[self._phase] is not None:
            self._meetings.step_begins()
        self._measured, self._first = measured, first
        if (tuning := self._tunings.get(self._phase)) is not None:
            self._configs[self._phase] = tuning.step_begins(measured=measured)
        self._select(compiled=not (measured and self._baselines[self._phase].running))
        self._seen_before_step = self._recorder.compiles_seen, self._recorder.traces_seen
        if self._cuda:
            torch.compiler.cudagraph_mark_step_begin()
            if measured:
                self._memory.start(self._phase, compiled=self._compiled, settings=self._candidate)
        if measured:
            self._timer.start(cuda=self._cuda)

    def backward_begins(self) -> None:
        """A backward pass is to follow, at whose end processes reduce their gradients."""
        self._meetings.before_backward()

    def gradients_ready(self, *, kept: bool) -> None:
        """A backward pass is done.

        Args:
            kept: Whether the gradients may outlive the step, as in an accumulation.
        """
        config = self._configs["train"]
        if kept and self._compiled and config is not None and config.uses_cudagraphs:
            self._lasting_gradients.keep(self.module.parameters())

    def step_ends(self, work: Hashable) -> None:
        """A batch ends.

        Args:
            work: What was to be done in it; steps of equal work are compared.
        """
        compiles_before, traces_before = self._seen_before_step
        disturbed = self._meetings.disturbed or self._recorder.compiles_seen != compiles_before
        self._meetings.step_ends()
        tuning = self._tunings.get(self._phase)
        sample = self._timer.stop(
            self._phase,
            compiled=self._compiled,
            # A stage's first batch finds weights to be folded anew, and with frozen weights other code runs.
            work=work if tuning is None else (work, self._first, self._frozen),
            disturbed=disturbed,
            settings=self._candidate,
        )
        if self._cuda:
            self._memory.stop(traced=self._recorder.traces_seen != traces_before)
        baseline = self._baselines[self._phase]
        if baseline.running and not self._compiled and (samples := self._meetings.gather(sample)):
            baseline.step(sample=all(samples))
        if tuning is not None:
            config = self._configs[self._phase]
            if tuning.winner is None and config is not None and config.uses_cudagraphs:
                # Torch frees the memory of CUDA graphs with the last of them, tensors that are still in it or not.
                self._lasting_gradients.keep(self.module.parameters())
            tuning.step_ends(
                measured=self._measured, sample=sample, made_for=functools.partial(self._circumstances, work)
            )
            self._configs[self._phase] = tuning.config
        self._select(compiled=True)

    def leave(self, phase: Phase) -> None:
        """A stage of this phase ends: say what ran and was not compiled, unless that has been said."""
        self._recorder.collect()
        for owner, message in limits_reached(self._recorder):
            if not self._is_tried(owner):
                self._warn((owner, "limit"), message, "recompile-limit")
        for region in self._switch.regions(phase):
            if region.ran and not region.on_trial and (why := why_uncompiled(region.owner, self._recorder)):
                self._warn(region.owner[:2], why, "no-compiled-graph")
            if self._scope == "repeated" and region.blocks_differ and not region.on_trial:
                message = differing_blocks(region.owner, self._recorder)
                self._warn((region.owner[:2], "blocks"), message, "repeated-blocks-differ")
        for message in idle_folding(phase, self._configs[phase], self._recorder):
            self._warn((phase, "fold"), message, "nothing-is-folded")
        self._judge(phase)
        self._keep_artifacts()
        self._of_ranks = self._meetings.gather_at_end_of_stage(self._own_figures())

    # ------------------------------------------------------------------------------------------ what was measured

    def report(self) -> CompileReport:
        """What was measured so far; of several processes, by the slowest at the end of each stage."""
        phases = {phase: with_slowest(of_phase, phase, self._of_ranks) for phase, of_phase in self._own().items()}
        phases = {
            phase: replace(report, advice=self._advisor.advise(report, self._costs_made_for(phase)))
            for phase, report in phases.items()
        }
        artifacts = self._warm_start.report() if self._warm_start else None
        return CompileReport(train=phases["train"], infer=phases["infer"], artifacts=artifacts, before=self._before)

    def _own(self) -> dict[Phase, PhaseReport]:
        """What this process measured."""
        self._recorder.collect()
        return {
            phase: build_phase_report(
                phase,
                settings,
                self._switch.targets,
                self._recorder,
                self._timer,
                self._memory,
                trials=self._tunings[phase].trials() if phase in self._tunings else (),
            )
            for phase, settings in self._settings.items()
        }

    def _own_figures(self) -> Figures:
        return {phase: figures_of(report) for phase, report in self._own().items()} if self._meetings.size > 1 else {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know, as plain data: the report, the baseline's samples, and what was chosen."""
        baselines = {phase: {w: list(ms) for w, ms in self._timer.baseline(phase).items()} for phase in PHASES}
        return {
            "report": self.report().to_dict(),
            "baselines": baselines,
            "device": self._device_name(),
            "choices": {phase: choice for phase, tuning in self._tunings.items() if (choice := tuning.choice())},
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier run's `state_dict`: its baseline is not measured again on the same device."""
        self._before = CompileReport.from_dict({**state["report"], "before": None})
        if state["device"] != self._device_name():
            return
        for phase, choice in state.get("choices", {}).items():  # states before `Tune` have none
            if phase in self._tunings:
                found = Choice(candidate=choice["candidate"], key=choice["key"])
                self._tunings[phase].recall(choice["fingerprint"], found)
        for phase in PHASES:
            self._timer.restore(phase, state["baselines"][phase])
            if state["baselines"][phase]:
                self._baselines[phase].skip()

    def judge(self) -> None:
        """Warn where compiled steps turn out slower than eager ones, and of the cause."""
        for phase in PHASES:
            self._judge(phase)

    # ------------------------------------------------------------------------------------------ what these call

    def _compile_begins(self, owner: Owner) -> None:
        self._meetings.compile_begins()
        self._progress.compile_begins(owner)

    def _compile_ends(self) -> None:
        self._progress.compile_ends()
        self._meetings.compile_ends()

    def _select(self, *, compiled: bool) -> None:
        self._compiled = compiled and self._configs[self._phase] is not None
        self._switch.select(self._phase, compiled=compiled, frozen=self._frozen)

    def _keep_artifacts(self) -> None:
        if self._warm_start is not None:
            self._warm_start.save()

    def _keep_costs(self) -> None:
        report = self.report()
        for phase in PHASES:
            if problem := self._advisor.keep(report.phase(phase), self._costs_made_for(phase)):
                self._say(f"{phase} phase: what compiling cost could not be kept for later runs: {problem}")

    def _costs_made_for(self, phase: Phase) -> dict[str, str] | None:
        """What a phase's figures hold for, where they are to be kept."""
        config, work = self._settings.get(phase), self._timer.times(phase).work
        if self._choices is None or not isinstance(config, InductorConfig) or work is None:
            return None  # nothing is kept, or several candidates were measured, or no steps
        if (phase, work) not in self._made_for:
            self._made_for[phase, work] = circumstances(
                self.module,
                phase=phase,
                tune_key=config.key(),
                passes=self._passes,
                targets=(),
                work=work,
                precision=self._precision,
                device=device_of(self.module),
                processes=self._meetings.size,
            )
        return self._made_for[phase, work]

    @property
    def _candidate(self) -> str | None:
        """The candidate that the step runs with, where the phase is tuned."""
        tuning = self._tunings.get(self._phase)
        return tuning.in_force if tuning is not None else None

    def _is_tried(self, owner: Owner) -> bool:
        """Whether something happened to a candidate that is not chosen, and is told of in the report alone."""
        return owner.phase in self._tunings and owner.settings != self._tunings[owner.phase].winner

    def _warn_of_idle_settings(self) -> None:
        shared, sharded = self._switch.shares_graphs, is_sharded(self.module)
        for phase, config in self._configs.items():
            for message in idle_freezing(phase, config, shared=shared, sharded=sharded):
                if self._warn((phase, "freezing"), message, "freezing-has-no-effect"):
                    self._note("fold", phase, message)
            for reason in idle_cudagraphs(phase, config, cuda=self._cuda):
                if self._warn((phase, "cudagraphs"), f"{reason}: they have no effect", "cuda-graphs-without-a-gpu"):
                    self._note("cudagraph_skip", phase, reason)

    def _note(self, kind: EventKind, phase: Phase, reason: str) -> None:
        for target in self._target_names:
            self._recorder.add(kind, Owner(target, phase), reason=reason)

    def _judge(self, phase: Phase) -> None:
        tuning = self._tunings.get(phase)
        if tuning is None or tuning.winner is not None:
            for subject, message in self._watch.look(phase, tuning.in_force if tuning else None):
                self._warn(subject, message, "slower-than-eager")

    def _circumstances(self, work: Hashable) -> dict[str, str]:
        """What a choice holds for that is made in this phase and for this work."""
        return circumstances(
            self.module,
            phase=self._phase,
            tune_key=self._tunings[self._phase].tune.key(),
            passes=self._passes,
            targets=self._target_names,
            work=repr(work),
            precision=self._precision,
            device=device_of(self.module),
            processes=self._meetings.size,
        )

    def _device_name(self) -> str:
        """What step times are compared on."""
        name = torch.cuda.get_device_name() if _on_cuda(self.module) else "cpu"
        return name if self._meetings.size == 1 else f"{self._meetings.size} x {name}"


def _while_there(method: Callable[..., None]) -> Callable[..., None]:
    """A method that may be called after its object is gone, and does nothing then; it does not keep the object."""
    reference = weakref.WeakMethod(method)

    def call(*args: Owner) -> None:
        if (found := reference()) is not None:
            found(*args)

    return call


def _raise(message: str) -> None:
    raise CompileError(see(message, "the-compiler-failed"))


def _on_cuda(module: nn.Module) -> bool:
    return device_of(module).type == "cuda"
