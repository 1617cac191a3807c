"""`CompileSession`: what the callback's hooks, a loop without a Trainer and `InductorBackend` act on."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks.compiling.backward_thread import BackwardInCallingThread
from compile_callbacks.compiling.cudagraphs import LastingGradients, drop_overwritten_gradients
from compile_callbacks.compiling.errors import CompileError
from compile_callbacks.compiling.once import WarnOnce
from compile_callbacks.compiling.region_settings import RegionSettings
from compile_callbacks.compiling.sharding import is_sharded
from compile_callbacks.compiling.switch import PhaseSwitch
from compile_callbacks.compiling.targets import Compiled, Scope
from compile_callbacks.devices.device_description import device_name
from compile_callbacks.devices.placement import device_of
from compile_callbacks.links import see
from compile_callbacks.measuring.baseline import Baseline
from compile_callbacks.measuring.events import CompileRecorder, Owner
from compile_callbacks.measuring.memory import PeakMemory
from compile_callbacks.measuring.progress import CompileProgress
from compile_callbacks.measuring.timing import StepTimer
from compile_callbacks.measuring.work import Work, baseline_from_data
from compile_callbacks.phases import PHASES, Phase
from compile_callbacks.processes.meetings import Meetings
from compile_callbacks.reporting.report import CompileReport
from compile_callbacks.session.remeasuring import Remeasuring
from compile_callbacks.session.reports import SessionReports
from compile_callbacks.session.session_warnings import SessionWarnings
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.settings.tune import Settings, Tune
from compile_callbacks.tuning.choices_store import Choice, ChoicesStore
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
        warn = WarnOnce(self._meetings.warn_elsewhere)
        keeps = cache_dir is not None and any(configs.values())
        names = [target.name for target in targets]
        self._warm_start = WarmStart(cache_dir, configs, passes, names, warn) if cache_dir and keeps else None
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
            warn=warn,
        )
        self._meetings.on_failure = _while_there(self._switch.give_up)
        # What comes from other processes ends with a link already.
        self._meetings.on_warning = functools.partial(warn, entry="processes-do-not-meet")
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
        self._remeasuring = Remeasuring(
            module,
            baselines=self._baselines,
            tunings=self._tunings,
            timer=self._timer,
            memory=self._memory,
            meetings=self._meetings,
            say=say,
        )
        self._choices = ChoicesStore(cache_dir / "choices") if cache_dir else None
        self._say = say
        self._lasting_gradients = LastingGradients()
        self._backward_thread = BackwardInCallingThread()
        self._running = False
        self._phase: Phase = "train"
        self._compiled = False
        self._frozen = False
        self._cuda = self._several_devices = False
        self._seen_before_step = (0, 0)
        self._measured = self._first = False
        self._reports = SessionReports(
            module,
            self._settings,
            passes,
            switch=self._switch,
            recorder=self._recorder,
            timer=self._timer,
            memory=self._memory,
            tunings=self._tunings,
            meetings=self._meetings,
            warm_start=self._warm_start,
            cache_dir=cache_dir,
            scope=scope,
        )
        self._warnings = SessionWarnings(
            warn,
            switch=self._switch,
            recorder=self._recorder,
            timer=self._timer,
            tunings=self._tunings,
            scope=scope,
        )

    # ------------------------------------------------------------------------------------------ a trainer run

    @property
    def running(self) -> bool:
        """Whether a trainer run is under way."""
        return self._running

    def begin(self, *, precision: str = "", together: bool = False) -> None:
        """A trainer run begins: compile in place.

        Args:
            precision: The trainer's precision.
            together: Whether all processes of the process group, if there is one, begin the same run here.
        """
        self._running = True
        self._cuda = _on_cuda(self.module)
        self._several_devices = len({weight.device for weight in self.module.parameters()}) > 1
        self._meetings.begin(device_of(self.module), together=together and any(self._settings.values()))
        self._warnings.of_settings(self._configs, sharded=is_sharded(self.module), cuda=self._cuda)
        if self._warm_start is not None:
            self._warm_start.begin(self.module, self._meetings.gather)
        self._recorder.listen()
        self._remeasuring.begin()
        self._switch.install()
        self._reports.precision = precision
        for phase, tuning in self._tunings.items():
            tuning.begin(device_of(self.module), self._choices if self._meetings.speaks else None)
            self._configs[phase] = tuning.config

    def end(self, *, keep_compiled: bool = False) -> None:
        """The trainer run is over: the module is an ordinary one again, unless it is to stay compiled."""
        self._running = False
        self._backward_thread.end()  # an exception ends a run within a step
        if self._cuda:
            drop_overwritten_gradients(self.module.parameters())
        self._meetings.end()
        self._recorder.stop()
        self._timer.abandon()
        if self._warm_start is not None:
            self._warm_start.end()
        self._reports.keep_costs(self._say)
        if self._warm_start is not None:
            self._warnings.of_cache_dir(self._warm_start)
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
        self.begin()
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
                warm_start.end()
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

    def expect(self, steps: Mapping[Phase, float], seconds: float = math.inf) -> None:
        """Plan the baselines and what is tried out, by the steps to come; what is planned already stays.

        Args:
            steps: Steps to come by phase, ``math.inf`` where that is not known.
            seconds: When the run ends by the clock.
        """
        of_ranks = self._meetings.gather((dict(steps), seconds)) or [(dict(steps), seconds)]
        for phase in steps:
            least = min(of_rank[phase] for of_rank, _ in of_ranks)
            self._baselines[phase].plan(least)
            self._remeasuring.expect(phase, least)
            if (tuning := self._tunings.get(phase)) is not None:
                tuning.expect(least, min(seconds for _, seconds in of_ranks))
                self._configs[phase] = tuning.config

    def step_begins(self, *, first: bool = False, measured: bool = True, loader: int = 0) -> None:
        """A batch begins.

        Args:
            loader: The number of its loader among those of the stage.
            first: Whether it is the first of its stage: whatever swaps weights for a stage has done so by now.
            measured: Whether its time may be a sample, and whether it may be an eager step of the baseline.
        """
        if first:
            self._switch.suspect_weights()
        if self._settings[self._phase] is not None:
            self._meetings.step_begins(loader)
        self._measured, self._first = measured, first
        if (tuning := self._tunings.get(self._phase)) is not None:
            self._configs[self._phase] = tuning.step_begins(measured=measured)
        self._select(compiled=not (measured and self._baselines[self._phase].running))
        self._seen_before_step = self._recorder.compiles_seen, self._recorder.traces_seen
        if self._cuda:
            torch.compiler.cudagraph_mark_step_begin()
            if self._compiled and self._phase == "train" and not self._several_devices:
                self._backward_thread.begin()
            if measured:
                self._memory.start(self._phase, compiled=self._compiled, settings=self._candidate)
        if measured:
            # What is still to be compared with something else needs all of its samples.
            wanted = self._baselines[self._phase].running or (tuning is not None and tuning.winner is None)
            self._timer.start(cuda=self._cuda, wanted=wanted)

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

    def step_ends(self, work: Work) -> None:
        """A batch ends.

        Args:
            work: What was to be done in it.
        """
        self._backward_thread.end()
        if self._phase == "infer":
            self._meetings.after_inference()
        compiles_before, traces_before = self._seen_before_step
        disturbed = self._meetings.disturbed or self._recorder.compiles_seen != compiles_before
        self._meetings.step_ends()
        tuning = self._tunings.get(self._phase)
        work = work.where(precision=self._reports.precision)
        if self._phase == "train":
            work = self._remeasuring.with_weights(work, look=self._first or disturbed)
        sample = self._timer.stop(
            self._phase,
            compiled=self._compiled,
            # A stage's first batch finds weights to be folded anew, and with frozen weights other code runs.
            work=work if tuning is None else work.where(first=self._first, frozen=self._frozen),
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
            tuning.step_ends(work, measured=self._measured, sample=sample, made_for=self._circumstances)
        if self._measured and self._settings[self._phase] is not None:
            self._remeasuring.step_ends(self._phase, work, compiled=self._compiled)
        if tuning is not None:
            self._configs[self._phase] = tuning.config
        if self._warm_start is not None:
            self._warm_start.step_ends(compiled=self._recorder.compiles_seen != compiles_before)
        self._select(compiled=True)

    def loader_ended(self, loader: int) -> None:
        """The last step with a loader is done, of a stage without backward passes."""
        self._meetings.after_loader(loader)

    def last_step_ended(self) -> None:
        """The last step of a stage without backward passes is done; what is logged for all processes comes next."""
        self._meetings.after_steps()

    def leave(self, phase: Phase) -> None:
        """A stage of this phase ends: say what ran and was not compiled, unless that has been said."""
        self._recorder.collect()
        self._warnings.of_stage(phase, self._configs[phase])
        self._warnings.of_steps([phase])
        self._keep_artifacts()
        self._reports.gather_figures()
        self._remeasuring.stage_ends(phase)

    # ------------------------------------------------------------------------------------------ what was measured

    def report(self) -> CompileReport:
        """What was measured so far; of several processes, by the slowest at the end of each stage."""
        return self._reports.report()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know, as plain data: the report, the baseline's samples, and what was chosen."""
        baselines = {phase: [[list(w), list(ms)] for w, ms in self._timer.baseline(phase).items()] for phase in PHASES}
        return {
            "report": self.report().to_dict(),
            "baselines": baselines,
            "device": self._device_name(),
            "choices": {phase: choice for phase, tuning in self._tunings.items() if (choice := tuning.choice())},
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier run's `state_dict`: its baseline is not measured again on the same device."""
        self._reports.before = CompileReport.from_dict({**state["report"], "before": None})
        # All processes measure a baseline, or none: those that do wait for each other's samples.
        known = self._meetings.gather(state["device"] == self._device_name())
        if not known or not all(known):
            return
        for phase, choice in state.get("choices", {}).items():  # states before `Tune` have none
            if phase in self._tunings:
                # Earlier states do not say how long it holds.
                self._tunings[phase].recall(choice["fingerprint"], Choice.from_data({"holds_for_steps": 0.0, **choice}))
        for phase in PHASES:
            baseline = baseline_from_data(state["baselines"][phase])
            self._timer.restore(phase, baseline)
            self._remeasuring.restored(phase, baseline)
            if baseline:
                self._baselines[phase].skip()

    def judge(self) -> None:
        """Warn where compiled steps turn out slower than eager ones, and of the cause."""
        self._warnings.of_steps(PHASES)

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

    @property
    def _candidate(self) -> str | None:
        """The candidate that the step runs with, where the phase is tuned."""
        tuning = self._tunings.get(self._phase)
        return tuning.in_force if tuning is not None else None

    def _circumstances(self, work: Work) -> dict[str, str]:
        """What a choice holds for that is made in this phase and for this work."""
        key, names = self._tunings[self._phase].tune.key(), tuple(target.name for target in self._switch.targets)
        return self._reports.circumstances(self._phase, settings_key=key, targets=names, work=repr(work))

    def _device_name(self) -> str:
        """What step times are compared on."""
        device = device_of(self.module)
        name = device_name(device)
        if device.type == "cpu":
            name += f", {torch.get_num_threads()} threads"
        return name if self._meetings.size == 1 else f"{self._meetings.size} x {name}"


def _while_there(method: Callable[..., None]) -> Callable[..., None]:
    """A method that may be called after its object is gone, and does nothing then; it does not keep the object."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (found := reference()) is not None:
            found(*args)

    return call


def _raise(message: str) -> None:
    raise CompileError(see(message, "the-compiler-failed"))


def _on_cuda(module: nn.Module) -> bool:
    return device_of(module).type == "cuda"
