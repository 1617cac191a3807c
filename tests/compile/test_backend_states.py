"""`InductorBackend`: which call each state allows, and where it leads."""

from __future__ import annotations

import pytest
import torch

from compile_callbacks import InductorBackend
from compile_callbacks.inference.backend import TRANSITIONS
from tests.support.backend_models import SAMPLES, batch, linear

pytestmark = pytest.mark.usefixtures("dropped_backends_go", "no_codegen")


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


@pytest.mark.parametrize("state", TRANSITIONS)
def test_a_call_that_the_state_does_not_allow_is_refused(in_state, state):
    backend = in_state(state)
    for call in CALL.keys() - TRANSITIONS[state].keys():
        with pytest.raises(RuntimeError) as raised:
            CALL[call](backend)
        said = str(raised.value)
        assert said.startswith(f"InductorBackend: {call}() is not allowed in the state {state!r}")
        assert all(f"{allowed}()" in said for allowed in TRANSITIONS[state])
        assert backend.state == state


@pytest.mark.parametrize(("state", "call"), [(state, call) for state in TRANSITIONS for call in TRANSITIONS[state]])
def test_a_call_leads_to_its_state(in_state, state, call):
    backend = in_state(state)
    CALL[call](backend)
    after = TRANSITIONS[state][call]
    assert backend.state == after
    assert backend.is_active == (after in ("active", "deployed"))
    assert backend.describe().endswith(after)
    if backend.is_active:
        with torch.no_grad():
            torch.testing.assert_close(backend.infer(batch()), linear()(batch()))
