"""The remaining steps of a trainer, by which baselines and tuning are planned."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader, IterableDataset

from compile_callbacks.callbacks.trainer_progress import remaining_steps
from tests.support.models import fit, loader

INF = math.inf


class Stream(IterableDataset):
    """Batches without a length."""

    def __iter__(self):
        yield from loader(8)


STREAM = DataLoader(Stream(), batch_size=None)


class Remaining(pl.Callback):
    """The remaining train and infer steps at the start of training and of each validation."""

    def on_train_start(self, trainer, *_):
        if not trainer.sanity_checking:
            self.steps = [*getattr(self, "steps", []), tuple(remaining_steps(trainer).values())]

    on_validation_start = on_train_start


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 2}, [(16, 8), (8, 8), (0, 4)]),
        ({"max_epochs": 2, "check_val_every_n_epoch": 2}, [(16, 4), (0, 4)]),
        ({"max_epochs": 1, "val_check_interval": 3}, [(8, 8), (5, 8), (2, 4)]),
        ({"max_epochs": 3, "val_check_interval": 12, "check_val_every_n_epoch": None}, [(24, 8), (12, 8), (0, 4)]),
        ({"max_epochs": 9, "max_steps": 5, "accumulate_grad_batches": 2}, [(10, 4), (2, 4)]),
        ({"max_epochs": 1, "limit_train_batches": 2}, [(2, 4), (0, 4)]),
        ({"max_epochs": 1, "train": STREAM}, [(INF, INF), (INF, INF)]),
        ({"max_epochs": -1, "max_steps": 6, "train": STREAM}, [(6, INF)]),
        ({"max_epochs": 6, "validation": None, "ckpt_path": "shorter"}, [(32, 0)]),
    ],
)
def test_remaining_steps_of_a_fit_and_of_one_that_continues_a_run(settings, steps, tmp_path):
    if "ckpt_path" in settings:
        settings = {**settings, "ckpt_path": tmp_path / "run.ckpt"}
        fit(max_epochs=2).trainer.save_checkpoint(settings["ckpt_path"])
    seen = Remaining()
    fit(seen, **{"validation": 4, **settings})
    assert seen.steps == steps
