"""Modules whose ``forward`` reads and changes Python state, one for each way in which Dynamo treats such state.

``forward`` computes with the state, so that stale state changes the losses.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import functools
import itertools
import random
import time
import warnings
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from tests.support.models import CLASSES, FEATURES

KINDS: dict[str, type[PythonState]] = {}


class PythonState(nn.Module):
    """A linear layer whose output is scaled by Python state, which `seen` returns for a comparison."""

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            KINDS[cls.__name__] = cls

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.start()

    def start(self) -> None:
        """Create the state, or reset the state of the class or of Python."""

    def scale(self, x: torch.Tensor) -> Any:
        """Read and change the state, and return a number near 1."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale(x)

    def seen(self) -> Any:
        """Return the state, for a comparison with an eager run."""
        raise NotImplementedError


# ------------------------------------------------------------------------------------------ clocks


class Clock(PythonState):
    """The state is how many different times the calls read."""

    def start(self):
        self.times = set()

    def scale(self, x):
        self.times.add(time.perf_counter_ns())
        return 1 + 0.01 * len(self.times)

    def seen(self):
        return len(self.times)


# ------------------------------------------------------------------------------------------ iterators and containers


class Iterator(PythonState):
    def start(self):
        self.values = iter([1.0 + 0.01 * i for i in range(1000)])

    def scale(self, x):
        return next(self.values)

    def seen(self):
        return next(self.values)


class Count(Iterator):
    def start(self):
        self.values = itertools.count(1)

    def scale(self, x):
        return 1 + 0.01 * next(self.values)


class Generator(Iterator):
    def start(self):
        def values():
            value = 1.0
            while True:
                yield value
                value += 0.01

        self.values = values()


class List(PythonState):
    def start(self):
        self.values = []

    def scale(self, x):
        self.values.append(len(self.values))
        return 1 + 0.01 * self.values[-1]

    def seen(self):
        return copy.copy(self.values)


class Deque(List):
    """A deque that is soon full: its sum stops growing with its length."""

    def start(self):
        self.values, self.calls = collections.deque(maxlen=3), 0

    def scale(self, x):
        self.calls += 1
        self.values.append(self.calls)
        return 1 + 0.01 * sum(self.values)


class Dict(List):
    def start(self):
        self.values = {}

    def scale(self, x):
        self.values["calls"] = self.values.get("calls", 0) + 1
        return 1 + 0.01 * self.values["calls"]


# ------------------------------------------------------------------------------------------ names of Python


class Attribute(PythonState):
    def start(self):
        self.calls = 0

    def scale(self, x):
        self.calls += 1
        return 1 + 0.01 * self.calls

    def seen(self):
        return self.calls


class ClassAttribute(Attribute):
    calls: ClassVar[int] = 0

    def start(self):
        type(self).calls = 0

    def scale(self, x):
        type(self).calls += 1
        return 1 + 0.01 * type(self).calls


class Property(PythonState):
    def start(self):
        self.reads = 0

    @property
    def read(self):
        self.reads += 1
        return self.reads

    def scale(self, x):
        return 1 + 0.01 * self.read

    def seen(self):
        return self.reads


class Closure(PythonState):
    def start(self):
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def scale(self, x):
        return 1 + 0.01 * self.count()

    def seen(self):
        return self.count()


calls_of_global = 0


class Global(PythonState):
    def start(self):
        globals()["calls_of_global"] = 0

    def scale(self, x):
        global calls_of_global  # noqa: PLW0603
        calls_of_global += 1
        return 1 + 0.01 * calls_of_global

    def seen(self):
        return calls_of_global


def _default(calls=[]):  # noqa: B006
    calls.append(1)
    return len(calls)


class DefaultArgument(PythonState):
    def start(self):
        _default.__defaults__[0].clear()

    def scale(self, x):
        return 1 + 0.01 * _default()

    def seen(self):
        return len(_default.__defaults__[0])


@functools.lru_cache
def _cached(calls):
    return [calls]


class LruCache(PythonState):
    """The cached function returns a list, which the calls change."""

    def start(self):
        _cached.cache_clear()

    def scale(self, x):
        value = _cached(0)
        value[0] += 1
        return 1 + 0.01 * value[0]

    def seen(self):
        return _cached(0)[0]


CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)


class ContextVariable(PythonState):
    def start(self):
        CONTEXT.set(0)

    def scale(self, x):
        CONTEXT.set(CONTEXT.get() + 1)
        return 1 + 0.01 * CONTEXT.get()

    def seen(self):
        return CONTEXT.get()


# ------------------------------------------------------------------------------------------ output


class Print(Attribute):
    """The test compares the standard output, too."""

    def scale(self, x):
        self.calls += 1
        print("call", self.calls)
        return 1.0


class Warnings(Attribute):
    """The test compares the warnings, too."""

    def scale(self, x):
        self.calls += 1
        warnings.warn(f"call {self.calls}", UserWarning, stacklevel=1)
        return 1.0


# ------------------------------------------------------------------------------------------ random generators


class RandomSample(PythonState):
    def start(self):
        random.seed(7)

    def scale(self, x):
        return 1 + 0.1 * random.sample(range(10), 1)[0]

    def seen(self):
        return random.getstate()


class RandomUniform(RandomSample):
    def scale(self, x):
        return random.uniform(0.5, 1.5)


class OwnRandom(PythonState):
    def start(self):
        self.generator = random.Random(7)

    def scale(self, x):
        return 1 + 0.1 * self.generator.random()

    def seen(self):
        return self.generator.getstate()


class OwnRandomSample(OwnRandom):
    def scale(self, x):
        return 1 + 0.1 * self.generator.sample(range(10), 1)[0]


class NumpyRandom(PythonState):
    def start(self):
        np.random.seed(7)

    def scale(self, x):
        return 1 + 0.1 * np.random.rand()

    def seen(self):
        return str(np.random.get_state(legacy=False))


class NumpyNormal(NumpyRandom):
    def scale(self, x):
        return torch.from_numpy(np.random.normal(size=(CLASSES,)).astype("float32"))


class NumpyGenerator(PythonState):
    def start(self):
        self.generator = np.random.default_rng(7)

    def scale(self, x):
        return 1 + 0.1 * self.generator.random()

    def seen(self):
        return str(self.generator.bit_generator.state)


RANDOM = random.Random(7)


class GlobalRandom(PythonState):
    def start(self):
        RANDOM.seed(7)

    def scale(self, x):
        return 1 + 0.1 * RANDOM.sample(range(10), 1)[0]

    def seen(self):
        return RANDOM.getstate()


class TorchRandom(PythonState):
    def start(self):
        self.generator = torch.Generator().manual_seed(7)

    def scale(self, x):
        return 1 + 0.1 * torch.rand((), generator=self.generator)

    def seen(self):
        return self.generator.get_state().tolist()
