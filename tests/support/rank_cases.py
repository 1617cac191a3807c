"""Cases of DDP training, which each of two processes runs one after the other, and the results of each process.

LOCAL_RANK=0 python -m tests.support.rank_cases FOLDER CASE ... and the same with LOCAL_RANK=1, in a new folder
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch._inductor.graph
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from compile_callbacks import InductorCompile, Tune, compile_phases, restore
from compile_callbacks import report_of as phases_report_of
from compile_callbacks.calls import compiled_function
from tests.support.models import CLASSES, FEATURES, Classifier, LoggerIn, loader, seeded, trainer
from tests.support.pairs import ACCELERATOR, BACKEND, join, run_cases
from tests.support.uncached import Uncached

RANK = int(os.environ.get("LOCAL_RANK", "0"))
SLOW = 3.0  # the seconds that one rank compiles longer
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
GROUPS = itertools.count()


def fit(module: Classifier, *callbacks: pl.Callback, timeout: float = 600, ddp: Any = None, **settings: Any) -> Any:
    """Train on both processes, in a process group with this timeout; Lightning uses a group that exists."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    join(FOLDER, f"{sys.argv[2]}.{next(GROUPS)}", timeout)
    strategy = DDPStrategy(process_group_backend=BACKEND, **(ddp or {}))
    train, validate = settings.pop("train", loader(12)), settings.pop("validate", loader(8, seed=2))
    path = settings.pop("ckpt_path", None)
    defaults = {"accelerator": ACCELERATOR, "devices": 2, "strategy": strategy, "num_sanity_val_steps": 0}
    run = trainer(*callbacks, **(defaults | settings))
    run.fit(module, train, validate, ckpt_path=path)
    return run


def result_of(module: Classifier) -> dict[str, Any]:
    state = {name: value.flatten()[:100].tolist() for name, value in module.state_dict().items()}
    return {"losses": module.losses, "outputs": [out.tolist() for out in module.validation_outputs], "state": state}


def report_of(ours: InductorCompile) -> dict[str, Any]:
    return {phase: ours.report.to_dict()[phase] for phase in ("train", "infer")}


def both(make: Any = Classifier, *others: pl.Callback, ours: Any = None, **settings: Any) -> Any:
    """A run without the callback, and the same with it."""
    ours = ours or InductorCompile(baseline_steps=0)
    eager, compiled = seeded(make), seeded(make)
    fit(eager, **settings)
    fit(compiled, ours, *others, **settings)
    return {"eager": result_of(eager), "compiled": result_of(compiled), "report": report_of(ours)}


# ------------------------------------------------------------------------------------------ the same results


def fabric() -> dict[str, Any]:
    """A loop with what ``Fabric.setup`` returns."""
    join(FOLDER, f"fabric.{next(GROUPS)}")
    lightning_fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=FabricDDP(process_group_backend=BACKEND))
    lightning_fabric.launch()

    def losses(prepare: Any = lambda model: None) -> list[float]:
        net = seeded().net
        model, optimizer = lightning_fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
        prepare(model)
        found = []
        for x, _ in loader(6, seed=RANK):
            loss = model(x.to(lightning_fabric.device)).square().mean()
            optimizer.zero_grad()
            lightning_fabric.backward(loss)
            optimizer.step()
            found.append(loss.item())
        return found

    eager, compiled = losses(), []
    result: dict[str, Any] = {"eager": eager, "compiled": losses(lambda model: compiled.append(compile_phases(model)))}
    result["report"] = phases_report_of(compiled[0]).train.to_dict()
    restore(compiled[0])
    torch.distributed.destroy_process_group()
    return result


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
    ours = InductorCompile(baseline_steps=2)
    eager, compiled = seeded(), seeded()
    fit(eager, max_epochs=2)
    run = fit(compiled, ours, max_epochs=2, logger=LoggerIn(FOLDER))
    run.save_checkpoint(str(FOLDER / "two.ckpt"))
    calls = [record["call"] for record in json.loads((FOLDER / "compile_report.json").read_text())]
    results = {"eager": result_of(eager), "compiled": result_of(compiled), "calls": calls}
    return {**results, "report": report_of(ours), "scalars": ours.report.scalars()}


def find_unused_parameters() -> dict[str, Any]:
    return both(Branches, ddp={"find_unused_parameters": True})


def static_graph() -> dict[str, Any]:
    return both(Wide, ddp={"static_graph": True, "bucket_cap_mb": 1})


def accumulation() -> dict[str, Any]:
    return both(Wide, accumulate_grad_batches=2, ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 1})


