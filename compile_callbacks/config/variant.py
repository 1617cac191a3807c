"""`Variant`: a config that a step can run."""

from __future__ import annotations

from typing import NamedTuple

from compile_callbacks._utils.phases import EAGER
from compile_callbacks.config.inductor_config import InductorConfig


class Variant(NamedTuple):
    """A config that a step can run, with its name. Eager is a variant without a config.

    Attributes:
        config: The config, or ``None`` if this library does not compile the step.
        name: The name of a candidate of a `Tune`, ``"eager"``, or ``None`` for the only config of a phase.
    """

    config: InductorConfig | None = None
    name: str | None = None


EAGER_VARIANT = Variant(None, EAGER)

WAITING_VARIANT = Variant(None, "waiting")
"""Eager steps while another process compiles, which may slow them."""
