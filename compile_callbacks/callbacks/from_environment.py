"""Adds an `InductorCompile` to each Trainer of a script that nobody edits: ``COMPILE_CALLBACKS=auto python train.py``.

Lightning calls `callbacks_from_environment` for each new Trainer, also the copy in the package ``pytorch_lightning``.
This file imports the compiler and Lightning only if the variable is set, because they take seconds.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from compile_callbacks.background import IS_HELPER

if TYPE_CHECKING:
    from lightning.pytorch import Callback

VARIABLE = "COMPILE_CALLBACKS"


def callbacks_from_environment() -> list[Callback]:
    """Return the callback for the mode in the environment variable, or none if it is not set, empty or ``0``."""
    if (value := os.environ.get(VARIABLE, "")) in ("", "0") or IS_HELPER in os.environ:
        return []
    from compile_callbacks.callbacks.inductor_compile import InductorCompile
    from compile_callbacks.tuning.tune import as_phase_config

    value = "fast" if value == "1" else value
    as_phase_config(value, VARIABLE)  # an error names the variable
    callback = InductorCompile(value, value)
    callback.from_environment = True
    return [callback]
