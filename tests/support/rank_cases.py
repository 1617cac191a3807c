"""Run by each of two processes: cases of training together, one after another, and what each process saw of them.

    LOCAL_RANK=0 python -m tests.support.rank_cases FOLDER CASE ... and the same with LOCAL_RANK=1, in a new folder

Leaves ``FOLDER/CASE.RANK.json`` of what a case gave, and ``.err`` and ``.out`` of what it printed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch._inductor.graph
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from compile_callbacks import CompileWarning, GraphPass, InductorCompile, Tune, _torch
from tests.support.models import CLASSES, FEATURES, Classifier, loader, seeded, trainer
from tests.support.pairs import join
from tests.support.uncached import Uncached

RANK = int(os.environ.get("LOCAL_RANK", "0"))
# CONTRIBUTING.md tells how to make both longer.
PATIENCE = float(os.environ.get("RANK_CASES_TIMEOUT", "4"))  # the timeout of collectives where a rank is slow
SLOW = float(os.environ.get("RANK_CASES_SLOW", "6"))  # and how much longer one rank compiles
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
GROUPS = itertools.count()


# ------------------------------------------------------------------------------------------ what the cases use


def new_group(timeout: float) -> None:
    """Create the process group with this timeout. Lightning uses a group that exists."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    join(FOLDER, f"{sys.argv[2]}.{next(GROUPS)}", timeout)


def fit(module: Classifier, *callbacks: pl.Callback, timeout: float = 300, ddp: Any = None, **settings: Any) -> Any:
    """Train on both processes, in a process group of its own."""
    new_group(timeout)
    strategy = DDPStrategy(process_group_backend="gloo", **(ddp or {}))
    train, validate = settings.pop("train", None) or loader(12), settings.pop("validate", None) or loader(8, seed=2)
    path = settings.pop("ckpt_path", None)
    ours = trainer(*callbacks, **({"strategy": strategy, "devices": 2, "num_sanity_val_steps": 0} | settings))
    ours.fit(module, train, validate, ckpt_path=path)
    return ours


def timeouts() -> list[float]:
    """The timeouts of the rank's collectives, in seconds."""
    return sorted(timeout.total_seconds() for _, timeout in _torch.distributed.collective_timeouts())


class Timeouts(pl.Callback):
    """The timeouts while the trainer runs."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.during = timeouts()


def seen(module: Classifier) -> dict[str, Any]:
    """What a module saw, and how it came out of it."""
    state = {name: value.flatten()[:100].tolist() for name, value in module.state_dict().items()}
    return {"losses": module.losses, "outputs": [out.tolist() for out in module.validation_outputs], "state": state}


def told(ours: InductorCompile) -> dict[str, Any]:
    report = ours.report.to_dict()
    return {phase: {name: report[phase][name] for name in report[phase]} for phase in ("train", "infer")}


def both(make: Any = Classifier, **settings: Any) -> dict[str, Any]:
    """A run with the callback, and the same without."""
    ours = InductorCompile(baseline_steps=settings.pop("baseline_steps", 0))
    eager, compiled = seeded(make), seeded(make)
    fit(eager, **settings)
    fit(compiled, ours, **settings)
    return {"eager": seen(eager), "compiled": seen(compiled), "report": told(ours)}


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
    """More weights than the first of DDP's buckets holds, which is of 1 MiB."""

    def __init__(self) -> None:
        width = 520
        layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        super().__init__(nn.Sequential(*layers, nn.Linear(width, CLASSES)))


class Synced(Classifier):
    """Waits for the other process between forward and backward, as a loss that is logged for all does."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss


class Sleeps(GraphPass):
    """Takes its time, once; for other seconds it is another pass to torch's cache."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.slept = False

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        if not self.slept:
            self.slept = True
            time.sleep(self.seconds)


