"""`InductorCompile` for the package ``pytorch_lightning``, which has its own Trainer, `LightningCLI` and exceptions.

``pip install pytorch-lightning`` and ``pip install lightning`` install two copies of the same library. Their Trainers
run callbacks of either copy, but `LightningCLI`, and a Trainer that gets a callback without a list, check the class.
"""

from __future__ import annotations

import pytorch_lightning
from lightning_fabric.utilities.exceptions import MisconfigurationException

from compile_callbacks.callbacks import inductor_compile


class InductorCompile(inductor_compile.InductorCompile, pytorch_lightning.Callback):  # type: ignore[misc]  # its Trainer
    """`compile_callbacks.InductorCompile`, with the same arguments, as a callback of ``pytorch_lightning``."""

    _misconfiguration = MisconfigurationException
