"""Random small modules, with side effects of ordinary user code, trained with the callback and without.

The results are the same, and the counts are torch's own. ``make test-random`` tries 200 modules;
``COMPILE_CALLBACKS_EXAMPLES`` sets their number.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo import utils
from torch.utils.data import DataLoader, Subset

from compile_callbacks import CompileReport, InductorCompile, InductorConfig
from compile_callbacks.testing import assert_same_training
from tests.support.models import CLASSES, FEATURES, QUIET, loader

WIDTH = 4
EXAMPLES = os.environ.get("COMPILE_CALLBACKS_EXAMPLES")


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


KINDS = [name for name in vars(Block) if not name.startswith("_") and name != "forward"]


@dataclass(frozen=True, kw_only=True)
class Spec:
    blocks: tuple[str, ...]  # the names of methods of `Block`
    target: str = "net"  # or "net.encode" (a method), or "forward"
    inputs: str = "one"  # or two that share memory: the "same" tensor, or a "view"
    writes: bool = False  # whether the network writes into its input
    returns_dict: bool = False
    hooks: frozenset[str] = frozenset()  # of the first layer, see `add_hooks`
    shared: bool = False  # whether a second target contains the first block, too
    ragged: bool = False  # whether the last batch is smaller
    validates: bool = False
    accumulate: int = 1
    twice: bool = False  # whether a step calls the network twice
    event: str = ""  # "replaced": the second epoch has another network; "raises": the network raises for a batch
    mode: str = "default"  # "lite" compiles no C++, and takes a tenth of the time
    dynamic: bool | None = None


FLAG = st.booleans()
SPECS = st.builds(
    Spec,
    blocks=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2).map(tuple),
    target=st.sampled_from(["net", "net.encode", "forward"]),
    inputs=st.sampled_from(["one", "same", "view"]),
    **dict.fromkeys(["writes", "returns_dict", "shared", "ragged", "validates", "twice"], FLAG),
    hooks=st.frozensets(st.sampled_from(["pre", "post", "count", "gradient"]), max_size=2),
    accumulate=st.sampled_from([1, 2]),
    event=st.sampled_from(["", "", "replaced", "raises"]),
    mode=st.sampled_from(["lite", "default"] if EXAMPLES else ["lite"]),
    dynamic=st.sampled_from([None, False, True]),
)


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
        return {"logits": logits, "hidden": hidden} if self.spec.returns_dict else logits


class Side(nn.Module):
    """A second parent of a block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(FEATURES, WIDTH), block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.first(x)).square().mean()