class Growing(torch.utils.data.Dataset):
    """Batches of 4 for the first process, and from the third on of 5 for the second."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        size = 5 if RANK and index > 2 else 4
        generator = torch.Generator().manual_seed(index)
        return torch.randn(size, FEATURES, generator=generator), torch.zeros(size, dtype=torch.long)


class Uneven(torch.utils.data.Dataset):
    """A batch less for the second process."""

    def __len__(self) -> int:
        return 4 - RANK

    def __getitem__(self, index: int) -> Any:
        return torch.ones(4, FEATURES) * index, torch.zeros(4, dtype=torch.long)


def compiler_fails_on_second() -> Any:
    run = torch._inductor.graph.GraphLowering.run

    def fail_on_second(self: Any, *args: Any) -> Any:
        if RANK:
            raise RuntimeError("this lowering is not there")
        return run(self, *args)

    return mock.patch.object(torch._inductor.graph.GraphLowering, "run", fail_on_second)


# ------------------------------------------------------------------------------------------ the cases


def plain() -> dict[str, Any]:
    path = str(FOLDER / "two.ckpt")
    ours = InductorCompile(baseline_steps=2)
    eager, compiled = seeded(), seeded()
    fit(eager, max_epochs=2)
    done = fit(compiled, ours, max_epochs=2)
    done.save_checkpoint(path)
    calls = [record["call"] for record in json.loads(Path(done.log_dir, "compile_report.json").read_text())]
    both = {"eager": seen(eager), "compiled": seen(compiled), "calls": calls}
    return {**both, "report": told(ours), "scalars": ours.report.scalars()}


def find_unused_parameters() -> dict[str, Any]:
    return both(Branches, ddp={"find_unused_parameters": True})


def static_graph() -> dict[str, Any]:
    return both(Wide, ddp={"static_graph": True, "bucket_cap_mb": 1})


def accumulation() -> dict[str, Any]:
    return both(Wide, accumulate_grad_batches=2, ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 1})


def split() -> dict[str, Any]:
    with mock.patch.object(torch._dynamo.config, "optimize_ddp", "ddp_optimizer"):
        return both(Wide, ddp={"bucket_cap_mb": 1})


def failure() -> dict[str, Any]:
    ours = InductorCompile(baseline_steps=0, verify="off", passes=[Uncached()])
    eager, compiled = seeded(), seeded()
    fit(eager)
    with compiler_fails_on_second():
        fit(compiled, ours)
    return {"eager": seen(eager), "compiled": seen(compiled), "report": told(ours)}


def slow_compile() -> dict[str, Any]:
    ours = InductorCompile(baseline_steps=0, verify="off", passes=[Sleeps(SLOW if RANK else 0)])
    eager, compiled = seeded(Synced), seeded(Synced)
    fit(eager)
    observed, began = Timeouts(), time.monotonic()
    fit(compiled, ours, observed, timeout=PATIENCE)
    return {
        "eager": seen(eager),
        "compiled": seen(compiled),
        "report": told(ours),
        "seconds": time.monotonic() - began,
        "during": observed.during,
        "timeouts": timeouts(),
    }


class SleepsLater(Uncached):
    """Takes its time, once, for the larger batches of `Growing`."""

    slept = False

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        later = any(node.meta["val"].shape[:1] == (5,) for node in graph.nodes if node.op == "placeholder")
        if later and not self.slept:
            self.slept = True
            time.sleep(SLOW)


def exception() -> dict[str, Any]:
    """Both ranks raise in their third step."""

    class Raises(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise KeyError("batch 2")
            return super().training_step(batch, batch_idx)

    try:
        fit(seeded(Raises), InductorCompile(baseline_steps=0, verify="off"), timeout=60)
    except KeyError as error:
        return {"error": str(error), "timeouts": timeouts()}
    return {}


def slow_recompile() -> dict[str, Any]:
    ours = InductorCompile({"dynamic": False}, None, baseline_steps=0, verify="off", passes=[SleepsLater()])
    eager, compiled = seeded(), seeded()
    settings = {"train": DataLoader(Growing(), batch_size=None), "use_distributed_sampler": False}
    fit(eager, **settings)
    fit(compiled, ours, timeout=PATIENCE, **settings)
    return {"eager": seen(eager), "compiled": seen(compiled), "report": told(ours)}


class SyncedValidation(Classifier):
    """Logs a loss for all processes; its batch norm has DDP send buffers to all of them before each step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.validation_outputs.append(out.detach().clone())
        self.log("val_loss", nn.functional.cross_entropy(out, batch[1]), sync_dist=True)