def resumed_from_one() -> dict[str, Any]:
    ours, module = InductorCompile(baseline_steps=2), seeded()
    run = fit(module, ours, max_epochs=2, ckpt_path=str(FOLDER / "one.ckpt"))
    return {"report": report_of(ours), "compiled": result_of(module), "epoch": run.current_epoch}


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


class Sleeps(Uncached):
    """Sleeps once on the second process, when a graph has inputs of this batch size."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.slept = batch_size, not RANK

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        shapes = [node.meta["val"].shape for node in graph.nodes if node.op == "placeholder"]
        if not self.slept and any(shape[:1] == (self.batch_size,) for shape in shapes):
            self.slept = True
            time.sleep(SLOW)


class Synced(Classifier):
    """Waits for the other process between forward and backward, and in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.validation_outputs.append(out.detach().clone())
        self.log("val_loss", nn.functional.cross_entropy(out, batch[1]), sync_dist=True)


class Growing(torch.utils.data.Dataset):
    """Batches of 4 for the first process, and from the third on of 5 for the second."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        size = 5 if RANK and index > 2 else 4
        generator = torch.Generator().manual_seed(index)
        return torch.randn(size, FEATURES, generator=generator), torch.zeros(size, dtype=torch.long)


def slow_compile() -> dict[str, Any]:
    """The second process compiles its first training graph longer than the first process."""
    return both(Synced, ours=InductorCompile(baseline_steps=0, verify="off", passes=[Sleeps(4)]))


def slow_validation() -> dict[str, Any]:
    """The second process recompiles in the middle of a validation, while the first waits in the next collective."""
    ours = InductorCompile(None, {"dynamic": False}, baseline_steps=0, verify="off", passes=[Sleeps(5)])
    validate = DataLoader(Growing(), batch_size=None)
    settings = {"train": loader(4), "validate": validate, "use_distributed_sampler": False}
    with mock.patch.object(compiled_function, "RECOMPILE_AFTER", 1):
        return both(Synced, ours=ours, **settings)


def slow_background() -> dict[str, Any]:
    """The second process is slow when compiled code runs. Each step of both then lasts as long as its step."""
    ours = InductorCompile(infer_mode=None, baseline_steps=10, background=True, verify="off")

    class Slow(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            ran = ours.session._recorder.executions
            before, loss = ran.graphs, super().training_step(batch, batch_idx)
            time.sleep(0.02 if RANK and ran.graphs > before else 0.01)  # leaves the processors to the helper
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            found = ours.report.train.diagnostics
            ends = found.steps.get("compiled", 0) >= 120 or "sent_back" in [event["kind"] for event in found.events]
            self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(ends)

    fit(seeded(Slow), ours, validate=None, max_epochs=-1)
    return {"report": report_of(ours)}


def exception() -> dict[str, Any]:
    """Both processes raise in their third step."""

    class Raises(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise KeyError("batch 2")
            return super().training_step(batch, batch_idx)

    with contextlib.suppress(KeyError):
        fit(seeded(Raises), InductorCompile(baseline_steps=0, verify="off"))
    return {}


class Uneven(Classifier):
    """Reduces the logged value at the end of each loader; the loaders of the processes have different lengths."""

    def val_dataloader(self) -> Any:
        rank = torch.distributed.get_rank()
        return [loader(2 + 3 * rank), loader(6 - 3 * rank)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


def uneven(infer_mode: Any, epochs: int) -> dict[str, Any]:
    ours, patience = InductorCompile(None, infer_mode, baseline_steps=2, verify="off"), 60.0
    began = time.monotonic()
    settings = {"validate": None, "max_epochs": epochs, "use_distributed_sampler": False}
    run = fit(seeded(Uneven), ours, timeout=patience, train=loader(2), **settings)
    losses = {name: float(value) for name, value in run.callback_metrics.items()}
    waited = time.monotonic() - began > patience
    return {"report": report_of(ours), "losses": losses, "waited": waited}


def uneven_logged() -> dict[str, Any]:
    return uneven("default", 3)


def uneven_tuned() -> dict[str, Any]:
    return uneven(Tune(["default"], steps=5), 8)


def tuned() -> dict[str, Any]:
    ours = InductorCompile(Tune(["default", "aten"], steps=10), None, cache_dir=FOLDER / "cache", verify="off")
    module = seeded()
    fit(module, ours, train=loader(260))
    return {"report": report_of(ours), "compiled": result_of(module)}


if __name__ == "__main__":
    run_cases(FOLDER, [globals()[case] for case in sys.argv[2:]])
