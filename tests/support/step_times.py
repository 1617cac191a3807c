"""A clock for steps, which take as long as a test says, and compiles that cost nothing."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import Classifier

CLOCK = "compile_callbacks.profiling.clock"
"""The only part of the library that tests replace."""


class Times:
    """Replaces the clock: milliseconds by ``"eager"`` or candidate, or a function of that and the workload.

    A list has the milliseconds of the candidate's first steps, and the last entry counts for all others. An entry may
    also be a function of the number of the step among those of the candidate. A step without an entry, or in which
    torch compiles, takes its real time.
    """

    def __init__(self, monkeypatch, train: Any = None, infer: Any = None) -> None:
        self._ms = {"train": train or {}, "infer": infer or {}}
        self._ahead = 0.0  # of the real clock, in seconds
        self.counts: Counter[tuple[str, str | None]] = Counter()
        monkeypatch.setattr(f"{CLOCK}.now", self.now)
        monkeypatch.setattr(f"{CLOCK}.seconds", self.now)

    def advance(self, seconds: float) -> None:
        """Let time pass, as a compile does."""
        self._ahead += seconds

    def now(self, device=None, *, start=None, phase=None, candidate=None, workload=None) -> float:
        now = time.perf_counter() + self._ahead
        if phase is None or (ms := self._of_step(phase, candidate, workload)) is None or workload is None:
            return now
        self._ahead += start + ms / 1000 - now
        return start + ms / 1000

    def _of_step(self, phase: str, candidate: str | None, workload: Any) -> float | None:
        of_phase, number = self._ms[phase], self.counts[phase, candidate]
        self.counts[phase, candidate] += 1
        if callable(of_phase):
            return None if workload is None else of_phase(candidate, workload)
        ms = of_phase.get(candidate)
        if isinstance(ms, list):
            return ms[min(number, len(ms) - 1)]
        return ms(number) if callable(ms) else ms


class OnDevice(Classifier):
    """Says that it is on an accelerator, so that a machine without one decides as with one.

    Calls a function with the number of each step.
    """

    def __init__(self, device: str, net: Any = None, in_step: Callable[[int], Any] = lambda step: None) -> None:
        super().__init__(net)
        weight = type("OnDevice", (nn.Parameter,), {"device": torch.device(device, 0)})
        self._parameters["on_device"], self.in_step = weight(torch.zeros(1)), in_step

    def training_step(self, batch, batch_idx):
        self.in_step(batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1)


def noisy(ms: float, noise: float = 0.02, *, seed: int = 0, spikes: float = 0.0) -> Callable[[int], float]:
    """Step times with normal noise. Some of the steps, the ``spikes``, take ten times as long."""
    draw = random.Random(f"{ms} {seed}")
    return lambda number: ms * (1 + noise * abs(draw.gauss(0, 1))) * (10 if draw.random() < spikes else 1)


@contextlib.contextmanager
def captured_graphs(
    times: Times,
    seconds: Mapping[int, float] = MappingProxyType({}),
    raises: Mapping[int, Exception] = MappingProxyType({}),
) -> Iterator[None]:
    """Put the captured graph in Inductor's place. The n-th compile takes the given ``seconds``, or 2, or ``raises``."""
    count = 0

    def compile_fx(graph_module: torch.fx.GraphModule, inputs: Any, **arguments: Any) -> Callable[..., Any]:
        nonlocal count
        number, count = count, count + 1
        times.advance(seconds.get(number, 2.0))
        if number in raises:
            raise raises[number]
        return graph_module.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
        yield
