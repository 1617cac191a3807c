"""Lists the candidates of a `Tune` for a `TuningPolicy`, and excludes candidates that cannot have an effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import InductorConfig, Variant
from compile_callbacks.tuning.trial import Trial
from compile_callbacks.tuning.tune import Tune


def candidates_of(
    tune: Tune,
    phase: Phase,
    device: torch.device,
    *,
    no_freezing: str | None,
    no_cudagraphs: str | None,
    shapes_vary: bool,
    healing: Sequence[str] = (),
) -> Iterator[Trial]:
    """Return a trial for each candidate in order, without eager. The verdict of an excluded candidate is "not tried".

    ``healing`` are settings of Dynamo that an earlier run, or another rank, added to the first candidate of ``"auto"``.

    ``no_freezing`` and ``no_cudagraphs`` are the reasons why the targets cannot have frozen weights or CUDA graphs.
    """
    configs = tune.configs or auto_candidates(device, phase, freezes=no_freezing is None, shapes_vary=shapes_vary)
    names: list[str] = []
    for config in configs:
        name = config.describe()
        names.append(name)
        if (count := names.count(name)) > 1:  # two candidates may have different passes of the same class
            name = f"{name} ({count})"
        trial = Trial(Variant(config, name))
        if config.uses_cudagraphs and no_cudagraphs:
            trial.decide("not tried", f"it asks for CUDA graphs, but {no_cudagraphs}")
        elif config.freezes and phase == "infer" and no_freezing:
            trial.decide("not tried", f"it asks for freezing, but {no_freezing}")
        yield trial
        if healing and not tune.configs and len(names) == 1:
            yield trial.healed(healing)


def auto_candidates(
    device: torch.device, phase: Phase, *, freezes: bool = True, shapes_vary: bool = False
) -> list[InductorConfig]:
    """Return the candidates of ``"auto"``, the cheapest to compile first.

    If shapes vary, the function adds each candidate again with ``dynamic=True``. It does not add candidates with CUDA
    graphs, which torch records for each shape anyway.
    """
    # Freezing only has an effect in stages that do not train (test, predict).
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
    both = ([config] if config.uses_cudagraphs else [config, replace(config, dynamic=True)] for config in configs)
    return [config for group in both for config in group]
