"""The candidates of a `Tune`, with the reason if one cannot have an effect. `PhaseTuning` asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.tune import Tune

_AUTOTUNE_COST = 8.0  # how many times longer a compile takes if Inductor benchmarks kernels


class Candidate(NamedTuple):
    """A candidate.

    Attributes:
        name: Its settings in one line.
        config: Its config.
        why_not: Why it is not tried; ``None`` if it is.
        compile_cost: Its expected compile time, divided by that of the default mode.
    """

    name: str
    config: InductorConfig
    why_not: str | None = None
    compile_cost: float = 1.0


def candidates_of(
    tune: Tune,
    phase: Phase,
    device: torch.device,
    *,
    no_freezing: str | None,
    no_cudagraphs: str | None,
    shapes_vary: bool,
) -> Sequence[Candidate]:
    """The candidates in order, without eager.

    Args:
        tune: The `Tune`.
        phase: The phase.
        device: The device of the module.
        no_freezing: Why the targets cannot be compiled with frozen weights; ``None`` if they can.
        no_cudagraphs: Why the targets cannot be compiled with CUDA graphs; ``None`` if they can.
        shapes_vary: Whether batches have different shapes.
    """
    configs = tune.configs or auto_candidates(device, phase, freezes=no_freezing is None, shapes_vary=shapes_vary)
    candidates: list[Candidate] = []
    for config in configs:
        same = sum(other.config.describe() == config.describe() for other in candidates)  # passes of one class
        why_not = None
        if config.freezes and phase == "infer" and no_freezing:
            why_not = f"it asks for freezing, and {no_freezing}"
        if config.uses_cudagraphs and no_cudagraphs:
            why_not = f"it asks for CUDA graphs, and {no_cudagraphs}"
        name = f"{config.describe()} ({same + 1})" if same else config.describe()
        cost = _AUTOTUNE_COST if config.resolved_options().get("max_autotune") else 1.0
        candidates.append(Candidate(name, config, why_not, cost))
    return candidates


def auto_candidates(
    device: torch.device, phase: Phase, *, freezes: bool = True, shapes_vary: bool = False
) -> list[InductorConfig]:
    """The candidates of ``"auto"``, the cheapest to compile first.

    If shapes vary, each is also a candidate with ``dynamic=True``, except those with CUDA graphs, which torch records
    for each shape anyway.
    """
    # Freezing has an effect in stages that do not train (test, predict).
    freezing = True if phase == "infer" and freezes else None
    configs = [InductorConfig(freezing=freezing)]
    if device.type == "cuda":
        configs = [
            InductorConfig(),
            InductorConfig(mode="reduce-overhead", freezing=freezing),
            InductorConfig(mode="max-autotune-no-cudagraphs"),
            InductorConfig(mode="max-autotune"),
        ]
    if not shapes_vary:
        return configs
    both = ([one] if one.uses_cudagraphs else [one, replace(one, dynamic=True)] for one in configs)
    return [config for group in both for config in group]
