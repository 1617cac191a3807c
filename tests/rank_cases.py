"""Run by each of two processes: cases of training together, one after another, and what each process saw of them.

    LOCAL_RANK=0 python tests/rank_cases.py FOLDER CASE ... and the same with LOCAL_RANK=1, in a new folder

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
from models import CLASSES, FEATURES, Classifier, loader, seeded, trainer
from pairs import join
from torch import nn
from torch.utils.data import DataLoader
from uncached import Uncached

from compile_callbacks import CompileError, CompileWarning, GraphPass, InductorCompile, Tune
from compile_callbacks.processes import ranks
from compile_callbacks.processes.ranks import Ranks

RANK = int(os.environ.get("LOCAL_RANK", "0"))
# CONTRIBUTING.md: longer waits.
PATIENCE = float(os.environ.get("RANK_CASES_TIMEOUT", "4"))  # the timeout of collectives where a rank is slow
SLOW = float(os.environ.get("RANK_CASES_SLOW", "6"))  # and how much longer one rank compiles
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
GROUPS = itertools.count()


# ------------------------------------------------------------------------------------------ what the cases use


def new_group(timeout: float) -> None:
    """Make the process group anew: each has a timeout of its own. Lightning takes the one that is there."""
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
    return {"eager": seen(eager), "compiled": seen(compiled), "report": told(ours), "scalars": ours.report.scalars()}


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


def failure_raises() -> dict[str, Any]:
    ours = InductorCompile(baseline_steps=0, verify="off", on_error="raise", passes=[Uncached()])
    try:
        with compiler_fails_on_second():
            fit(seeded(), ours)
    except CompileError as error:
        return {"error": str(error)}
    return {}


def slow_compile() -> dict[str, Any]:
    ours = InductorCompile(baseline_steps=0, verify="off", passes=[Sleeps(SLOW if RANK else 0)])
    eager, compiled = seeded(Synced), seeded(Synced)
    fit(eager)
    began = time.monotonic()
    fit(compiled, ours, timeout=PATIENCE)
    return {
        "eager": seen(eager),
        "compiled": seen(compiled),
        "report": told(ours),
        "seconds": time.monotonic() - began,
    }


def waits_within_a_target() -> dict[str, Any]:
    """A loss is logged for all within what is compiled: the first process waits there for the second."""
    ours = InductorCompile("default", None, targets=["training_step"], baseline_steps=0)
    eager, compiled = seeded(Synced), seeded(Synced)
    fit(eager)
    with mock.patch.object(ranks, "_TURN_SECONDS", 1.0):
        fit(compiled, ours, timeout=60)
    return {"eager": seen(eager), "compiled": seen(compiled), "report": told(ours)}


class SleepsLater(Uncached):
    """Takes its time, once, for the larger batches of `Growing`."""

    slept = False

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        later = any(node.meta["val"].shape[:1] == (5,) for node in graph.nodes if node.op == "placeholder")
        if later and not self.slept:
            self.slept = True
            time.sleep(SLOW)


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
    both = trainer(ours, strategy=strategy, devices=2, use_distributed_sampler=False, max_epochs=8)
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


def tuned() -> dict[str, Any]:
    ours = InductorCompile(Tune(["default", "aten"], steps=10), None, cache_dir=FOLDER / "cache", verify="off")
    module = seeded()
    fit(module, ours, train=loader(260))
    return {"report": told(ours), "compiled": seen(module)}


def resumed_from_one() -> dict[str, Any]:
    ours = InductorCompile(baseline_steps=2)
    module = seeded()
    done = fit(module, ours, max_epochs=2, ckpt_path=str(FOLDER / "one.ckpt"))
    return {"report": told(ours), "compiled": seen(module), "epoch": done.current_epoch}


def waiting() -> dict[str, Any]:
    """Meetings by themselves: some that one process leaves out, a wait for a compile, and one in vain."""
    new_group(1)
    told: list[float] = []
    ranks = Ranks("here", on_wait=told.append)
    heard, elsewhere = [], None
    if RANK == 0:
        heard += ranks.meet().news
        heard += ranks.meet("of zero").news
        elsewhere = ranks.meet(value=RANK).values
    heard += ranks.meet_in_step("of one" if RANK else None).news
    values = ranks.meet(value=RANK).values
    steps_met = [len(ranks.meet_in_step().news) for _ in range(1 + RANK)]  # a step less in the first process
    heard += ranks.meet_after_steps(None if RANK else "of zero, after all").news
    if RANK == 1:
        ranks.compile_begins()
        time.sleep(2.5)
        ranks.compile_ends()
    ranks.meet_at_end_of_stage()
    waited = told[-1] if told else 0
    if RANK == 1:
        time.sleep(4)
    began = time.monotonic()
    ranks.meet()
    in_vain = time.monotonic() - began
    torch.distributed.destroy_process_group()
    return {
        "follows": ranks.follows,
        "elsewhere": elsewhere,
        "heard": heard,
        "values": values,
        "steps_met": steps_met,
        "waited": waited,
        "in_vain": in_vain,
        "destroyed_after": time.monotonic() - began,
        "current": ranks.current,
    }


def farewell() -> dict[str, Any]:
    """One process leaves by an error before the other comes to where they would meet."""
    new_group(300)
    ranks, heard = Ranks("here"), []
    began = time.monotonic()
    if RANK == 0:
        time.sleep(1.5)
        heard = ranks.meet("unheard").news
    else:
        ranks.leave("of one")
    return {"heard": heard, "current": ranks.current, "seconds": time.monotonic() - began}


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
