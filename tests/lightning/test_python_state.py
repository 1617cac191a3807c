"""Python state in ``forward``: a run equals eager, or the callback leaves the target eager, or limits.md names it."""

from __future__ import annotations

import contextlib
import io
import random
import re
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch._dynamo

from compile_callbacks import CompileError, CompileWarning, InductorCompile
from compile_callbacks.calls.python_state import StateChanges
from tests.support.models import FEATURES, Classifier, fit
from tests.support.python_state import KINDS, NumpyNormal, OwnRandom, PythonState, RandomSample

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

STEPS, BASELINE_STEPS = 14, 3
IS_OLDEST = torch.__version__.startswith("2.11.")
NOT_AS_EAGER = {"Deque", "LruCache"} | ({"DefaultArgument"} if IS_OLDEST else set())
"""The kinds of state that limits.md names, because torch captures them wrongly, and no sign shows it."""


def run(kind: str, *callbacks: pl.Callback) -> tuple[dict[str, Any], list[str]]:
    """Train a module with a kind of Python state. Return what the run computed and printed, and our warnings."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = fit(*callbacks, make=lambda: Classifier(KINDS[kind]()), train=STEPS, validation=None)
    printed = re.findall(r"^call \d+$", output.getvalue(), flags=re.MULTILINE)
    warned = [str(warning.message) for warning in caught if str(warning.message).startswith("call ")]
    ours = [str(warning.message) for warning in caught if issubclass(warning.category, CompileWarning)]
    return {"losses": module.losses, "state": module.net.seen(), "output": [printed, warned]}, ours


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    losses = np.allclose(found["losses"], expected["losses"], rtol=1e-4, atol=1e-5)
    return losses and all(found[name] == expected[name] for name in ("state", "output"))


@pytest.mark.parametrize("kind", KINDS)
def test_python_state_is_as_in_eager_or_the_target_is_left_eager(kind):
    expected, _ = run(kind)
    callback = InductorCompile(baseline_steps=BASELINE_STEPS)
    with torch._dynamo.config.patch(recompile_limit=2):  # some kinds recompile in each step
        found, messages = run(kind, callback)
    report = callback.report.train
    assert report.graphs >= 1
    if any("CC306" in message for message in messages):
        assert [event["code"] for event in report.diagnostics.events if event["kind"] == "fallback"] == ["CC306"]
        assert kind not in NOT_AS_EAGER
        # Only some signs are seen before a call gets a wrong number.
        assert equal(found, expected) == any("only while it traced, so that" in message for message in messages)
    else:
        assert equal(found, expected) == (kind not in NOT_AS_EAGER)


class _DrawsBetween(Classifier):
    """Python's generator is also used between the calls of the target."""

    def training_step(self, batch, batch_idx):
        random.random()
        return super().training_step(batch, batch_idx)


class _Seeds(PythonState):
    """Each call leaves the generator in the same state, also in eager."""

    def scale(self, x):
        random.seed(3)
        return random.uniform(0.5, 1.5)


class _DrawsOnce(PythonState):
    """Only the first call draws."""

    def start(self):
        self.drawn = None

    def scale(self, x):
        if self.drawn is None:
            self.drawn = random.sample([0.5, 1.0, 1.5], 1)[0]
        return self.drawn


def draws_between(net, *callbacks):
    random.seed(0)
    return fit(*callbacks, make=lambda: _DrawsBetween(net()), train=STEPS, validation=None)


def test_generator_is_checked_if_other_code_draws_from_it():
    """torch 2.15 sets the generator to the same state in each call, and torch 2.11 draws outside of the graph."""
    callback = InductorCompile(baseline_steps=BASELINE_STEPS)
    with (
        contextlib.nullcontext()
        if IS_OLDEST
        else pytest.warns(CompileWarning, match="drew random numbers of Python .*CC306")
    ):
        draws_between(RandomSample, callback)
    assert callback.report.train.fallbacks == (0 if IS_OLDEST else 1)


@pytest.mark.parametrize("baseline_steps", [0, BASELINE_STEPS])
@pytest.mark.parametrize("net", [_Seeds, _DrawsOnce])
@pytest.mark.filterwarnings("ignore:target 'net' runs eagerly")
def test_target_stays_compiled_if_its_eager_calls_leave_the_generator_as_it_was(net, baseline_steps):
    callback = InductorCompile(baseline_steps=baseline_steps)
    compiled = draws_between(net, callback)
    np.testing.assert_allclose(compiled.losses, draws_between(net).losses, rtol=1e-4)
    assert callback.report.train.graphs >= 1
    # Without observed eager calls, torch 2.15 seems to draw only while it traces.
    assert callback.report.train.fallbacks == int(not baseline_steps and not IS_OLDEST)


@pytest.mark.parametrize("verify", ["off", "raise"])
def test_verify_decides_what_a_constant_generator_does(verify):
    callback = InductorCompile(baseline_steps=BASELINE_STEPS, verify=verify)
    expected = pytest.raises(CompileError, match="CC306") if verify == "raise" else contextlib.nullcontext()
    with expected:
        fit(callback, make=lambda: Classifier(NumpyNormal()), validation=None)
    assert callback.report.train.fallbacks == 0


def test_equal_generators_of_two_modules_are_not_one_that_is_set_to_the_same_state():
    changes = StateChanges()
    for module in (OwnRandom(), OwnRandom()):
        changes.call_begins(module)
        module(torch.ones(1, FEATURES))
        assert changes.call_ended(module)["generator"]
