"""What `InductorCompile` reads from a Trainer, and how it undoes the user's own ``torch.compile`` of the module."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from compile_callbacks._utils.errors import warn_user
from compile_callbacks._utils.phases import Phase
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.targets.resolve import resolve_targets
from compile_callbacks.targets.target import Target
from compile_callbacks.targets.users_compile import LIGHTNING_MODULE, unwrap_compiled


def is_stopping(trainer: weakref.ref[Trainer]) -> bool:
    """Return whether a Trainer has received SIGTERM, or an exception such as Ctrl-C has interrupted its run."""
    alive = trainer()
    return alive is not None and (alive.received_sigterm or alive.state.status == TrainerStatus.INTERRUPTED)


def remaining_steps(trainer: Trainer) -> Mapping[Phase, float]:
    """Return the number of batches that remain in the run for each phase, or ``math.inf`` if it is unknown.

    Call this function when a stage starts: an earlier call would create the dataloaders too soon.
    """
    if trainer.state.fn != "fit":
        batches = {"validate": trainer.num_val_batches, "test": trainer.num_test_batches}
        return {"infer": float(sum(batches.get(trainer.state.fn or "", trainer.num_predict_batches)))}
    estimated = float(trainer.estimated_stepping_batches)  # -1 for batches without a number
    done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
    train = math.inf if estimated < 0 else max(0.0, estimated * trainer.accumulate_grad_batches - done)
    of_validation = float(sum(trainer.num_val_batches))  # 0 if the loaders are not created yet
    between = trainer.val_check_batch  # infinite if an epoch of unknown length ends with it; None if it runs by time
    between = trainer.num_training_batches if between == math.inf else between
    infer = math.inf
    if of_validation and between is not None and math.isfinite(train + between):
        infer = (train // (between * (trainer.check_val_every_n_epoch or 1)) + trainer.validating) * of_validation
    return {"train": train, "infer": infer if trainer.enable_validation else 0.0}


def undo_users_compile(pl_module: LightningModule, arguments: CompileArguments, trainer: Trainer | None = None) -> None:
    """Undo the user's ``torch.compile``, so that ``_orig_mod.`` is in no key and this callback's settings apply."""
    if replaced := unwrap_compiled(pl_module, arguments.uncompiled):
        rank_zero_info(
            f"InductorCompile replaces your torch.compile of {', '.join(replaced)}: it compiles the original module "
            "with train_mode and infer_mode while a trainer runs. With the mode 'eager', a phase runs as compiled"
        )
    children = [name for name in replaced if name != LIGHTNING_MODULE]
    if children and trainer is not None and trainer.state.fn == "fit" and trainer.checkpoint_callbacks:
        name = type(pl_module).__name__
        message = (
            f"the checkpoints of this fit have no '_orig_mod.' in their keys. If {name}.__init__ calls torch.compile "
            f"for {', '.join(children)}, {name}.load_from_checkpoint will fail: remove torch.compile there"
        )
        rank_zero_only(warn_user)("CC405", message)


def resolve_again(pl_module: LightningModule, arguments: CompileArguments) -> Sequence[Target]:
    """Return the targets of a module that changed during a run."""
    undo_users_compile(pl_module, arguments)
    return resolve_targets(pl_module, arguments.targets or (), changed=True)
