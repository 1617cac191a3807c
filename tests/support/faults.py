"""The ways in which a compiler fails, each provoked for real or at torch's boundary, and where and when it strikes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._inductor.graph
from torch import nn
from torch.utils.data import DataLoader

from compile_callbacks import InductorCompile, InductorConfig
from tests.support.models import CLASSES, FEATURES, Classifier, loader
from tests.support.uncached import Uncached

FULL, RAGGED = 4, 2  # batch sizes: the second comes last in each epoch, and is the later shape


# ------------------------------------------------------------------------------------------ where it strikes


@dataclass(frozen=True)
class Place:
    """A phase, a half of the step, and the shape at which the compiler fails."""

    phase: str
    half: str
    shape: str

    def __str__(self) -> str:
        return f"{self.phase}-{self.half}-{self.shape}"

    def struck(self, x: torch.Tensor, *, training: bool) -> bool:
        """Whether the code of this forward pass is the one that cannot be compiled."""
        return training == (self.phase == "train") and (self.shape == "first" or x.shape[0] == RAGGED)


PLACES = [
    Place(phase, half, shape)
    for phase, half in [("train", "forward"), ("train", "backward"), ("infer", "forward")]
    for shape in ("first", "later")
]


class Net(nn.Module):
    """Layers with buffers, and between them something that its subclass has to say."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.first = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.place.struck(x, training=self.training):
            x = self.strange(x)
        return self.last(x)

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x


# ------------------------------------------------------------------------------------------ what Dynamo cannot trace


class Untraceable(Net):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        if self.place.half == "backward":
            return BackwardUntraceable.apply(x)
        torch._dynamo.graph_break()
        return 2 * x


class BackwardUntraceable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return 2 * gradient


# ------------------------------------------------------------------------------------------ failures inside Inductor


class BrokenPass(Uncached):
    """Raises in one phase and half of the step, at the first graph or from the second one on."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.graphs_seen = 0

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        half = "backward" if any(node.name.startswith("tangents") for node in graph.nodes) else "forward"
        if (self.phase, half) != (self.place.phase, self.place.half):
            return
        self.graphs_seen += 1
        if self.place.shape == "first" or self.graphs_seen > 1:
            raise ZeroDivisionError("by design")


@contextlib.contextmanager
def out_of_memory_in_inductor(place: Place) -> Iterator[None]:
    """Raise an error where Inductor has lowered a graph and begins to make code of it."""
    lowering = torch._inductor.graph.GraphLowering
    real, seen = lowering.compile_to_module, []

    def compile_to_module(self: Any) -> Any:
        half = "backward" if self.is_backward else "forward"
        if (half, self.is_inference) == (place.half, place.phase == "infer"):
            seen.append(self)
            if place.shape == "first" or len(seen) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self)

    with mock.patch.object(lowering, "compile_to_module", compile_to_module):
        yield


# ------------------------------------------------------------------------------------------ the matrix


@dataclass(frozen=True)
class Fault:
    """A way in which the compiler fails."""

    name: str
    cause: str  # what the report says; alternatives are divided by "|"
    net: Callable[[Place], nn.Module] = Net
    settings: dict[str, Any] = field(default_factory=dict)  # of the phase in which the compiler fails
    passes: Callable[[Place], list[Any]] = lambda place: []
    strike: Callable[[Place], Any] = lambda place: contextlib.nullcontext()  # a context around the run
    skipped: bool = False  # whether the graph is compiled without the custom pass that fails

    def callback(self, place: Place, on_error: str = "eager") -> InductorCompile:
        config, other = InductorConfig(**self.settings), "default"
        modes = (config, other) if place.phase == "train" else (other, config)
        return InductorCompile(*modes, targets=["net"], passes=self.passes(place), baseline_steps=0, on_error=on_error)


FAULTS = [
    Fault("untraceable", "graph_break|autograd.Function", Untraceable, {"fullgraph": True}),
    Fault("pass", "ZeroDivisionError: by design", passes=lambda place: [BrokenPass(place)], skipped=True),
    Fault(
        "memory_in_inductor",
        "OutOfMemoryError: CUDA",
        passes=lambda place: [Uncached()],  # no code is written for a graph that comes out of the cache
        strike=out_of_memory_in_inductor,
    ),
]


def _pairs() -> Iterator[tuple[Fault, Place]]:
    """Each fault in each phase and half, at the first and the later shape by turns: all pairs, half of the matrix."""
    for row, fault in enumerate(FAULTS):
        for column, place in enumerate(PLACES):
            if column % 2 == (row + column // 2) % 2:
                yield fault, place


MATRIX = [pytest.param(fault, place, id=f"{fault.name}-{place}") for fault, place in _pairs()]


def ragged(batches: int) -> DataLoader:
    """Batches of which the last is smaller."""
    dataset = loader(batches, FULL).dataset
    return DataLoader(torch.utils.data.Subset(dataset, range(FULL * batches - FULL + RAGGED)), FULL)


RAGGED_BATCHES: dict[str, Any] = {"train": ragged(4), "validation": ragged(2), "num_sanity_val_steps": 0}


def run_of(net: Callable[[], nn.Module]) -> dict[str, Any]:
    """The arguments of `fit` for two epochs in which each phase sees both shapes."""
    return {"make": lambda: Classifier(net()), "max_epochs": 2, **RAGGED_BATCHES}
