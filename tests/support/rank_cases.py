"""Cases of DDP training, which each of two processes runs one after the other, and the results of each process.

LOCAL_RANK=0 python -m tests.support.rank_cases FOLDER CASE ... and the same with LOCAL_RANK=1, in a new folder
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch._inductor.graph
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from compile_callbacks import InductorCompile, Tune
from tests.support.models import CLASSES, FEATURES, Classifier, RecordingLogger, batches_of, loader, seeded, trainer
from tests.support.pairs import ACCELERATOR, BACKEND, join, run_cases
from tests.support.passes import Uncached

RANK = int(os.environ.get("LOCAL_RANK", "0"))
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
GROUPS = itertools.count()
MODE = {"cpu": "fast", "gpu": "reduce-overhead"}[ACCELERATOR]  # without eager steps, "fast" is "default"


def fit(module: Classifier, *callbacks: pl.Callback, timeout: float = 600, ddp: Any = None, **settings: Any) -> Any:
    """Train on both processes, in a process group with this timeout; Lightning uses a group that exists."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    join(FOLDER, f"{sys.argv[2]}.{next(GROUPS)}", timeout)
    strategy = DDPStrategy(process_group_backend=BACKEND, **(ddp or {}))
    train, validate = settings.pop("train", loader(12)), settings.pop("validate", loader(8, seed=2))
    defaults = {"accelerator": ACCELERATOR, "devices": 2, "strategy": strategy, "num_sanity_val_steps": 0}
    run = trainer(*callbacks, **(defaults | settings))
    run.fit(module, train, validate)
    return run


def result_of(module: Classifier) -> dict[str, Any]:
    state = {name: value.flatten()[:100].tolist() for name, value in module.state_dict().items()}
    return {"losses": module.losses, "outputs": [out.tolist() for out in module.validation_outputs], "state": state}


def report_of(ours: InductorCompile) -> dict[str, Any]:
    return {phase: ours.report.to_dict()[phase] for phase in ("train", "infer")}


def both(make: Any = Classifier, *, ours: Any = None, **settings: Any) -> Any:
    """A run without the callback, and the same with it."""
    ours = ours or InductorCompile(MODE, MODE, baseline_steps=0)
    eager, compiled = seeded(make), seeded(make)
    fit(eager, **settings)
    fit(compiled, ours, **settings)
    return {"eager": result_of(eager), "compiled": result_of(compiled), "report": report_of(ours)}


class Branches(Classifier):
    """Takes another branch on each process, and leaves weights unused."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(CLASSES, CLASSES)
        self.never = nn.Linear(CLASSES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.net(batch[0])
        if self.global_rank == batch_idx % 2:
            x = self.more(x)
        loss = nn.functional.cross_entropy(x, batch[1])
        self.losses.append(loss.item())
        return loss


class Wide(Classifier):
    """Has more weights than the first of DDP's buckets holds, which is 1 MiB."""

    def __init__(self) -> None:
        layers = [nn.Linear(FEATURES, 520), nn.ReLU(), nn.Linear(520, 520), nn.ReLU()]
        super().__init__(nn.Sequential(*layers, nn.Linear(520, CLASSES)))


def plain() -> dict[str, Any]:
    return both(ours=InductorCompile(baseline_steps=2), max_epochs=2, logger=RecordingLogger(FOLDER))


def different() -> dict[str, Any]:
    """Half of the batches of the second process are smaller."""
    train = batches_of(*[4, 4 - 2 * RANK] * 6)
    return both(ours=InductorCompile(baseline_steps=4), train=train, use_distributed_sampler=False)


def find_unused_parameters() -> dict[str, Any]:
    return both(Branches, ddp={"find_unused_parameters": True})


def accumulation() -> dict[str, Any]:
    return both(Wide, accumulate_grad_batches=2, ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 1})


# ------------------------------------------------------------------------------------------ one rank is different


def failure() -> dict[str, Any]:
    """The compiler fails on the second process."""
    run = torch._inductor.graph.GraphLowering.run

    def fail_on_second(self: Any, *args: Any) -> Any:
        if RANK:
            raise RuntimeError("this lowering is not there")
        return run(self, *args)

    with mock.patch.object(torch._inductor.graph.GraphLowering, "run", fail_on_second):
        return both(ours=InductorCompile(baseline_steps=0, verify="off", passes=[Uncached()]))


class Uneven(Classifier):
    """Reduces the logged value at the end of each loader; the loaders of the processes have different lengths."""

    def val_dataloader(self) -> Any:
        rank = torch.distributed.get_rank()
        return [loader(2 + 3 * rank), loader(6 - 3 * rank)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


def uneven() -> dict[str, Any]:
    ours, patience = InductorCompile(None, Tune(["default"], steps=5), baseline_steps=2, verify="off"), 60.0
    began = time.monotonic()
    settings = {"validate": None, "max_epochs": 8, "use_distributed_sampler": False}
    run = fit(seeded(Uneven), ours, timeout=patience, train=loader(2), **settings)
    losses = {name: float(value) for name, value in run.callback_metrics.items()}
    return {"report": report_of(ours), "losses": losses, "waited": time.monotonic() - began > patience}


def tuned() -> dict[str, Any]:
    ours = InductorCompile(Tune(["default", "aten"], steps=10), None, cache_dir=FOLDER / "cache", verify="off")
    module = seeded()
    fit(module, ours, train=loader(260))
    return {"report": report_of(ours), "compiled": result_of(module)}


if __name__ == "__main__":
    run_cases(FOLDER, [globals()[case] for case in sys.argv[2:]])
