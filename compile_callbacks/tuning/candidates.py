"""The candidates of a `Tune`: those of ``"auto"``, those that cannot work, and those not worth their compile time.

The constants are orders of magnitude. They only keep a run from paying for a compile that it cannot amortize;
measurements decide which candidate is faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.tune import Tune

LEAST_COMPILE_SECONDS = {"cuda": 10.0, "cpu": 4.0}  # of a small network and an empty cache, if nothing was compiled yet
PLAUSIBLE_SPEEDUP = {"cuda": 5.0, "cpu": 2.0}  # the highest over eager that is expected
FURTHER_SPEEDUP = 1.25  # the highest over the best candidate so far that is expected
AUTOTUNE_COST = 8.0  # how many times longer a compile takes if Inductor benchmarks kernels


def candidates_of(
    tune: Tune,
    phase: Phase,
    device: torch.device,
    *,
    no_freezing: str | None,
    no_cudagraphs: str | None,
    shapes_vary: bool,
) -> tuple[dict[str, InductorConfig], dict[str, str | None]]:
    """The configs of the candidates, in order and by name, and by name why a candidate cannot work, or ``None``.

    Args:
        tune: The candidates.
        phase: The phase.
        device: The device of the module.
        no_freezing: Why the targets cannot be compiled with frozen weights; ``None`` if they can.
        no_cudagraphs: Why the targets cannot be compiled with CUDA graphs; ``None`` if they can.
        shapes_vary: Whether batches have different shapes.
    """
    configs: dict[str, InductorConfig] = {}
    skipped: dict[str, str | None] = {}
    for config in tune.configs or auto_candidates(device, phase, freezes=no_freezing is None, shapes_vary=shapes_vary):
        same = sum(other.describe() == config.describe() for other in configs.values())  # passes of one class
        name = f"{config.describe()} ({same + 1})" if same else config.describe()
        configs[name], skipped[name] = config, None
        if config.freezes and phase == "infer" and no_freezing:
            skipped[name] = f"it asks for freezing, and {no_freezing}"
        if config.uses_cudagraphs and no_cudagraphs:
            skipped[name] = f"it asks for CUDA graphs, and {no_cudagraphs}"
    return configs, skipped


def auto_candidates(
    device: torch.device, phase: Phase, *, freezes: bool = True, shapes_vary: bool = False
) -> list[InductorConfig]:
    """The candidates of ``"auto"``, the cheapest to compile first.

    If shapes vary, each of them is a candidate with ``dynamic=True`` too, except those with CUDA graphs, which are
    recorded for each shape anyway.
    """
    # Freezing has an effect in stages that do not train (test, predict).
    freezing = True if phase == "infer" and freezes else None
    candidates = [InductorConfig(freezing=freezing)]
    if device.type == "cuda":
        candidates = [
            InductorConfig(),
            InductorConfig(mode="reduce-overhead", freezing=freezing),
            InductorConfig(mode="max-autotune-no-cudagraphs"),
            InductorConfig(mode="max-autotune"),
        ]
    if not shapes_vary:
        return candidates
    both = ([one] if one.uses_cudagraphs else [one, replace(one, dynamic=True)] for one in candidates)
    return [config for configs in both for config in configs]


def why_not_compiled(
    config: InductorConfig,
    device: torch.device,
    *,
    compiled: Mapping[InductorConfig, float],
    budget_seconds: float = math.inf,
    steps_left: float = math.inf,
    eager_ms: float,
    best_ms: float,
) -> str | None:
    """Why a candidate is not worth its compile time; ``None`` if it may be.

    Args:
        config: The candidate.
        device: The device of the module.
        compiled: The compile time of the candidates that were compiled, in seconds.
        budget_seconds: The rest of the budget.
        steps_left: Number of steps that must amortize the compile time; infinite if it need not be amortized.
        eager_ms: Median of an eager step.
        best_ms: The lowest median of the candidates so far, eager included.
    """
    kind = "cpu" if device.type == "cpu" else "cuda"
    plain = [seconds / _cost(other) for other, seconds in compiled.items() if seconds > 0]
    seconds = max(plain, default=LEAST_COMPILE_SECONDS[kind]) * _cost(config)
    if plain and seconds > budget_seconds:
        return f"compiling takes about {seconds:.0f} s, and {budget_seconds:.1f} s of budget_seconds are left"
    fastest_ms = min(eager_ms / PLAUSIBLE_SPEEDUP[kind], best_ms / FURTHER_SPEEDUP)
    saved_seconds = max(0.0, steps_left) * (best_ms - fastest_ms) / 1000
    if saved_seconds >= seconds:
        return None
    saved = f"the {steps_left:.0f} steps that remain could save {saved_seconds:.1f} s at best"
    return f"{saved}, and compiling takes about {seconds:.0f} s"


def _cost(config: InductorConfig) -> float:
    return AUTOTUNE_COST if config.resolved_options().get("max_autotune") else 1.0