class Model(pl.LightningModule):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.hook_calls = {"forward": 0, "gradient": 0}
        self.make_net()
        self.side = Side(self.net.blocks[0]) if spec.shared else None

    def make_net(self) -> None:
        self.net = Net(self.spec)
        add_hooks(self.net.first, self.spec.hooks, self.hook_calls)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.net(*inputs)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        inputs = {"one": (x,), "same": (x, x), "view": (x, x[:, ::2])}[self.spec.inputs]
        call: Any = {"net": self.net, "net.encode": self.net.encode, "forward": self}[self.spec.target]
        loss = x.new_zeros(())
        for _ in range(2 if self.spec.twice and not self.spec.writes else 1):
            output = call(*inputs)
            if self.spec.returns_dict:
                loss, output = loss + output["hidden"].square().mean(), output["logits"]
            loss = loss + nn.functional.cross_entropy(output, y)
        return loss + x.square().mean() + (0 if self.side is None else self.side(x))

    def on_train_epoch_start(self) -> None:
        if self.spec.event == "replaced" and self.current_epoch == 1:
            self.make_net()
            self.trainer.strategy.setup_optimizers(self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        self.net.raises = self.spec.event == "raises" and batch_idx == 2
        try:
            return self.loss(batch)
        except BatchError:
            return None
        finally:
            self.net.raises = False

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


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


def data_of(spec: Spec) -> pl.LightningDataModule:
    def batches(number: int, *, ragged: bool = False, seed: int = 0) -> DataLoader:
        return DataLoader(Subset(loader(number, seed=seed).dataset, range(4 * number - ragged)), 4)

    data = pl.LightningDataModule()
    data.train_dataloader = lambda: batches(6, ragged=spec.ragged)
    data.val_dataloader = lambda: batches(1, seed=1)
    return data


def assert_counts_are_torchs(report: CompileReport) -> None:
    train, infer = report.train, report.infer
    assert train.graphs + infer.graphs == utils.counters["stats"]["unique_graphs"] > 0
    # In torch 2.11, a block that two targets share is compiled again for the second one: not a recompile of a target.
    reasons = [(metrics, metrics.recompile_reason or "") for metrics in utils.get_compilation_metrics()]
    traces = [metrics for metrics, reason in reasons if reason and "BACKEND_MATCH" not in reason]
    recompiles = [metrics for metrics in traces if "recompile limit exceeded" not in (metrics.fail_reason or "")]
    assert train.recompiles + infer.recompiles == len(recompiles)
    # Torch counts a break again for each frame that is traced through it, and for each recompile.
    breaks = {(found.reason, found.user_stack[-1].lineno) for found in utils.graph_break_reasons}
    for phase in (train, infer):
        found = {(e["reason"], e["line"], e["target"]) for e in phase.diagnostics.events if e["kind"] == "graph_break"}
        assert len(found) == phase.graph_breaks
        assert phase.graphs == 0 or {(reason, line) for reason, line, _ in found} == breaks


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # torch 2.11 of random.random
@pytest.mark.filterwarnings("ignore:.* reached torch's recompile limit")  # torch 2.11 counts both phases together
# torch runs a frame whose loop contains a graph break eagerly, and a warning tells that few weights are compiled.
# In torch 2.15, a lookup in the cache of graphs can raise ``KeyError: '___stack0'``, by hand too: with dynamic shapes,
# the guards of a cached graph name the inputs of another frame.
@pytest.mark.filterwarnings("ignore:.*training_step.*returned.*None")
@torch._inductor.config.patch(fx_graph_cache=False)
@torch._functorch.config.patch(enable_autograd_cache=False)
@settings(
    max_examples=int(EXAMPLES or 22),  # next to the five below
    deadline=None,
    derandomize=EXAMPLES is None,  # new examples find new faults of torch too, which must not fail an unrelated change
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@example(Spec(blocks=("dropout", "uncompiled_numpy"), hooks=frozenset({"count"})), 0)
@example(Spec(blocks=("python_random", "noise"), target="net.encode", validates=True), 2)
@example(Spec(blocks=("plain",), inputs="view", writes=True, mode="lite"), 0)
@example(Spec(blocks=("batch_norm", "plain"), twice=True, event="replaced", mode="lite"), 2)
@example(Spec(blocks=("batch_norm", "python_counter"), event="raises", validates=True, mode="lite"), 0)
@given(SPECS, st.sampled_from([0, 2]))
def test_a_random_module_trains_as_it_does_without_the_callback(spec, baseline_steps):
    """The random numbers of eager are drawn by ``fallback_random``."""
    torch._dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    utils.graph_break_reasons.clear()  # torch 2.11 does not in its reset
    options = {**torch._inductor.list_mode_options(spec.mode), "fallback_random": True}
    mode, targets = InductorConfig(dynamic=spec.dynamic, options=options), [spec.target, "side"][: 1 + spec.shared]
    settings = {"targets": targets, "baseline_steps": baseline_steps, "on_error": "raise", "verify": "raise"}
    callback = InductorCompile(mode, mode, **settings)
    kwargs = {**QUIET, "accumulate_grad_batches": spec.accumulate, "num_sanity_val_steps": 0}
    kwargs |= {"limit_val_batches": int(spec.validates), "max_epochs": 1 + (spec.event == "replaced")}
    runs = (lambda: Model(spec)), (lambda: data_of(spec))
    assert_same_training(*runs, steps=-1, callback=callback, trainer_kwargs=kwargs, tolerance=1e-4)
    assert_counts_are_torchs(callback.report)
