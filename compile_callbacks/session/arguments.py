"""`CompileArguments`: checks and stores the arguments that `InductorCompile` and `compile_phases` share."""

from __future__ import annotations

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
    def checked(cls, *, targets: object, passes: object, cache_dir: object, **given: Any) -> CompileArguments:
        """Check the arguments that a user gave."""
        modes: dict[Phase, object] = {"train": given.pop("train_mode"), "infer": given.pop("infer_mode")}
        configs = {phase: as_phase_config(mode, f"{phase}_mode") for phase, mode in modes.items()}
        reactions = {"on_error": given.pop("on_error"), "verify": given.pop("verify")}
        checked_passes, folder = as_passes(passes), check_cache_dir(cache_dir)
        settings = TargetSettings(**reactions, passes=checked_passes, cache_dir=folder)
        arguments = cls(configs=configs, targets=check_target_names(targets), target_settings=settings, **given)
        check_type("baseline_steps", arguments.baseline_steps, int, "an integer, 0 or more")
        if arguments.baseline_steps < 0:
            message = f"baseline_steps={arguments.baseline_steps} must be 0 or more; 0 measures no baseline"
            raise ValueError(with_code("CC201", message))
        for_compiles: dict[str, Any] = {"passes": checked_passes, "cache_dir": folder}
        for name in ("background", "keep_compiled"):
            for_compiles[name] = getattr(arguments, name)
            check_type(name, for_compiles[name], bool, "True or False")
        if not arguments.compiles and (name := next((n for n, value in for_compiles.items() if value), "")):
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
        configs = [config for settings in self.configs.values() if settings for config in settings.configs]
        given = [*self.target_settings.passes, *(graph_pass for config in configs for graph_pass in config.passes)]
        recorders = {id(graph_pass): graph_pass for graph_pass in given if isinstance(graph_pass, RecordGraphs)}
        return [graph for recorder in recorders.values() for graph in recorder.graphs]
