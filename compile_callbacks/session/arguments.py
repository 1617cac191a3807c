"""`CompileArguments`: checks and stores the arguments that `InductorCompile` and `compile_phases` share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_type
from compile_callbacks._utils.phases import MODE_ARGUMENTS, Phase
from compile_callbacks.cache.folder import check_cache_dir
from compile_callbacks.graphs.target_log import TargetSettings
from compile_callbacks.passes.base import as_passes
from compile_callbacks.passes.helpers import RecordedGraph, RecordGraphs
from compile_callbacks.targets.resolve import check_target_names
from compile_callbacks.tuning.tune import PhaseConfig, as_phase_config


@dataclass(frozen=True, kw_only=True)
class CompileArguments:
    """The arguments of a `Session`. `InductorCompile` describes them."""

    configs: Mapping[Phase, PhaseConfig]
    targets: Sequence[str] | None = None
    target_settings: TargetSettings = field(default_factory=TargetSettings)
    baseline_steps: int = 0
    background: bool = False
    mode_arguments: Mapping[Phase, str] = field(default_factory=lambda: MODE_ARGUMENTS)

    @classmethod
    def checked(
        cls,
        *,
        train_mode: object,
        infer_mode: object,
        targets: object,
        passes: object,
        cache_dir: str | os.PathLike[str] | None,
        baseline_steps: int = 0,
        background: bool = False,
        **target_settings: Any,
    ) -> CompileArguments:
        """Check the arguments that a user gave."""
        modes: dict[Phase, object] = {"train": train_mode, "infer": infer_mode}
        configs = {phase: as_phase_config(mode, f"{phase}_mode") for phase, mode in modes.items()}
        checked_passes = as_passes(passes, "passes")
        check_type("baseline_steps", baseline_steps, int, "an integer, 0 or more")
        if baseline_steps < 0:
            message = f"baseline_steps={baseline_steps} must be 0 or more; 0 measures no baseline"
            raise ValueError(with_code("CC201", message))
        check_type("background", background, bool, "True or False")
        return cls(
            configs=configs,
            background=background,
            targets=check_target_names(targets),
            target_settings=TargetSettings(
                **target_settings,
                passes=checked_passes,
                cache_dir=check_cache_dir(cache_dir),
            ),
            baseline_steps=baseline_steps,
        )

    @property
    def uncompiled(self) -> frozenset[Phase]:
        """The phases that this library does not compile. They run as without it, also with the user's own compiles."""
        return frozenset(phase for phase, config in self.configs.items() if config is None)

    @property
    def compiles(self) -> bool:
        """Whether a phase is compiled."""
        return any(self.configs.values())

    def without_effect(self, **others: object) -> list[str]:
        """Return a message for each argument that has no effect."""
        train = self.configs["train"]
        messages = []
        if train is not None and train.freezes:
            messages.append("train_mode's option 'freezing' has no effect, because training changes the weights")
        settings = self.target_settings
        given: dict[str, object] = {"passes": settings.passes, "cache_dir": settings.cache_dir}
        given |= {"background": self.background, **others}
        if not self.compiles and (name := next((name for name, value in given.items() if value), None)):
            messages.append(f"{name} has no effect, because neither train_mode nor infer_mode compiles")
        return messages

    def recorded_graphs(self) -> list[RecordedGraph]:
        """Return the graphs that the `RecordGraphs` passes of both phases have recorded."""
        given = [settings.passes for settings in (self.target_settings, *self.configs.values()) if settings is not None]
        recorders = {id(p): p for passes in given for p in passes if isinstance(p, RecordGraphs)}
        return [graph for recorder in recorders.values() for graph in recorder.graphs]
