"""`CompileArguments`: checks and stores the arguments that `InductorCompile` and `compile_phases` share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compile_callbacks._utils.errors import warn_user, with_code
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
    keep_compiled: bool = False
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
        keep_compiled: bool = False,
        **target_settings: Any,
    ) -> CompileArguments:
        """Check the arguments that a user gave."""
        modes: dict[Phase, object] = {"train": train_mode, "infer": infer_mode}
        configs = {phase: as_phase_config(mode, f"{phase}_mode") for phase, mode in modes.items()}
        checked_passes = as_passes(passes)
        check_type("baseline_steps", baseline_steps, int, "an integer, 0 or more")
        if baseline_steps < 0:
            message = f"baseline_steps={baseline_steps} must be 0 or more; 0 measures no baseline"
            raise ValueError(with_code("CC201", message))
        for name, value in {"background": background, "keep_compiled": keep_compiled}.items():
            check_type(name, value, bool, "True or False")
        folder = check_cache_dir(cache_dir)
        arguments = cls(
            configs=configs,
            targets=check_target_names(targets),
            target_settings=TargetSettings(**target_settings, passes=checked_passes, cache_dir=folder),
            baseline_steps=baseline_steps,
            background=background,
            keep_compiled=keep_compiled,
        )
        without_effect: dict[str, Any] = {"passes": checked_passes, "cache_dir": folder, "background": background}
        without_effect["keep_compiled"] = keep_compiled
        if not arguments.compiles and (name := next((n for n, value in without_effect.items() if value), "")):
            warn_user("CC204", f"{name} has no effect, because neither train_mode nor infer_mode compiles")
        if (train := configs["train"]) and any(config.freezes for config in train.configs):
            warn_user("CC204", "train_mode's option 'freezing' has no effect, because training changes the weights")
        return arguments

    @property
    def uncompiled(self) -> frozenset[Phase]:
        """The phases that this library does not compile. They run as without it, also with the user's own compiles."""
        return frozenset(phase for phase, config in self.configs.items() if config is None)

    @property
    def compiles(self) -> bool:
        """Whether a phase is compiled."""
        return any(self.configs.values())

    def recorded_graphs(self) -> list[RecordedGraph]:
        """Return the graphs that the `RecordGraphs` passes of both phases have recorded."""
        of_phases = [config.passes for settings in self.configs.values() if settings for config in settings.configs]
        given = itertools.chain(self.target_settings.passes, *of_phases)
        recorders = {id(p): p for p in given if isinstance(p, RecordGraphs)}
        return [graph for recorder in recorders.values() for graph in recorder.graphs]
