"""One module, compiled and measured: what the callback's hooks act on. No Lightning in it."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compile_callbacks.baseline import Baseline
from compile_callbacks.config import EAGER, InductorConfig
from compile_callbacks.cudagraphs import LastingGradients
from compile_callbacks.events import CompileRecorder, Owner
from compile_callbacks.phases import Phase
from compile_callbacks.region import CompileWarning, OnError
from compile_callbacks.report import CompileReport, build_phase_report
from compile_callbacks.switch import PhaseSwitch
from compile_callbacks.targets import Target
from compile_callbacks.timing import StepTimer


class CompileSession:
    """Compiles the targets of one module and measures both phases, over as many trainer runs as there are.

    Args:
        module: The root module.
        targets: What is compiled of it.
        configs: The settings by phase; ``None`` leaves a phase eager.
        passes: Graph passes for both phases.
        baseline_steps: Eager samples wanted in each phase.
        on_error: What a compiler failure does.
    """

    def __init__(
        self,
        module: nn.Module,
        targets: Sequence[Target],
        configs: Mapping[Phase, InductorConfig | None],
        *,
        passes: Sequence[Any] = (),
        baseline_steps: int = 0,
        on_error: OnError = "eager",
    ) -> None:
        self.module = module
        self._configs = dict(configs)
        self._recorder = CompileRecorder()
        self._timer = StepTimer()
        self._switch = PhaseSwitch(targets, configs, passes=passes, recorder=self._recorder, on_error=on_error)
        self._baselines = {phase: Baseline(baseline_steps if config else 0) for phase, config in configs.items()}
        self._target_names = tuple(target.name for target in targets)
        self._running = False
        self._phase: Phase = "train"
        self._compiled = False
        self._lasting_gradients = LastingGradients()
        self._compiles_before_step = 0
        self._warned: set[Owner] = set()

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
        self._recorder.listen()
        self._switch.install()
        for phase, steps in expected_steps.items():
            self._baselines[phase].plan(steps)

    def enter(self, phase: Phase) -> None:
        """A stage of this phase begins or goes on; it runs compiled until a step says otherwise."""
        self._phase = phase
        self._select(compiled=True)

    def step_begins(self, *, measured: bool = True) -> None:
        """A batch begins.

        Args:
            measured: Whether its time may be a sample, and whether it may be an eager step of the baseline.
        """
        self._select(compiled=not (measured and self._baselines[self._phase].running))
        self._compiles_before_step = self._recorder.compiles_seen
        torch.compiler.cudagraph_mark_step_begin()
        if measured:
            self._timer.start(cuda=_on_cuda(self.module))

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
        sample = self._timer.stop(
            self._phase,
            compiled=self._compiled,
            work=work,
            disturbed=self._recorder.compiles_seen != self._compiles_before_step,
        )
        if self._baselines[self._phase].running and not self._compiled:
            self._baselines[self._phase].step(sample=sample)
        self._select(compiled=True)

    def leave(self, phase: Phase) -> None:
        """A stage of this phase ends: say what ran and was not compiled, unless that has been said."""
        self._recorder.collect()
        for region in self._switch.regions(phase):
            heard = any(
                event.kind == "fallback" or event.graphs
                for event in self._recorder.events
                if (event.target, event.phase) == region.owner
            )
            if not region.ran or heard or region.owner in self._warned:
                continue
            self._warned.add(region.owner)
            warnings.warn(
                f"target {region.owner.target!r} ran in the {phase} phase without a compiled graph: "
                f"{self._why(region.owner)}",
                CompileWarning,
                stacklevel=2,
            )

    def end(self, *, keep_compiled: bool = False) -> None:
        """The trainer run is over: the module is an ordinary one again, unless it is to stay compiled."""
        self._running = False
        self._recorder.stop()
        self._timer.abandon()
        if keep_compiled:
            self._switch.select_by_grad_mode()
        else:
            self._switch.remove()

    def report(self) -> CompileReport:
        """What was measured so far."""
        self._recorder.collect()
        return CompileReport(
            **{
                phase: build_phase_report(
                    phase,
                    config.describe() if config else EAGER,
                    self._target_names if config else (),
                    self._recorder,
                    self._timer,
                )
                for phase, config in self._configs.items()
            }
        )

    def _select(self, *, compiled: bool) -> None:
        self._compiled = compiled and self._configs[self._phase] is not None
        self._switch.select(self._phase, compiled=compiled)

    def _why(self, owner: Owner) -> str:
        """Torch's reason for compiling nothing of a target."""
        reasons = [
            event.reason
            for event in self._recorder.of(owner.phase, "graph_break")
            if event.target == owner.target and event.reason
        ]
        return reasons[-1] if reasons else "torch gives no reason; nothing in it may be there to compile"


def _on_cuda(module: nn.Module) -> bool:
    parameter = next(module.parameters(), None)
    return parameter is not None and parameter.device.type == "cuda"
