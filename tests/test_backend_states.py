"""`InductorBackend`: which call each state allows, and where it leads."""

from __future__ import annotations

import pytest
import torch
from backend_models import SAMPLES, batch, linear

from compile_callbacks import InductorBackend
from compile_callbacks.backend.lifecycle import CALLS, TRANSITIONS, table

pytestmark = [pytest.mark.newest, pytest.mark.usefixtures("dropped_backends_go")]


@pytest.fixture(scope="module")
def saved():
    backend = InductorBackend().build(linear(), SAMPLES)
    state = backend.to_dict()
    backend.deactivate()
    return state


@pytest.fixture
def in_state(saved):
    def make(state):
        if state in ("checkpoint_loaded", "deployed"):
            backend = InductorBackend.from_dict(linear(), saved)
            if state == "deployed":
                backend.deploy("cpu")
            return backend
        backend = InductorBackend()
        if state != "init":
            backend.build(linear(), SAMPLES)
        if state == "inactive":
            backend.deactivate()
        return backend

    return make


CALL = {
    "build": lambda backend: backend.build(linear(), SAMPLES),
    "infer": lambda backend: backend.infer(batch()),
    "deactivate": lambda backend: backend.deactivate(),
    "activate": lambda backend: backend.activate(),
    "deploy": lambda backend: backend.deploy("cpu"),
    "to_dict": lambda backend: backend.to_dict(),
    "key": lambda backend: backend.key(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", TRANSITIONS)
def test_each_call_in_each_state(in_state, state, call):
    backend = in_state(state)
    assert backend.state == state
    if call in TRANSITIONS[state]:
        CALL[call](backend)
        after = TRANSITIONS[state][call]
    else:
        with pytest.raises(RuntimeError) as raised:
            CALL[call](backend)
        said = str(raised.value)
        assert said.startswith(f"InductorBackend: {call}() is not allowed in the state {state!r}")
        assert all(f"{allowed}()" in said for allowed in TRANSITIONS[state])
        after = state
    assert backend.state == after
    assert backend.is_active == (after in ("active", "deployed"))
    assert backend.describe().endswith(after)
    if backend.is_active:
        with torch.no_grad():
            torch.testing.assert_close(backend.infer(batch()), linear()(batch()))


def test_the_states_are_documented_and_there_is_a_test_of_each_call():
    assert all(f"        {line}\n" in InductorBackend.__doc__ for line in table())
    assert set(CALL) == set(CALLS)


def test_a_backend_that_is_not_built_has_no_module_and_no_device():
    backend = InductorBackend("max-autotune-no-cudagraphs", name="scores")
    assert backend.describe() == "scores: no module, max-autotune-no-cudagraphs, no device, init"
    assert (backend.device, backend.name, backend.config.mode) == (None, "scores", "max-autotune-no-cudagraphs")
    assert (backend.report.infer.mode, backend.report.train.mode) == ("max-autotune-no-cudagraphs", "eager")
