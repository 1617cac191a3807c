"""`Trial`: a candidate of a `Contest` and its blocks of steps. `candidates_of` lists the candidates of a `Tune`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.dynamo_settings import SWITCHES
from compile_callbacks.config.inductor_config import InductorConfig, Variant
from compile_callbacks.profiling.comparison import median_ms
from compile_callbacks.tuning.tune import Tune

Verdict = Literal["undecided", "chosen", "beaten", "not faster", "not compared", "failed", "wrong", "not tried"]
"""The result of a candidate. ``"not faster"``: not faster than eager by 1% and by more than noise.
``"not compared"``: too few steps can be compared. ``"not tried"``: never compiled.
"""


class CompileFacts(NamedTuple):
    """The facts in the compile events of a candidate so far."""

    seconds: float = 0.0  # the compile time
    problem: tuple[Verdict, str] | None = None  # the reason why the candidate cannot win
    healing: tuple[str, ...] = ()  # the settings of Dynamo that may remove some of its graph breaks


@dataclass
class Trial:
    """The result of one candidate."""

    variant: Variant
    verdict: Verdict = "undecided"
    reason: str | None = None  # the reason for the verdict, if the numbers do not show it
    blocks: list[list[float]] = field(default_factory=list)  # the step times of each block, in milliseconds
    facts: CompileFacts | None = None
    rounds: int = 0  # of the final of a `Tune`: a block of the candidate and a block of eager

    @property
    def candidate(self) -> str:
        """The settings in one line, or ``"eager"``."""
        return str(self.variant.name)

    @property
    def samples(self) -> list[float]:
        """The compared step times, in milliseconds."""
        return list(itertools.chain(*self.blocks))

    @property
    def median_ms(self) -> float | None:
        """The median of the compared step times, or ``None`` without a sample."""
        return median_ms(self.samples)

    def decide(self, verdict: Verdict, reason: str | None = None) -> None:
        """Set the result."""
        self.verdict, self.reason = verdict, reason

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as JSON-ready data, with the median and the 95th percentile of the compared step times."""
        samples = self.samples
        twentieths = statistics.quantiles(samples, n=20, method="inclusive") if len(samples) > 1 else samples * 20
        return {
            "candidate": self.candidate,
            "verdict": self.verdict,
            "median_ms": self.median_ms,
            "p95_ms": twentieths[18] if twentieths else None,
            "samples": len(samples),
            "compile_seconds": None if self.facts is None or self.variant.config is None else self.facts.seconds,
            "reason": self.reason,
        }


def candidates_of(
    tune: Tune,
    phase: Phase,
    device: torch.device,
    *,
    sharded: str | None,
    shapes_vary: bool,
    winner: str | None = None,
) -> Iterator[Trial]:
    """Return a trial for each candidate in order, without eager. The verdict of an excluded candidate is "not tried".

    ``winner`` won in an earlier run, or on another rank. If ``"auto"`` added settings of Dynamo to it, it is listed.

    ``sharded`` is the reason why the targets cannot have frozen weights or CUDA graphs, if their weights are sharded.
    """
    configs = tune.configs or auto_candidates(device, phase, freezes=sharded is None, shapes_vary=shapes_vary)
    no_cudagraphs = sharded or (None if device.type == "cuda" else "the module is not on a GPU")
    names: list[str] = []
    for config in configs:
        name = config.describe()
        names.append(name)
        if (count := names.count(name)) > 1:  # two candidates may have different passes of the same class
            name = f"{name} ({count})"
        trial = Trial(Variant(config, name))
        if config.uses_cudagraphs and no_cudagraphs:
            trial.decide("not tried", f"it asks for CUDA graphs, but {no_cudagraphs}")
        elif config.freezes and phase == "infer" and sharded:
            trial.decide("not tried", f"it asks for freezing, but {sharded}")
        yield trial
        if len(names) == 1 and not tune.configs and (healing := [name for name in SWITCHES if name in (winner or "")]):
            yield healed(trial, healing)


def healed(trial: Trial, settings: Iterable[str]) -> Trial:
    """Return a candidate with the same settings, and with these settings of Dynamo, which remove graph breaks."""
    assert trial.variant.config is not None
    config = replace(trial.variant.config, dynamo=dict.fromkeys(settings, True))
    return Trial(Variant(config, config.describe(), healed=True))


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
