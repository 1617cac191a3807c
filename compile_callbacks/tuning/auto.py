"""What ``"auto"`` tries: candidates that suit the device and the phase, without those that cannot repay their compile.

The figures are orders of magnitude and not promises: they only keep a run from paying for a compile that it is too
short to win back. What is faster is decided by measuring alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from compile_callbacks.phases import Phase
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.tuning.trial import Known

LEAST_COMPILE_SECONDS = {"cuda": 10.0, "cpu": 4.0}
"""What compiling is taken to cost before anything was compiled: the train graphs of a small convolutional network with
an empty cache. Large models take more, which is known once the first candidate is compiled."""

PLAUSIBLE_SPEEDUP = {"cuda": 5.0, "cpu": 2.0}
"""What a step may gain over eager at best. ResNet-50 at batch 16 on an H200 gains 3.8 in training and 9 at batch 1 in
inference, where the host is all that eager waits for; a saving hardly grows beyond (1 - 1/5 and 1 - 1/9)."""

FURTHER_SPEEDUP = 1.25
"""What a step may gain over the best that was measured."""

AUTOTUNE_COST = 8.0
"""How many times longer kernels that are chosen by measuring take to compile."""


def auto_candidates(device: torch.device, phase: Phase, *, freezes: bool = True) -> tuple[InductorConfig, ...]:
    """What is tried on a device in a phase, the cheapest to compile first.

    Args:
        device: Where the module is.
        phase: The phase.
        freezes: Whether weights can be baked in.
    """
    # Weights are baked in where they stand still (test, predict); else freezing changes nothing.
    freezing = True if phase == "infer" and freezes else None
    if device.type == "cuda":
        cudagraphs = InductorConfig(mode="reduce-overhead", freezing=freezing)
        return (
            InductorConfig(),
            cudagraphs,
            InductorConfig(mode="max-autotune-no-cudagraphs"),
            InductorConfig(mode="max-autotune"),
        )
    return (InductorConfig(freezing=freezing),)


def why_not_repaid(name: str, configs: Mapping[str, InductorConfig], device: torch.device, known: Known) -> str | None:
    """Why compiling a candidate cannot repay itself in what remains of the run; ``None`` where it may.

    Args:
        name: The candidate.
        configs: All candidates by name.
        device: Where the module is.
        known: What was measured so far.
    """
    if math.isinf(known.steps_left):
        return None
    fastest_ms = min(known.eager_ms / PLAUSIBLE_SPEEDUP[_kind(device)], known.best_ms / FURTHER_SPEEDUP)
    saved_seconds = max(0.0, known.steps_left) * (known.best_ms - fastest_ms) / 1000
    cost_seconds = compile_estimate(name, configs, known.compile_seconds)
    if cost_seconds is None:
        cost_seconds = LEAST_COMPILE_SECONDS[_kind(device)] * _cost(configs[name])
    if saved_seconds >= cost_seconds:
        return None
    return (
        f"the {known.steps_left:.0f} steps that remain could save {saved_seconds:.1f} s at best, and compiling takes "
        f"about {cost_seconds:.0f} s"
    )


def why_not_affordable(name: str, configs: Mapping[str, InductorConfig], known: Known) -> str | None:
    """Why compiling a candidate does not fit into what is left of the budget; ``None`` where it may."""
    estimate = compile_estimate(name, configs, known.compile_seconds)
    if estimate is None or estimate <= known.seconds_left:
        return None
    return f"compiling takes about {estimate:.0f} s, and {known.seconds_left:.1f} s of budget_seconds are left"


def compile_estimate(
    name: str, configs: Mapping[str, InductorConfig], compile_seconds: Mapping[str, float]
) -> float | None:
    """Seconds that compiling a candidate may take, by what it or others took; ``None`` where none was compiled yet.

    Args:
        name: The candidate.
        configs: All candidates by name.
        compile_seconds: What compiling took, by name.
    """
    if name in compile_seconds:
        return compile_seconds[name]
    plain = [seconds / _cost(configs[other]) for other, seconds in compile_seconds.items() if seconds > 0]
    return max(plain) * _cost(configs[name]) if plain else None


def _cost(config: InductorConfig) -> float:
    return AUTOTUNE_COST if config.resolved_options().get("max_autotune") else 1.0


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "cuda"
