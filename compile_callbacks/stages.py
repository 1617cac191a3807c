"""How many steps a trainer has before it, by phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from compile_callbacks.phases import Phase

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def expected_steps(trainer: Trainer) -> Mapping[Phase, float]:
    """Batches to come in each phase of the run that begins; ``math.inf`` where that is not known."""
    if trainer.state.fn == "fit":
        return {"train": _train_batches(trainer), "infer": validation_batches(trainer)}
    batches: Mapping[str | None, Sequence[float]] = {
        "validate": trainer.num_val_batches,
        "test": trainer.num_test_batches,
        "predict": trainer.num_predict_batches,
    }
    return {"infer": float(sum(batches.get(trainer.state.fn, ())))}


def _train_batches(trainer: Trainer) -> float:
    # estimated_stepping_batches sets up the data loaders, as Lightning's own schedulers have it do.
    optimizer_steps = trainer.estimated_stepping_batches
    return optimizer_steps * trainer.accumulate_grad_batches


def validation_batches(trainer: Trainer) -> float:
    """Validation batches of a fit; ``math.inf`` where that is not known, as before the first validation."""
    batches = sum(trainer.num_val_batches) if trainer.enable_validation else 0
    if batches == 0:  # the loaders may not be made yet, or of unknown length
        return math.inf
    epochs = trainer.max_epochs
    if epochs is None or epochs < 0:
        return math.inf
    return float(batches * max(1, epochs // (trainer.check_val_every_n_epoch or 1)))