def slow_validation() -> dict[str, Any]:
    """One process compiles in the middle of a validation, and the other goes on to the next step's collective."""
    ours = InductorCompile(None, {"dynamic": False}, baseline_steps=0, verify="off", passes=[SleepsLater()])
    eager, compiled = seeded(SyncedValidation), seeded(SyncedValidation)
    validate = DataLoader(Growing(), batch_size=None)
    settings = {"train": loader(4), "validate": validate, "use_distributed_sampler": False}
    fit(eager, **settings)
    fit(compiled, ours, timeout=PATIENCE, **settings)
    return {"eager": seen(eager), "compiled": seen(compiled), "report": told(ours)}


def uneven_validation() -> dict[str, Any]:
    ours = InductorCompile(None, Tune(["default"], steps=5), verify="off")
    module = seeded()
    new_group(300)
    strategy = DDPStrategy(process_group_backend="gloo")
    both = trainer(ours, strategy=strategy, devices=2, use_distributed_sampler=False, max_epochs=24)
    both.fit(module, loader(2), DataLoader(Uneven(), batch_size=None))
    return {"report": told(ours), "validated": len(module.validation_outputs)}


class LoggedValidation(Classifier):
    """What it logs is reduced when a loader ends, of which processes have unequally many batches."""

    def val_dataloader(self) -> Any:
        rank = torch.distributed.get_rank()
        return [loader(2 + 3 * rank), loader(5 - 3 * rank)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


def uneven_logged() -> dict[str, Any]:
    ours = InductorCompile(None, "default", baseline_steps=2, verify="off")
    module = seeded(LoggedValidation)
    patience = 15 * PATIENCE  # the compiles of a slow machine are well below it
    new_group(patience)
    strategy = DDPStrategy(process_group_backend="gloo")
    began = time.monotonic()
    both = trainer(ours, strategy=strategy, devices=2, use_distributed_sampler=False, max_epochs=3)
    both.fit(module, loader(2))
    seconds = time.monotonic() - began
    losses = {name: float(value) for name, value in both.callback_metrics.items()}
    return {"report": told(ours), "losses": losses, "s": seconds, "patience": patience}


def uneven_tuned() -> dict[str, Any]:
    """Tunes validation, in which a loader's end is a collective that the ranks come to after unequal steps."""
    ours = InductorCompile(None, Tune(["default"], steps=5), verify="off")
    module = seeded(LoggedValidation)
    new_group(60)
    strategy = DDPStrategy(process_group_backend="gloo")
    both = trainer(ours, strategy=strategy, devices=2, use_distributed_sampler=False, max_epochs=8)
    both.fit(module, loader(2))
    return {"report": told(ours), "losses": {name: float(value) for name, value in both.callback_metrics.items()}}


def tuned() -> dict[str, Any]:
    ours = InductorCompile(Tune(["default", "aten"], steps=10), None, cache_dir=FOLDER / "cache", verify="off")
    module = seeded()
    fit(module, ours, train=loader(260))
    return {"report": told(ours), "compiled": seen(module)}


class ComparesValidation(Classifier):
    """Keeps how far each validation output is from what eager code computes with the current weights."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_outputs.append((self.net(batch[0]) - self.net._call_impl(batch[0])).abs().max())


def folding() -> dict[str, Any]:
    ours = InductorCompile(None, "default", targets=["net"], baseline_steps=0, verify="off")
    module = seeded(ComparesValidation)
    fit(module, ours, max_epochs=2)
    return {"report": told(ours), "apart": [float(apart) for apart in module.validation_outputs]}


def resumed_from_one() -> dict[str, Any]:
    ours = InductorCompile(baseline_steps=2)
    module = seeded()
    done = fit(module, ours, max_epochs=2, ckpt_path=str(FOLDER / "one.ckpt"))
    return {"report": told(ours), "compiled": seen(module), "epoch": done.current_epoch}


def main() -> None:
    torch.manual_seed(0)
    for case in sys.argv[2:]:
        torch._dynamo.reset()
        with (
            (FOLDER / f"{case}.{RANK}.out").open("w") as out,
            (FOLDER / f"{case}.{RANK}.err").open("w") as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            began = time.monotonic()
            try:
                result = globals()[case]()
            except BaseException:
                result = {"raised": traceback.format_exc()}
        result["warnings"] = [str(w.message) for w in caught if issubclass(w.category, CompileWarning)]
        result["groups"] = len(torch.distributed.distributed_c10d._world.pg_map)
        result["wall_seconds"], result["cpu_seconds"] = time.monotonic() - began, sum(os.times()[:4])
        (FOLDER / f"{case}.{RANK}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
