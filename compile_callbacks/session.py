"""One module, compiled and measured: what the callback's hooks act on. No Lightning in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks.baseline import Baseline
from compile_callbacks.config import InductorConfig
from compile_callbacks.cudagraphs import LastingGradients
from compile_callbacks.events import CompileRecorder, Owner
from compile_callbacks.memory import PeakMemory
from compile_callbacks.phases import PHASES, Phase
from compile_callbacks.progress import CompileProgress
from compile_callbacks.region import CompileWarning, RegionSettings
from compile_callbacks.report import CompileReport, build_phase_report
from compile_callbacks.switch import PhaseSwitch
from compile_callbacks.targets import Target
from compile_callbacks.timing import StepTimer
from compile_callbacks.warm_start import WarmStart

_SAMPLES_TO_JUDGE = 5  # fewer say nothing about whether compiled steps are slower


class CompileSession:
    """Compiles the targets of one module and measures both phases, over as many trainer runs as there are.

    Args:
        module: The root module.
        targets: What is compiled of it.
        configs: The settings by phase; ``None`` leaves a phase eager.
        passes: Graph passes for both phases.
        baseline_steps: Eager samples wanted in each phase.
        settings: What to do on failures, differences from eager and new shapes.
        cache_dir: Where compile artifacts are kept across runs.
        say: Takes a line of text while something compiles.
    """

    def __init__(
        self,
        module: nn.Module,
        targets: Sequence[Target],
        configs: Mapping[Phase, InductorConfig | None],
        *,
        passes: Sequence[Any] = (),
        baseline_steps: int = 0,
        settings: RegionSettings | None = None,
        cache_dir: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.module = module
        self._configs = dict(configs)
        self._warm_start = WarmStart(cache_dir, configs, passes) if cache_dir and any(configs.values()) else None
        progress = CompileProgress(say)
        self._recorder = CompileRecorder(on_start=progress.compile_begins, on_end=progress.compile_ends)
        self._timer = StepTimer()
        self._memory = PeakMemory()
        self._switch = PhaseSwitch(targets, configs, passes=passes, recorder=self._recorder, settings=settings)
        self._baselines = {phase: Baseline(baseline_steps if config else 0) for phase, config in configs.items()}
        self._target_names = tuple(target.name for target in targets)
        self._lasting_gradients = LastingGradients()
        self._before: CompileReport | None = None
        self._running = False
        self._phase: Phase = "train"
        self._compiled = False
        self._frozen = False
        self._cuda = False
        self._seen_before_step = (0, 0)
        self._warned: set[Any] = set()

    # ------------------------------------------------------------------------------------------ a trainer run

    @property
    def running(self) -> bool:
        """Whether a trainer run is under way."""
        return self._running

    def begin(self, expected_steps: Mapping[Phase, float]) -> None:
        """A trainer run begins: compile in place, and plan the baselines.

        Args:
            expected_steps: Steps to come by phase, ``math.inf`` where that is not known.
        """
        self._running = True
        self._cuda = _on_cuda(self.module)
        self._warn_of_idle_cudagraphs()
        if self._warm_start is not None:
            self._warm_start.begin(self.module)
        self._recorder.listen()
        self._switch.install()
        for phase, steps in expected_steps.items():
            self._baselines[phase].plan(steps)

    def end(self, *, keep_compiled: bool = False) -> None:
        """The trainer run is over: the module is an ordinary one again, unless it is to stay compiled."""
        self._running = False
        self._recorder.stop()
        self._timer.abandon()
        self._keep_artifacts()
        self._warn_of_idle_cache_dir()
        if keep_compiled:
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

    def step_begins(self, *, first: bool = False, measured: bool = True) -> None:
        """A batch begins.

        Args:
            first: Whether it is the first of its stage: whatever swaps weights for a stage has done so by now.
            measured: Whether its time may be a sample, and whether it may be an eager step of the baseline.
        """
        if first:
            self._switch.suspect_weights()
        self._select(compiled=not (measured and self._baselines[self._phase].running))
        self._seen_before_step = self._recorder.compiles_seen, self._recorder.traces_seen
        if self._cuda:
            torch.compiler.cudagraph_mark_step_begin()
            if measured:
                self._memory.start(self._phase, compiled=self._compiled)
        if measured:
            self._timer.start(cuda=self._cuda)

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
        sample = self._timer.stop(
            self._phase,
            compiled=self._compiled,
            work=work,
            disturbed=self._recorder.compiles_seen != compiles_before,
        )
        if self._cuda:
            self._memory.stop(traced=self._recorder.traces_seen != traces_before)
        if self._baselines[self._phase].running and not self._compiled:
            self._baselines[self._phase].step(sample=sample)
        self._select(compiled=True)

    def leave(self, phase: Phase) -> None:
        """A stage of this phase ends: say what ran and was not compiled, unless that has been said."""
        self._recorder.collect()
        for owner, reason in self._recorder.limits_hit.items():
            self._warn_once(
                (owner, "limit"),
                f"target {owner.target!r} reached torch's recompile limit in the {owner.phase} phase, and runs eagerly "
                f"wherever no graph fits that it has; the last reason to compile anew: {reason} (all of them: "
                f"callback.report.{owner.phase}.events; dynamic=True in {owner.phase}_mode, or a fixed shape, needs "
                "fewer graphs)",
            )
        for region in self._switch.regions(phase):
            if region.ran and not self._heard_of(region.owner):
                self._warn_once(
                    region.owner[:2],
                    f"target {region.owner.target!r} ran in the {phase} phase without a compiled graph: "
                    f"{self._why(region.owner)}",
                )
        self._warn_of_idle_folding(phase)
        self._keep_artifacts()

    # ------------------------------------------------------------------------------------------ what was measured

    def report(self) -> CompileReport:
        """What was measured so far."""
        self._recorder.collect()
        phases = {
            phase: build_phase_report(phase, config, self._target_names, self._recorder, self._timer, self._memory)
            for phase, config in self._configs.items()
        }
        artifacts = self._warm_start.report() if self._warm_start else None
        return CompileReport(train=phases["train"], infer=phases["infer"], artifacts=artifacts, before=self._before)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know, as plain data: the report, and the baseline's samples."""
        baselines = {phase: {w: list(ms) for w, ms in self._timer.baseline(phase).items()} for phase in PHASES}
        return {"report": self.report().to_dict(), "baselines": baselines, "device": self._device_name()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier run's `state_dict`: its baseline is not measured again on the same device."""
        self._before = CompileReport.from_dict({**state["report"], "before": None})
        if state["device"] != self._device_name():
            return
        for phase in PHASES:
            self._timer.restore(phase, state["baselines"][phase])
            if state["baselines"][phase]:
                self._baselines[phase].skip()

    def judge(self) -> None:
        """Warn where compiled steps turn out slower than eager ones."""
        report = self.report()
        for phase in PHASES:
            measured = report.phase(phase)
            if measured.speedup is None or (measured.samples or 0) < _SAMPLES_TO_JUDGE:
                continue
            noise = max(measured.eager_spread_ms or 0, measured.compiled_spread_ms or 0)
            if (measured.compiled_step_ms or 0) - (measured.eager_step_ms or 0) > noise:
                self._warn_once(
                    phase,
                    f"compiled {phase} steps are slower than eager ones ({measured.compiled_step_ms:.2f} ms against "
                    f"{measured.eager_step_ms:.2f} ms) and never pay for compiling; {phase}_mode=None leaves the "
                    "phase eager",
                )

    # ------------------------------------------------------------------------------------------ what these call

    def _select(self, *, compiled: bool) -> None:
        self._compiled = compiled and self._configs[self._phase] is not None
        self._switch.select(self._phase, compiled=compiled, frozen=self._frozen)

    def _keep_artifacts(self) -> None:
        if self._warm_start is not None:
            self._warm_start.save()

    def _heard_of(self, owner: Owner) -> bool:
        return any(
            event.kind == "fallback" or event.graphs
            for event in self._recorder.events
            if (event.target, event.phase) == owner[:2]
        )

    def _why(self, owner: Owner) -> str:
        """Torch's reason for compiling nothing of a target."""
        reasons = [
            event.reason
            for event in self._recorder.of(owner.phase, "graph_break")
            if event.target == owner.target and event.reason
        ]
        return reasons[-1] if reasons else "torch gives no reason; nothing in it may be there to compile"

    def _warn_of_idle_cudagraphs(self) -> None:
        if self._cuda:
            return
        for phase, config in self._configs.items():
            if config is not None and config.uses_cudagraphs:
                reason = f"{phase}_mode={config.describe()!r} asks for CUDA graphs, and the module is not on a GPU"
                if self._warn_once((phase, "cudagraphs"), f"{reason}: they have no effect"):
                    for target in self._target_names:
                        self._recorder.add("cudagraph_skip", Owner(target, phase), reason=reason)

    def _warn_of_idle_folding(self, phase: Phase) -> None:
        config, folds = self._configs[phase], self._recorder.of(phase, "fold")
        if config is None or not config.fold_weights or any(event.folded_mb is not None for event in folds):
            return
        if any(event.graphs for event in self._recorder.of(phase, "compile")):
            reasons = [event.reason for event in folds if event.reason]
            self._warn_once(
                (phase, "fold"),
                f"fold_weights=True has no effect in the {phase} phase: "
                + (reasons[-1] if reasons else "no inference graph computes from weights alone what is worth keeping"),
            )

    def _warn_of_idle_cache_dir(self) -> None:
        if self._warm_start is None or not self._warm_start.idle:
            return
        events = self._recorder.events
        if any(event.graphs for event in events) and not any(event.cache_hits for event in events):
            self._warn_once(
                "cache_dir",
                "cache_dir has no effect: torch kept nothing of what it compiled. Its caches are off, or the settings "
                "keep it from using them (freezing, and passes whose uuid() is None, do)",
            )

    def _warn_once(self, subject: object, message: str) -> bool:
        if subject in self._warned:
            return False
        self._warned.add(subject)
        warnings.warn(message, CompileWarning, stacklevel=3)
        return True

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if _on_cuda(self.module) else "cpu"


def _on_cuda(module: nn.Module) -> bool:
    parameter = next(module.parameters(), None)
    return parameter is not None and parameter.device.type == "cuda"
