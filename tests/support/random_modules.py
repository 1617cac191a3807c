"""Small LightningModules that a `Spec` describes, with side effects of ordinary user code."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from tests.support.models import CLASSES, FEATURES, loader

WIDTH = 4
DRAWS_TORCH = {"dropout", "noise"}
KINDS = [
    "plain",
    "batch_norm",
    "buffer_counter",
    "running_mean",
    "toggle",
    "uncompiled_counter",
    "python_counter",
    "python_random",
    "uncompiled_numpy",
    "graph_break",
    *DRAWS_TORCH,
]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A LightningModule."""

    blocks: tuple[str, ...]  # the names of methods of `Block`
    target: str = "net"  # or "net.encode" (a method), or "forward"
    inputs: str = "one"  # or two that share memory: the "same" tensor, or a "view"
    writes: bool = False  # whether the network writes into its input
    output: str = "tensor"  # or "dict", or "dataclass"
    hooks: frozenset[str] = frozenset()  # of the first layer, see `add_hooks`
    shared: bool = False  # whether a second target contains the first block, too
    ragged: bool = False  # whether the last batch is smaller
    validates: bool = False
    accumulate: int = 1
    twice: bool = False  # whether a step calls the network twice
    event: str = ""  # "replaced": the second epoch has another network; "raises": the network raises for a batch
    mode: str = "default"  # "lite" compiles no C++, and takes a tenth of the time
    dynamic: bool | None = None

    @property
    def targets(self) -> list[str]:
        return [self.target, "side"] if self.shared else [self.target]

    @property
    def draws_torch(self) -> bool:
        return not DRAWS_TORCH.isdisjoint(self.blocks)


class Block(nn.Module):
    """A layer, followed by the method named ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.odd, self.calls, self.passes = False, [], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.kind)(self.linear(x).tanh())

    def plain(self, x):
        return x

    def batch_norm(self, x):
        return self.norm(x)

    def buffer_counter(self, x):
        self.count += 1
        # Nothing here reads the buffer: torch 2.11 and 2.15, by hand too, compute wrong gradients if a tensor that a
        # graph saves for its backward pass depends on a buffer that it writes to. Verification reports these.
        return x

    def running_mean(self, x):
        if self.training:
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return x - self.mean

    def toggle(self, x):
        self.odd = not self.odd
        return 2 * x if self.odd else x

    def python_counter(self, x):
        self.passes += 1  # a constant of the graph, so that torch recompiles for each call
        return x * (self.passes / self.passes)

    @torch.compiler.disable
    def uncompiled_counter(self, x):
        self.calls.append(len(x))
        return x / len(self.calls)

    def python_random(self, x):
        return x * (0.5 + random.random())

    @torch.compiler.disable
    def uncompiled_numpy(self, x):
        return x if np.random.rand() < 0.5 else -x

    def graph_break(self, x):
        torch._dynamo.graph_break()
        return x + 1

    def dropout(self, x):
        return nn.functional.dropout(x, 0.3, self.training)

    def noise(self, x):
        return x + 0.1 * torch.randn_like(x)


@dataclass
class Output:
    """Is not registered as a pytree."""

    logits: torch.Tensor
    hidden: torch.Tensor


class BatchError(Exception):
    """What only the user's code raises."""


class Net(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.raises = False
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for kind in spec.blocks)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.encode(*inputs)

    def encode(self, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        if self.spec.writes:
            x.mul_(2)
        hidden = self.first(x)
        if other is not None:
            hidden = hidden + other.mean(1, keepdim=True)
        for block in self.blocks:
            hidden = block(hidden)
        if self.raises:
            raise BatchError("a bad batch")
        logits = self.last(hidden)
        if self.spec.output == "dict":
            return {"logits": logits, "hidden": hidden}
        return Output(logits, hidden) if self.spec.output == "dataclass" else logits


def first_features(x: torch.Tensor) -> torch.Tensor:
    """A function that may replace a method of a network."""
    return x[:, :CLASSES]


class Side(nn.Module):
    """A second parent of a block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(FEATURES, WIDTH), block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.first(x)).square().mean()


class Model(pl.LightningModule):
    """Trains the network of a `Spec`, and keeps its inputs and losses."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.net = Net(spec)
        self.side = Side(self.net.blocks[0]) if spec.shared else None
        self.seen: list[torch.Tensor] = []
        self.hook_calls = {"forward": 0, "gradient": 0}
        add_hooks(self.net.first, spec.hooks, self.hook_calls)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.net(*inputs)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        inputs = {"one": (x,), "same": (x, x), "view": (x, x[:, ::2])}[self.spec.inputs]
        call: Any = {"net": self.net, "net.encode": self.net.encode, "forward": self}[self.spec.target]
        first = call(*inputs) if self.spec.twice and not self.spec.writes else None
        output = call(*inputs)
        if isinstance(output, Output):
            output = vars(output)
        loss = nn.functional.cross_entropy(output["logits"] if isinstance(output, dict) else output, y)
        if isinstance(output, dict):
            loss = loss + output["hidden"].square().mean()
        if first is not None:
            values = vars(first) if isinstance(first, Output) else first
            loss = loss + (values["logits"] if isinstance(values, dict) else values).square().mean()
        if self.side is not None:
            loss = loss + self.side(x)
        self.seen += [x.clone(), loss.detach().clone()]
        return loss

    def on_train_epoch_start(self) -> None:
        if self.spec.event == "replaced" and self.current_epoch == 1:
            self.net = Net(self.spec)
            add_hooks(self.net.first, self.spec.hooks, self.hook_calls)
            self.trainer.strategy.setup_optimizers(self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        self.net.raises = self.spec.event == "raises" and batch_idx == 2
        try:
            return self.loss(batch)
        except BatchError:
            return None
        finally:
            self.net.raises = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def compile_by_hand(self, **settings: Any) -> None:
        """Compile the targets as a user of torch does."""
        for target in self.spec.targets:
            if target == "net.encode":
                self.net.encode = torch.compile(self.net.encode, **settings)
            else:
                (self if target == "forward" else self.get_submodule(target)).compile(**settings)

    def state(self) -> dict[str, Any]:
        """The results of a run: losses, weights, counters and random states."""
        numpy_state = np.random.get_state(legacy=False)["state"]
        return {
            "seen": self.seen,
            "state_dict": dict(self.state_dict()),
            "counters": [(block.odd, block.calls, block.passes) for block in self.net.blocks],
            "hooks": self.hook_calls,
            "python": random.getstate()[1],
            "numpy": [*numpy_state["key"].tolist(), numpy_state["pos"]],
            "torch": torch.get_rng_state(),
        }


def add_hooks(module: Any, hooks: frozenset[str], calls: dict[str, int]) -> None:
    """Hooks of a module: ``"pre"`` and ``"post"`` change values, ``"count"`` and ``"gradient"`` count."""

    @torch.compiler.disable
    def count(name: str) -> None:
        calls[name] += 1

    if "pre" in hooks:
        module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    if "post" in hooks:
        module.register_forward_hook(lambda module, args, output: output * 0.5)
    if "count" in hooks:
        module.register_forward_hook(lambda *_: count("forward"))
    if "gradient" in hooks:
        module.weight.register_hook(lambda gradient: count("gradient"))


def batches(number: int, *, ragged: bool = False, seed: int = 0) -> torch.utils.data.DataLoader:
    """Batches of four, or a last one of three."""
    dataset = loader(number, seed=seed).dataset
    return torch.utils.data.DataLoader(torch.utils.data.Subset(dataset, range(4 * number - ragged)), 4)
