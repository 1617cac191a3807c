"""Python state in ``forward``: a run equals eager, or the callback leaves the target eager, or limits.md names it."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn

from compile_callbacks import CompileError, CompileWarning, InductorCompile
from tests.support.models import CLASSES, FEATURES, Classifier, fit

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

BASELINE_STEPS = 3
IS_OLDEST = torch.__version__.startswith("2.11.")
RANDOM = random.Random(7)
_cached = functools.lru_cache(lambda: [0])  # returns a list, which the calls change


def _default(calls=[]):  # noqa: B006
    calls.append(1)
    return len(calls)


class PythonState(nn.Module):
    """A linear layer whose output is scaled by the state of one kind, so that stale state changes the losses."""

    count: ClassVar[int] = 0

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(FEATURES, CLASSES), kind
        self.calls, self.deque, self.drawn = 0, collections.deque(maxlen=3), None
        self.own_random, self.numpy_generator = random.Random(7), np.random.default_rng(7)
        self.torch_generator = torch.Generator().manual_seed(7)
        PythonState.count = 0
        _default.__defaults__[0].clear()
        _cached.cache_clear()
        for seed in (random.seed, np.random.seed, RANDOM.seed):
            seed(7)

    def forward(self, x):
        return self.linear(x) * getattr(self, self.kind)()

    def state(self):
        """Return all states, for a comparison with an eager run."""
        own = self.own_random.getstate(), self.numpy_generator.bit_generator.state, self.torch_generator.get_state()
        of_process = random.getstate(), RANDOM.getstate(), np.random.get_state(legacy=False)
        return str((self.deque, self.count, _default.__defaults__, _cached(), *own, *of_process))

    # Containers and counts

    def full_deque(self):  # its sum stops growing with its length
        self.calls += 1
        self.deque.append(self.calls)
        return 1 + 0.01 * sum(self.deque)

    def class_attribute(self):
        type(self).count += 1
        return 1 + 0.01 * type(self).count

    def default_argument(self):
        return 1 + 0.01 * _default()

    def lru_cache(self):
        value = _cached()
        value[0] += 1
        return 1 + 0.01 * value[0]

    # Random generators

    def random_uniform(self):
        return random.uniform(0.5, 1.5)

    def random_sample(self):
        return 1 + 0.1 * random.sample(range(10), 1)[0]

    def random_object(self):
        return 1 + 0.1 * self.own_random.random()

    def sample_of_object(self):
        return 1 + 0.1 * self.own_random.sample(range(10), 1)[0]

    def global_object(self):  # torch 2.11 replays no draw, and breaks the graph only if Python computes with the number
        return RANDOM.uniform(0.5, 1.5)

    def numpy_random(self):
        return 1 + 0.1 * np.random.rand()

    def numpy_normal(self):
        return torch.from_numpy(np.random.normal(size=(CLASSES,)).astype("float32"))

    def numpy_object(self):
        return 1 + 0.1 * self.numpy_generator.random()

    def torch_object(self):
        return 1 + 0.1 * torch.rand((), generator=self.torch_generator)

    def seeds(self):  # each call leaves the generator in the same state, also in eager
        random.seed(3)
        return random.uniform(0.5, 1.5)

    def draws_once(self):
        if self.drawn is None:
            self.drawn = random.sample([0.5, 1.0, 1.5], 1)[0]
        return self.drawn


NAMED_IN_LIMITS = ["full_deque", "lru_cache", "numpy_normal"]
ONLY_OF_OLDEST = ["class_attribute", "default_argument"]  # named there, too
RANDOM_KINDS = [
    "random_uniform", "random_sample", "random_object", "sample_of_object", "global_object", "numpy_random",
    "numpy_object", "torch_object",
]  # fmt: skip
DRAWN_ONCE = ["global_object"] if IS_OLDEST else ["random_sample", "sample_of_object"]  # only while torch traces


def run(kind, *callbacks, make=Classifier):
    """The losses and the state after a run."""
    module = fit(*callbacks, make=lambda: make(PythonState(kind)), train=14, validation=None)
    return module.losses, module.net.state()


@pytest.mark.parametrize("kind", [*NAMED_IN_LIMITS, *ONLY_OF_OLDEST, *RANDOM_KINDS])
def test_python_state_is_as_in_eager_or_limits_name_it(kind):
    losses, state = run(kind)
    callback = InductorCompile(baseline_steps=BASELINE_STEPS)
    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():  # some kinds recompile in each step
        warnings.simplefilter("ignore")
        found_losses, found_state = run(kind, callback)
    report = callback.report.train
    assert report.graphs >= 1
    codes = {event["code"] for event in report.diagnostics.events if event["kind"] == "fallback"}
    is_equal = np.allclose(found_losses, losses, rtol=1e-4, atol=1e-5) and found_state == state
    assert is_equal == (kind not in NAMED_IN_LIMITS and not (IS_OLDEST and kind in ONLY_OF_OLDEST))
    assert ("CC306" in codes) == (kind in DRAWN_ONCE)


class DrawsBetween(Classifier):
    """Python's generator is also used between the calls of the target."""

    def training_step(self, batch, batch_idx):
        random.random()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("baseline_steps", [0, BASELINE_STEPS])
@pytest.mark.parametrize("kind", ["random_sample", "seeds", "draws_once"])
@pytest.mark.filterwarnings("ignore:target 'net' runs eagerly")
def test_target_runs_eagerly_if_torch_draws_while_it_traces(kind, baseline_steps):
    callback = InductorCompile(baseline_steps=baseline_steps)
    losses, _ = run(kind, callback, make=DrawsBetween)
    np.testing.assert_allclose(losses, run(kind, make=DrawsBetween)[0], rtol=1e-4)
    assert callback.report.train.graphs >= 1
    # torch 2.11 draws outside of the graph. After the baseline, `draws_once` draws no more.
    draws_in_trace = not IS_OLDEST and not (kind == "draws_once" and baseline_steps)
    assert callback.report.train.fallbacks == int(draws_in_trace)


@pytest.mark.parametrize("verify", ["off", "warn", "raise"])
def test_verify_decides_what_a_constant_draw_does(verify):
    callback = InductorCompile(baseline_steps=BASELINE_STEPS, verify=verify)
    expected = {
        "off": contextlib.nullcontext(),
        "warn": pytest.warns(CompileWarning, match="drew random numbers of Python .*CC306"),
        "raise": pytest.raises(CompileError, match="CC306"),
    }
    with expected[verify]:
        run(DRAWN_ONCE[0], callback)
    assert callback.report.train.fallbacks == (verify == "warn")
