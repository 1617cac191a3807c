"""Reads a Trainer's progress for `InductorCompile`: the remaining steps, and whether the run stops."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence

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
    if trainer.state.fn == "fit":
        train_batches = _train_batches(trainer)
        return {"train": train_batches, "infer": _validation_batches(trainer, train_batches)}
    batches: Mapping[str | None, Sequence[float]] = {
        "validate": trainer.num_val_batches,
        "test": trainer.num_test_batches,
        "predict": trainer.num_predict_batches,
    }
    return {"infer": float(sum(batches.get(trainer.state.fn, ())))}


def _train_batches(trainer: Trainer) -> float:
    epochs = math.inf if trainer.max_epochs is None or trainer.max_epochs < 0 else trainer.max_epochs
    batches = trainer.num_training_batches
    left = epochs * batches - _batches_done(trainer, batches) if epochs else 0
    if trainer.max_steps >= 0:
        # With manual optimization, as in a GAN, the trainer counts the steps of all optimizers. We assume that each
        # optimizer steps once in each batch.
        by_hand = not trainer.lightning_module.automatic_optimization
        steps_a_batch = max(1, len(trainer.optimizers)) if by_hand else 1
        steps = (trainer.max_steps - trainer.global_step) // steps_a_batch
        left = min(left, steps * trainer.accumulate_grad_batches)
    return max(0.0, float(left))


def _batches_done(trainer: Trainer, batches: float) -> float:
    """Return the number of finished training batches.

    This assumes that each past epoch had the batches of the current epoch, because a resumed run may have other
    dataloaders.
    """
    if math.isinf(batches):
        return 0.0  # because the remaining batches are infinite, too
    of_epoch = float(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
    if of_epoch >= batches:  # the count of the last epoch, unless the validation at the end of this epoch runs
        of_epoch = batches if trainer.validating else 0.0
    return trainer.current_epoch * batches + of_epoch


def _validation_batches(trainer: Trainer, train_batches: float) -> float:
    """Return the number of validation batches that remain in a fit, including the running validation."""
    if not trainer.enable_validation:
        return 0.0
    batches = float(sum(trainer.num_val_batches))  # empty if the loaders are not created yet
    between = trainer.val_check_batch  # infinite if an epoch of unknown length ends with it; None if it runs by time
    if batches == 0 or between is None:
        return math.inf
    if math.isinf(between):
        between = trainer.num_training_batches
    between *= trainer.check_val_every_n_epoch or 1
    if math.isinf(between) or math.isinf(train_batches):
        return math.inf
    validations = train_batches // between + (1 if trainer.validating else 0)
    return validations * batches if validations else 0.0
