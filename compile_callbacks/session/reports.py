"""The report of a session, and the figures of it that later runs are advised by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from compile_callbacks.compiling.sharding import is_sharded
from compile_callbacks.compiling.switch import PhaseSwitch
from compile_callbacks.compiling.targets import Scope
from compile_callbacks.devices.placement import device_of
from compile_callbacks.measuring.events import CompileRecorder
from compile_callbacks.measuring.memory import PeakMemory
from compile_callbacks.measuring.timing import StepTimer
from compile_callbacks.phases import PHASES, Phase
from compile_callbacks.processes.meetings import Meetings
from compile_callbacks.reporting.advice import Advisor
from compile_callbacks.reporting.costs_store import CostsStore
from compile_callbacks.reporting.report import CompileReport, PhaseReport, build_phase_report
from compile_callbacks.reporting.slowest import Figures, figures_of, with_slowest
from compile_callbacks.settings.tune import Settings
from compile_callbacks.tuning.choices_store import circumstances
from compile_callbacks.tuning.tuning import PhaseTuning
from compile_callbacks.warm_start.warm_start import WarmStart


class SessionReports:
    """Builds the report of what a session compiled and measured.

    Args:
        module: The root module.
        settings: The settings by phase, or candidates for them.
        passes: Graph passes for both phases.
        switch: Knows the targets.
        recorder: Knows what happened while compiling.
        timer: Knows the steps' times.
        memory: Knows the peaks of memory.
        tunings: What was tried, in the phases that are tuned.
        meetings: Where the other processes tell their figures.
        warm_start: What was loaded and kept.
        cache_dir: Where costs are kept for later runs; ``None`` for nowhere.
        scope: How the targets compile the module, where they compile all of it.

    Attributes:
        before: The report of an earlier run that this one goes on from.
        precision: The trainer's precision.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Mapping[Phase, Settings],
        passes: Sequence[Any],
        *,
        switch: PhaseSwitch,
        recorder: CompileRecorder,
        timer: StepTimer,
        memory: PeakMemory,
        tunings: Mapping[Phase, PhaseTuning],
        meetings: Meetings,
        warm_start: WarmStart | None,
        cache_dir: Path | None,
        scope: Scope | None,
    ) -> None:
        self.before: CompileReport | None = None
        self.precision = ""
        self._module = module
        self._settings = settings
        self._passes = tuple(passes)
        self._switch = switch
        self._recorder = recorder
        self._timer = timer
        self._memory = memory
        self._tunings = tunings
        self._meetings = meetings
        self._warm_start = warm_start
        self._keeps = cache_dir is not None
        # Parts of sharded weights share graphs whatever the targets are.
        self._advisor = Advisor(
            module, None if is_sharded(module) else scope, CostsStore(cache_dir / "costs") if cache_dir else None
        )
        self._of_ranks: Sequence[Figures] = ()
        self._made_for: dict[tuple[Phase, str], dict[str, str]] = {}

    def report(self) -> CompileReport:
        """What was measured so far; of several processes, by the slowest at the end of each stage."""
        phases = {phase: with_slowest(of_phase, phase, self._of_ranks) for phase, of_phase in self._own().items()}
        phases = {
            phase: replace(
                report, advice=self._advisor.advise(report, self._costs_made_for(phase), loaded=self._loaded_artifacts)
            )
            for phase, report in phases.items()
        }
        artifacts = self._warm_start.report() if self._warm_start else None
        return CompileReport(train=phases["train"], infer=phases["infer"], artifacts=artifacts, before=self.before)

    def gather_figures(self) -> None:
        """At the end of a stage: hear what the other processes measured."""
        own = {phase: figures_of(report) for phase, report in self._own().items()} if self._meetings.size > 1 else {}
        self._of_ranks = self._meetings.gather_at_end_of_stage(own)

    def keep_costs(self, say: Callable[[str], None]) -> None:
        """Keep what compiling cost for later runs to be advised by.

        Args:
            say: Takes a line of text where that is not possible.
        """
        if not self._keeps or not self._meetings.speaks:
            return
        report = self.report()
        for phase in PHASES:
            made_for = self._costs_made_for(phase)
            if problem := self._advisor.keep(report.phase(phase), made_for, loaded=self._loaded_artifacts):
                say(f"{phase} phase: what compiling cost could not be kept for later runs: {problem}")

    def circumstances(self, phase: Phase, *, settings_key: str, targets: tuple[str, ...], work: str) -> dict[str, str]:
        """What figures of a phase hold for.

        Args:
            phase: The phase.
            settings_key: The key of the settings, or of the candidates.
            targets: What is compiled; empty for figures that tell of the module however it is compiled.
            work: What was done in a step.
        """
        return circumstances(
            self._module,
            phase=phase,
            settings_key=settings_key,
            passes=self._passes,
            targets=targets,
            work=work,
            precision=self.precision,
            device=device_of(self._module),
            processes=self._meetings.size,
        )

    @property
    def _loaded_artifacts(self) -> bool:
        return self._warm_start is not None and self._warm_start.loaded

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

    def _costs_made_for(self, phase: Phase) -> dict[str, str] | None:
        """What a phase's figures hold for, where they are to be kept."""
        settings = self._settings.get(phase)
        if not self._keeps or settings is None:
            return None
        tuning = self._tunings.get(phase)
        found = self._timer.times(phase, tuning.winner if tuning else None).work
        if found is None:
            return None  # no steps were measured
        work = repr(found)
        if (phase, work) not in self._made_for:
            # Of candidates, what was chosen is compared with what was chosen among the same.
            self._made_for[phase, work] = self.circumstances(phase, settings_key=settings.key(), targets=(), work=work)
        return self._made_for[phase, work]
