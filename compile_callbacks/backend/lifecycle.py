"""The states of an `InductorBackend`, and which call leads from which to which."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Literal

from compile_callbacks.links import see

State = Literal["init", "active", "inactive", "checkpoint_loaded", "deployed"]
"""Where a backend stands."""

TRANSITIONS: Mapping[State, Mapping[str, State]] = types.MappingProxyType(
    {
        "init": {"build": "active"},
        "active": {"infer": "active", "deactivate": "inactive", "to_dict": "active", "key": "active"},
        "inactive": {"activate": "active", "to_dict": "inactive", "key": "inactive"},
        "checkpoint_loaded": {
            "activate": "active",
            "deploy": "deployed",
            "to_dict": "checkpoint_loaded",
            "key": "checkpoint_loaded",
        },
        "deployed": {"infer": "deployed", "key": "deployed"},
    }
)
"""The calls that each state allows, and the state that each leads to when it succeeds. One that fails changes none."""

CALLS: tuple[str, ...] = tuple(dict.fromkeys(call for allowed in TRANSITIONS.values() for call in allowed))
"""The calls that depend on the state."""


def next_state(name: str, state: State, call: str) -> State:
    """The state that a call leads to.

    Args:
        name: What the message calls the backend.
        state: The state that the call is made in.
        call: The name of the method.

    Raises:
        RuntimeError: The state does not allow the call.
    """
    allowed = TRANSITIONS[state]
    if call not in allowed:
        choices = ", ".join(f"{choice}()" for choice in allowed)
        message = f"{name}: {call}() is not allowed in the state {state!r}; allowed in it: {choices}"
        raise RuntimeError(see(message, "a-backend-in-another-state"))
    return allowed[call]


def allows(state: State, call: str) -> bool:
    """Whether a state allows a call."""
    return call in TRANSITIONS[state]


def table() -> list[str]:
    """The transitions as lines of text, one a state, as documentation has them.

    Example::

        >>> table()[0]
        'init: build -> active'
    """
    return [
        f"{state}: " + ", ".join(call if after == state else f"{call} -> {after}" for call, after in allowed.items())
        for state, allowed in TRANSITIONS.items()
    ]
