"""`Trial`: a candidate of a `Contest`, its blocks of steps, and the rule by which it wins."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import InductorConfig, Variant
from compile_callbacks.profiling.comparison import MIN_SAMPLES, compare
from compile_callbacks.tuning.tune import Tune

LEVEL, MIN_SPEEDUP = 0.99, 1.01
"""The confidence level and the speedup over eager that a candidate needs. The level is stricter than in the report,
because a `Tune` compares each candidate with eager, and one false result is enough for a wrong choice."""

MAX_ROUNDS, MAX_LOST_ROUNDS = 10, 1
"""The number of rounds if none decides earlier, and how many of them the winner may lose. A candidate that is as fast
as eager loses at most one of ten rounds with a probability of 11 / 2**10, about 1 - `LEVEL`."""

FIRST_COMPILE_SECONDS, AUTOTUNE_COST, AUTOTUNE_SECONDS, SAVED_SHARE, AUTOTUNE_SHARE = 5.0, 8.0, 240.0, 0.8, 0.2
"""Rough values: the compile time until one is measured, its factor and least value if Inductor measures kernels (others
may be in torch's cache), and the largest share of a step that a candidate may save, without and with measurements."""

Verdict = Literal["undecided", "chosen", "beaten", "not faster", "not compared", "failed", "wrong", "not tried"]
"""The result of a candidate. ``"not faster"``: not faster than eager by 1% and by more than noise."""


class CompileFacts(NamedTuple):
    """The facts in the compile events of a candidate so far."""

    seconds: float = 0.0  # the compile time
    problem: tuple[Verdict, str] | None = None  # the reason why the candidate cannot win
    healing: tuple[str, ...] = ()  # the settings of Dynamo that may remove some of its graph breaks


@dataclass(eq=False)
class Trial:
    """The result of one candidate."""

    variant: Variant
    verdict: Verdict = "undecided"
    reason: str | None = None  # the reason for the verdict, if the numbers do not show it
    blocks: list[list[float]] = field(default_factory=list)  # the step times of each block, in milliseconds
    facts: CompileFacts = field(default_factory=CompileFacts)
    rounds: int = 0  # the rounds so far: a block of the candidate and a block of eager

    @property
    def samples(self) -> list[float]:
        """The compared step times, in milliseconds."""
        return [milliseconds for block in self.blocks for milliseconds in block]

    @property
    def ms(self) -> float:
        """The median of the compared step times, or infinity without a sample."""
        return statistics.median(self.samples) if self.samples else math.inf

    def wins(self, eager: Trial) -> bool | None:
        """Return whether the candidate is faster than eager, or ``None`` if another round may decide.

        It must be faster by `MIN_SPEEDUP` and by more than noise. Each block is a window of `compare`, so a disturbance
        of one block decides nothing. If disturbances are frequent, the candidate also wins if it lost at most
        `MAX_LOST_ROUNDS`: the blocks of a round ran after each other, so a disturbance of some rounds changes both.
        """
        if self.verdict != "undecided" or min(len(self.samples), len(eager.samples)) < MIN_SAMPLES:
            return False
        if not self.rounds:
            return None if self.ms * MIN_SPEEDUP < eager.ms else False
        if (found := compare(eager.blocks, self.blocks, LEVEL)) and found.low > MIN_SPEEDUP:
            return True
        median, rounds = statistics.median, zip(eager.blocks[-self.rounds :], self.blocks[-self.rounds :], strict=False)
        lost = sum(not (ours and theirs and median(ours) * MIN_SPEEDUP < median(theirs)) for theirs, ours in rounds)
        return False if lost > MAX_LOST_ROUNDS else True if self.rounds == MAX_ROUNDS else None

    def lose(self, eager: Trial) -> None:
        """Set the result of a candidate that is not faster than eager, unless it failed."""
        samples, noise = min(len(self.samples), len(eager.samples)), ", which is within noise" if self.rounds else ""
        if self.verdict == "undecided" and samples < MIN_SAMPLES:
            self.verdict, self.reason = "not compared", f"only {samples} steps can be compared"
        elif self.verdict == "undecided":
            self.verdict, self.reason = "not faster", f"{eager.ms / self.ms:.2f} times as fast as eager{noise}"

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as JSON-ready data, with the median and the 95th percentile of the compared step times."""
        samples = self.samples
        twentieths = statistics.quantiles(samples, n=20, method="inclusive") if len(samples) > 1 else samples * 20
        return {
            "candidate": str(self.variant.name),
            "verdict": self.verdict,
            "median_ms": self.ms if samples else None,
            "p95_ms": twentieths[18] if twentieths else None,
            "samples": len(samples),
            "compile_seconds": self.facts.seconds if self.blocks and self.variant.config else None,
            "reason": self.reason,
        }


def of_tune(tune: Tune, phase: Phase, device: torch.device, sharded: str | None, fast: Variant) -> dict[str, Trial]:
    """Return the candidates by name, without eager. The verdict of an excluded candidate is "not tried".

    ``sharded`` is the reason why the targets cannot have frozen weights or CUDA graphs, if their weights are sharded.
    The first candidate of ``"auto"`` is the config that the mode "fast" would become.
    """
    freezing = (phase == "infer" and sharded is None) or None  # has an effect only in stages that do not train
    auto = [InductorConfig(), InductorConfig(mode="reduce-overhead", freezing=freezing)][:: -1 if fast.static else 1]
    trials: dict[str, Trial] = {}
    for config in tune.configs or (auto if device.type == "cuda" else [InductorConfig(freezing=freezing)]):
        name = config.describe()
        while name in trials:  # two candidates may have different passes of the same class
            name += "'"
        trials[name] = trial = Trial(Variant(config, name, static=not tune.configs and config.uses_cudagraphs))
        if sharded and (config.uses_cudagraphs or (config.freezes and phase == "infer")):
            trial.verdict, trial.reason = "not tried", sharded
        elif config.uses_cudagraphs and device.type != "cuda":
            trial.verdict, trial.reason = "not tried", "it asks for CUDA graphs, but the module is not on a GPU"
    return trials


def why_not_compiled(trial: Trial, best: Trial, trials: Mapping[str, Trial], steps_left: float) -> str:
    """Return the reason why a candidate is not worth its compile time, or "" if it may be."""
    autotunes = "max-autotune" in str(trial.variant.name)
    seconds = max(each.facts.seconds for each in trials.values()) or FIRST_COMPILE_SECONDS
    seconds = max(seconds * AUTOTUNE_COST, AUTOTUNE_SECONDS) if autotunes else seconds
    saved_seconds = max(0.0, steps_left) * best.ms / 1000 * (AUTOTUNE_SHARE if autotunes else SAVED_SHARE)
    could_save = f"the {max(0.0, steps_left):.0f} steps that remain could save {saved_seconds:.1f} s at best"
    return "" if saved_seconds >= seconds else f"{could_save}, and compiling takes about {seconds:.0f} s"
