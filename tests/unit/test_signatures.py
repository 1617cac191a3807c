"""What batches look like, within a bounded time."""

from __future__ import annotations

import statistics
import time
from collections import UserDict

import pytest
import torch

from compile_callbacks._utils.signatures import signature
from compile_callbacks.profiling.steps import workload_of


class Graph:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def cyclic():
    batch = [torch.zeros(2)]
    batch.append(batch)
    return batch


def deep():
    batch = torch.zeros(1)
    for _ in range(5000):
        batch = [batch]
    return batch


def tree(depth):
    return [tree(depth - 1) for _ in range(4)] if depth else torch.zeros(2)


LARGE = {
    "cyclic": cyclic,
    "deep": deep,
    "tree": lambda: tree(6),
    "numbers": lambda: [[float(number) for number in range(512)] for _ in range(64)],
    "texts": lambda: ["a"] * 100_000,
    "mapping": lambda: {f"key {index}": torch.zeros(2) for index in range(1000)},
    "object": lambda: Graph(**{f"attribute_{index}": torch.zeros(2) for index in range(1000)}),
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_large_batches_take_little_time(make):
    batch, seconds = make(), []
    for _ in range(51):
        started = time.perf_counter()
        workload_of("train", "1 of 1", signature(batch))
        seconds.append(time.perf_counter() - started)
    assert statistics.median(seconds) < 2e-4  # 15 to 35 µs on an idle core; an unbounded walk takes milliseconds


def test_signature_differs_by_shape_dtype_grad_and_place():
    x = torch.zeros(2, 3)
    batches = [
        x,
        [x],
        (x, x),
        torch.zeros(3, 2),
        x.half(),
        x.clone().requires_grad_(),
        {"x": x},
        {"y": x},
        UserDict(x=x, y=x),
        Graph(z=x),
        ["a"] * 40,
        ["a"] * 41,
    ]
    assert len({signature(batch) for batch in batches}) == len(batches)
