"""Coordinates several `InductorCompile` callbacks in one Trainer: their targets, baselines and names in logs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, Trainer
from torch import nn

from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.config.tune import Tune
from compile_callbacks.runtime.arguments import CompileArguments
from compile_callbacks.runtime.measurements import Baseline
from compile_callbacks.runtime.target import overlap
from compile_callbacks.runtime.targets import named_targets

if TYPE_CHECKING:
    from compile_callbacks.callbacks.inductor_compile import InductorCompile

Names = Sequence[str] | str | None
"""The ``targets`` of a callback."""


def callbacks_of(trainer: Trainer, own: InductorCompile) -> Sequence[InductorCompile]:
    """Return the `InductorCompile` callbacks of a trainer, or only ``own`` if another callback calls its hooks."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # one of its connectors sets it
    found: list[Any] = [one for one in callbacks if isinstance(getattr(one, "arguments", None), CompileArguments)]
    return found if any(one is own for one in found) else [own]


def why_not_together(callbacks: Sequence[InductorCompile], module: nn.Module) -> str | None:
    """Return the reason why the callbacks of a trainer cannot run together, or ``None`` if they can."""
    for one, other in itertools.combinations([callback.arguments for callback in callbacks], 2):
        if one.cache_dir and other.cache_dir and one.cache_dir != other.cache_dir:
            return (
                f"two InductorCompile callbacks have different folders, cache_dir={str(one.cache_dir)!r} and "
                f"{str(other.cache_dir)!r}, but torch has one cache folder per process. Give both the same cache_dir"
            )
        for phase in PHASES:
            if isinstance(one.configs[phase], Tune) and isinstance(other.configs[phase], Tune):
                return (
                    f"two InductorCompile callbacks have a Tune or 'auto' for the {phase} phase, and each would change "
                    f"the step times that the other one compares. Give one of them a fixed {phase}_mode"
                )
        if one.finds_targets and other.finds_targets:
            return (
                "two InductorCompile callbacks name no targets, so both would compile the whole module. Name the "
                "targets of one, as in InductorCompile('max-autotune', targets=['net'])"
            )
        for first, second in itertools.product(
            named_targets(module, one.targets), named_targets(module, other.targets)
        ):
            if overlap(first, second):
                return (
                    f"two InductorCompile callbacks have overlapping targets: {first.name!r} and {second.name!r}. A "
                    "target can be compiled by one callback only: name different modules"
                )
    return None


def name_in_logs(trainer: Trainer, own: InductorCompile) -> str:
    """Return the name of a callback in scalars and files: empty for the first callback, ``"head-net"`` for another."""
    if callbacks_of(trainer, own)[0] is own:
        return ""
    targets = own.arguments.targets
    names = targets if isinstance(targets, str) else "-".join(sorted(targets or ["default"]))
    return re.sub(r"[^A-Za-z0-9_.-]", "_", names)


def state_key(targets: Names) -> str:
    """Return the key of a callback's state in a checkpoint. Unlike a name in logs, each key has its own targets."""
    return str(targets if targets is None or isinstance(targets, str) else sorted(targets))


def shared_baselines(callbacks: Sequence[InductorCompile], own: InductorCompile) -> dict[Phase, Baseline]:
    """Return the baselines, by phase, that other callbacks measure for this callback.

    One callback measures each phase: the callback that tunes the phase, or else the first callback that compiles it.
    """
    measuring = {phase: _measuring(callbacks, phase) for phase in PHASES}
    return {
        phase: callback.session.baseline(phase) if callback.session else Baseline(0)
        for phase, callback in measuring.items()
        if callback is not own
    }


def _measuring(callbacks: Sequence[InductorCompile], phase: Phase) -> InductorCompile:
    compiling = [callback for callback in callbacks if callback.arguments.configs[phase]]
    tuning = [callback for callback in compiling if isinstance(callback.arguments.configs[phase], Tune)]
    return next(iter([*tuning, *compiling, *callbacks]))
