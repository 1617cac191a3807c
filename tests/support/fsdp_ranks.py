"""Cases of FSDP training, which each of two processes runs one after the other, and the results of each process.

LOCAL_RANK=0 python -m tests.support.fsdp_ranks FOLDER CASE ... and the same with LOCAL_RANK=1, in a new folder
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch._inductor.graph
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from compile_callbacks import InductorCompile, compile_phases, report_of, restore
from tests.support.models import CLASSES, FEATURES, Classifier, trainer
from tests.support.models import loader as batches
from tests.support.pairs import ACCELERATOR, BACKEND, DEVICE, join, run_cases
from tests.support.passes import Uncached

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
WIDTH, BLOCKS, SAMPLES, BATCH = FEATURES, 3, 24, 6  # BATCH: of all devices together


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Whole(Classifier):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(Blocks())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sharded(Whole):
    """`Whole` with each block sharded, and the rest around them, or the net as one."""

    def __init__(self, *, by_block: bool = True) -> None:
        super().__init__()
        self.by_block = by_block

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):
            return
        assert self.device_mesh is not None
        settings: Any = {"mesh": self.device_mesh["data_parallel"]}
        shard_blocks(self.net, **settings) if self.by_block else fully_shard(self.net, **settings)


def shard_blocks(net: Blocks, **settings: Any) -> Any:
    """Shard each block, and the rest around the blocks."""
    for layer in net.layers:
        fully_shard(layer, **settings)
    return fully_shard(net, **settings)


def data() -> Any:
    return batches(batches=SAMPLES // BATCH, batch_size=BATCH).dataset


def loader(devices: int) -> DataLoader:
    """A batch of all devices together is the same samples for any number of devices."""
    sampler = None
    if devices > 1:  # Lightning's own would shuffle
        sampler = DistributedSampler(data(), devices, int(os.environ["LOCAL_RANK"]), shuffle=False)
    return DataLoader(data(), BATCH // devices, sampler=sampler)


def two_devices(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)
    defaults = {"accelerator": ACCELERATOR, "devices": 2, "strategy": strategy, "num_sanity_val_steps": 0}
    return trainer(*callbacks, **(defaults | settings))


def one_device(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    return trainer(*callbacks, num_sanity_val_steps=0, **settings)


# ------------------------------------------------------------------------------------------ runs


def fit(*callbacks, module=None, save=None, **settings):
    module = module or Sharded()
    trainer = two_devices(*callbacks, **settings)
    trainer.fit(module, loader(2), loader(2))
    if save is not None:
        trainer.save_checkpoint(FOLDER / save)
    return module


@functools.cache
def eager(epochs):
    return fit(max_epochs=epochs)


def compiler(train="default", infer=None, **settings):
    return InductorCompile(train, infer, baseline_steps=0, **settings)


def weights(module):
    """A copy of all weights, gathered on each rank, on the CPU."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    return {name: value.clone().cpu() for name, value in get_model_state_dict(module, options=options).items()}


def apart(one, other):
    """The largest differences of a run from another one."""
    ours, others = weights(one), weights(other)
    assert ours.keys() == others.keys()
    return {
        "losses": max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)),
        "weights": max(float((ours[name] - others[name]).abs().max()) for name in ours),
        # The weight that moved least: a weight without gradient does not move.
        "moved": min(float((ours[name] - value).abs().max()) for name, value in weights(Whole()).items()),
    }


def compared(ours, module=None, max_epochs=1, **settings):
    """Fit compiled, and compare with an eager fit."""
    compiled = fit(ours, module=module, max_epochs=max_epochs, **settings)
    return {"apart": apart(compiled, eager(max_epochs)), "report": phases(ours)}


def phases(ours):
    return {phase: getattr(ours.report, phase).to_dict() for phase in ("train", "infer")}


# ------------------------------------------------------------------------------------------ FSDP2


def fits():
    module = Sharded()
    found = compared(compiler("default", "default"), module, max_epochs=2, save="full.ckpt")
    left = [name for part in module.modules() for name in vars(part) if name in ("forward", "_compiled_call_impl")]
    return {**found, "left": left}


def predicts():
    module, ours = fit(), compiler(None, {"freezing": True})
    expected = torch.cat(two_devices().predict(module, loader(2)))
    got = torch.cat(two_devices(ours).predict(module, loader(2)))
    return {"apart": float((got - expected).abs().max()), "report": phases(ours)}


class Thaws(pl.Callback):
    """The first block is frozen in the first epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net.layers[0].requires_grad_(trainer.current_epoch > 0)


def accumulates_clips_and_thaws():
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2}
    return {"apart": apart(fit(Thaws(), compiler(), **settings), fit(Thaws(), **settings))}


def sharded_as_one():
    return compared(compiler(), Sharded(by_block=False))


def one_rank_fails():
    """Torch fails to compile the first block on one rank."""
    lowering, calls = torch._inductor.graph.GraphLowering, []
    rank, run = torch.distributed.get_rank(), lowering.run

    def failing(*args, **kwargs):
        calls.append(1)
        if rank == 1 and len(calls) == 1:
            raise RuntimeError("no code on this rank")
        return run(*args, **kwargs)

    with mock.patch.object(lowering, "run", failing):
        return compared(compiler({"passes": [Uncached()]}, verify="off"))


# ------------------------------------------------------------------------------------------ without a Trainer, FSDP1


def steps(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = (tensor[torch.distributed.get_rank() :: 2].to(DEVICE) for tensor in data().tensors)
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(float(net(x).sum()))
    return losses


def built():
    torch.manual_seed(1)
    return shard_blocks(Blocks().to(DEVICE), mesh=init_device_mesh(DEVICE.type, (2,)))


def without_a_trainer():
    eager_net, net = built(), built()
    compile_phases(net, verify="raise")
    losses = steps(net)
    report = report_of(net).to_dict()
    restore(net)
    return {"losses": losses, "eager": steps(eager_net), "report": report}


class OnAnyDevice(FSDPStrategy):
    """Lightning's strategy needs a GPU."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if ACCELERATOR == "gpu":
            return super()._setup_model(model)
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def fsdp1_in_a_trainer():
    """Lightning wraps the LightningModule as a whole, and each block within it."""
    ours, losses = compiler(), []
    for callbacks in ((ours,), ()):
        module = Whole()
        settings = {"accelerator": ACCELERATOR, "devices": 2, "num_sanity_val_steps": 0}
        strategy = OnAnyDevice(auto_wrap_policy={Block}, process_group_backend=BACKEND)
        trainer(*callbacks, strategy=strategy, **settings).fit(module, loader(2), loader(2))
        losses.append(module.losses)
    return {"losses": losses[0], "eager": losses[1], "report": phases(ours)}


if __name__ == "__main__":
    join(FOLDER, "group")
    run_cases(FOLDER, [globals()[case] for case in sys.argv[2:]])
