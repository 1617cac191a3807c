"""`Trial`: a candidate of a `Contest` and its blocks of steps. `candidates_of` lists the candidates of a `Tune`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import InductorConfig, Variant
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
    rounds: int = 0  # the rounds so far: a block of the candidate and a block of eager
    lacks_steps: bool = False  # whether a longer run may decide otherwise

    @property
    def candidate(self) -> str:
        """The settings in one line, or ``"eager"``."""
        return str(self.variant.name)

    @property
    def samples(self) -> list[float]:
        """The compared step times, in milliseconds."""
        return list(itertools.chain(*self.blocks))

    @property
    def ms(self) -> float:
        """The median of the compared step times, or infinity without a sample."""
        return statistics.median(self.samples) if self.samples else math.inf

    @property
    def autotunes(self) -> bool:
        """Whether Inductor measures kernels when it compiles the candidate."""
        return self.variant.config is not None and self.variant.config.mode.startswith("max-autotune")

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
            "median_ms": self.ms if samples else None,
            "p95_ms": twentieths[18] if twentieths else None,
            "samples": len(samples),
            "compile_seconds": None if self.facts is None or self.variant.config is None else self.facts.seconds,
            "reason": self.reason,
        }


def candidates_of(tune: Tune, phase: Phase, device: torch.device, sharded: str | None) -> Iterator[Trial]:
    """Return a trial for each candidate in order, without eager. The verdict of an excluded candidate is "not tried".

    ``sharded`` is the reason why the targets cannot have frozen weights or CUDA graphs, if their weights are sharded.
    """
    no_cudagraphs = sharded or (None if device.type == "cuda" else "the module is not on a GPU")
    names: Counter[str] = Counter()
    for config in tune.configs or _auto(device, frozen=phase == "infer" and sharded is None):
        name = config.describe()
        names[name] += 1
        if names[name] > 1:  # two candidates may have different passes of the same class
            name = f"{name} ({names[name]})"
        trial = Trial(Variant(config, name))
        if config.uses_cudagraphs and no_cudagraphs:
            trial.decide("not tried", f"it asks for CUDA graphs, but {no_cudagraphs}")
        elif config.freezes and phase == "infer" and sharded:
            trial.decide("not tried", f"it asks for freezing, but {sharded}")
        yield trial


def _auto(device: torch.device, *, frozen: bool) -> list[InductorConfig]:
    """Return the first candidates of ``"auto"``. Freezing has an effect only in stages that do not train."""
    freezing = frozen or None
    if device.type != "cuda":
        return [InductorConfig(freezing=freezing)]
    return [InductorConfig(), InductorConfig(mode="reduce-overhead", freezing=freezing)]


def trial_of(config: InductorConfig) -> Trial:
    """Return a candidate that ``"auto"`` adds during a run."""
    return Trial(Variant(config, config.describe(), healed=bool(config.dynamo)))
