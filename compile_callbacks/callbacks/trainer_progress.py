"""What `InductorCompile` asks a Trainer about its run: the stage, the remaining steps, whether it stops."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerStatus

from compile_callbacks._utils.phases import Phase
from compile_callbacks.runtime.measurements import Stage


def stage_of(trainer: Trainer, phase: Phase, *, nested: bool) -> Stage:
    """The stage that a Trainer is in.

    Args:
        trainer: The trainer.
        phase: The phase of the stage.
        nested: Whether a Trainer call within another one runs it.
    """
    return Stage(
        phase=phase,
        name="validate" if trainer.sanity_checking else str(trainer.state.stage.value),  # type: ignore[union-attr]
        sanity=trainer.sanity_checking,
        nested=nested,
        weights_frozen=trainer.state.fn != "fit" and not nested,
    )


def is_stopping(trainer: weakref.ref[Trainer]) -> bool:
    """Whether a Trainer has received SIGTERM, or its run was interrupted by an exception such as Ctrl-C's."""
    alive = trainer()
    return alive is not None and (alive.received_sigterm or alive.state.status == TrainerStatus.INTERRUPTED)


def remaining_steps(trainer: Trainer) -> Mapping[Phase, float]:
    """Batches that remain of the run in each phase; ``math.inf`` if that is not known.

    Call this when a stage starts: the dataloaders exist then, and a resumed run has restored its progress. An earlier
    call would create the dataloaders too soon.
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
        # By hand, as in a GAN, each optimizer is taken to step in each batch; the trainer counts all of their steps.
        by_hand = not trainer.lightning_module.automatic_optimization
        steps_a_batch = max(1, len(trainer.optimizers)) if by_hand else 1
        steps = (trainer.max_steps - trainer.global_step) // steps_a_batch
        left = min(left, steps * trainer.accumulate_grad_batches)
    return max(0.0, float(left))


def _batches_done(trainer: Trainer, batches: float) -> float:
    """The number of training batches done.

    It assumes that each past epoch had as many batches as this one, because a resumed run may have other dataloaders.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    done = float(progress.total.ready)
    if math.isinf(batches) or trainer.current_epoch * batches <= done <= (trainer.current_epoch + 1) * batches:
        return done
    of_epoch = float(progress.current.ready)
    if of_epoch >= batches:  # of an epoch that is over, at whose end a validation may be
        of_epoch = batches if trainer.validating else 0.0
    return trainer.current_epoch * batches + of_epoch


def _validation_batches(trainer: Trainer, train_batches: float) -> float:
    """The validation batches that remain in a fit, including the running validation."""
    if not trainer.enable_validation:
        return 0.0
    batches = float(sum(trainer.num_val_batches))  # empty if the loaders are not created yet
    between = trainer.val_check_batch  # infinite: once an epoch, of a length that is not known; None: by the clock
    if batches == 0 or between is None:
        return math.inf
    if math.isinf(between):
        between = trainer.num_training_batches
    between *= trainer.check_val_every_n_epoch or 1
    if math.isinf(between) or math.isinf(train_batches):
        return math.inf
    validations = train_batches // between + (1 if trainer.validating else 0)
    return validations * batches if validations else 0.0
