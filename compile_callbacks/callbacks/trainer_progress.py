"""Reads a Trainer's progress for `InductorCompile`: the remaining steps, and whether the run stops."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerStatus

from compile_callbacks._utils.phases import Phase


def is_stopping(trainer: weakref.ref[Trainer]) -> bool:
    """Return whether a Trainer has received SIGTERM, or an exception such as Ctrl-C has interrupted its run."""
    alive = trainer()
    return alive is not None and (alive.received_sigterm or alive.state.status == TrainerStatus.INTERRUPTED)


def remaining_steps(trainer: Trainer) -> Mapping[Phase, float]:
    """Return the number of batches that remain in the run for each phase, or ``math.inf`` if it is unknown.

    Call this function when a stage starts: the dataloaders exist then, and a resumed run has restored its progress.
    An earlier call would create the dataloaders too soon.
    """
    if trainer.state.fn != "fit":
        batches = {"validate": trainer.num_val_batches, "test": trainer.num_test_batches}
        return {"infer": float(sum(batches.get(str(trainer.state.fn), trainer.num_predict_batches)))}
    estimated = float(trainer.estimated_stepping_batches)  # -1 for batches without a number
    done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
    train = math.inf if estimated < 0 else max(0.0, estimated * trainer.accumulate_grad_batches - done)
    return {"train": train, "infer": _validation_batches(trainer, train)}


def _validation_batches(trainer: Trainer, train_batches: float) -> float:
    """Return the number of validation batches that remain in a fit, including the running validation."""
    if not trainer.enable_validation:
        return 0.0
    batches = float(sum(trainer.num_val_batches))  # empty if the loaders are not created yet
    between = trainer.val_check_batch  # infinite if an epoch of unknown length ends with it; None if it runs by time
    if batches == 0 or between is None:
        return math.inf
    between = trainer.num_training_batches if math.isinf(between) else between
    between *= trainer.check_val_every_n_epoch or 1
    if math.isinf(between) or math.isinf(train_batches):
        return math.inf
    return (train_batches // between + trainer.validating) * batches
