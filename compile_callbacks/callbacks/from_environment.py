"""Adds an `InductorCompile` to each Trainer of a script that nobody edits: ``COMPILE_CALLBACKS=auto python train.py``.

Lightning calls `callbacks_from_environment` for each new Trainer. This file imports `InductorCompile` only if the
variable is set, because a process that does not compile should not import the compiler.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from compile_callbacks.background import IS_HELPER

if TYPE_CHECKING:
    from compile_callbacks.callbacks.inductor_compile import InductorCompile

VARIABLE = "COMPILE_CALLBACKS"


class CompileFromEnvironment(Callback):
    """Replaces itself with an `InductorCompile` when a run begins, unless the Trainer has one.

    Only then are all callbacks known, because Lightning adds those of entry points and of the module to the script's.
    """

    def __init__(self, callback: InductorCompile, value: str) -> None:
        self.callback, self.value = callback, value

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # one of its connectors sets it
        has_own = any(isinstance(callback, type(self.callback)) for callback in callbacks)
        replacement = [] if has_own else [self.callback]
        # A new list, because Lightning iterates over the old one.
        trainer.callbacks = [  # type: ignore[attr-defined]
            other for callback in callbacks for other in (replacement if callback is self else [callback])
        ]
        if has_own:
            rank_zero_info(f"{VARIABLE}={self.value} has no effect, because the script has its own InductorCompile")
        else:
            self.callback.setup(trainer, pl_module, stage)


def callbacks_from_environment() -> list[Callback]:
    """Return the callback for the mode in the environment variable, or no callback if the variable is not set."""
    if not (value := os.environ.get(VARIABLE, "")) or IS_HELPER in os.environ:
        return []
    from compile_callbacks.callbacks.inductor_compile import InductorCompile
    from compile_callbacks.tuning.tune import as_phase_config

    as_phase_config(value, VARIABLE)  # an error names the variable
    return [CompileFromEnvironment(InductorCompile(value, value), value)]
