"""Random small modules, trained with the callback and without: equal results, and counts equal to torch's own.

``make test-random`` tries 200 modules; ``COMPILE_CALLBACKS_EXAMPLES`` sets the number.
"""

from __future__ import annotations

import os
import random
import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo import utils
from torch.utils.data import DataLoader, Subset

from compile_callbacks import CompileReport, InductorCompile, InductorConfig
from tests.support.models import CLASSES, FEATURES, loader, trainer

pytestmark = pytest.mark.all_versions

EXAMPLES = os.environ.get("COMPILE_CALLBACKS_EXAMPLES")
WIDTH = 4


class Block(nn.Module):
    """A layer, and the side effects of the method that ``kind`` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.odd, self.calls = False, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.kind)(self.linear(x).tanh())

    def batch_norm(self, x):
        return self.norm(x)

    def buffer_counter(self, x):
        # The result does not depend on the buffer: torch 2.11 and 2.15, by hand too, compute wrong gradients if the
        # tensors that a graph saves for backward depend on a buffer that it writes to. Verification reports these.
        self.count += 1
        return x

    def running_mean(self, x):
        if self.training:
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return x - self.mean

    def toggle(self, x):
        self.odd = not self.odd
        return 2 * x if self.odd else x

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


@dataclass
class Output:
    """Not registered as a pytree."""

    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A LightningModule.

    Attributes:
        blocks: The kinds of its blocks.
        target: The compiled part: ``"net"``, ``"net.encode"`` (a method) or ``"forward"``.
        inputs: ``"one"``, or two that share memory: ``"same"`` tensor, or a ``"view"``.
        writes: Whether the network writes to its input.
        output: The type of the network's output: ``"tensor"`` or ``"dataclass"``.
        hooks: Hooks of the first layer: ``"pre"`` and ``"post"`` change values, ``"count"`` and ``"gradient"`` count.
        shared: Whether a second target has the first block, too.
        ragged: Whether the last batch is smaller.
        validates: Whether an epoch ends with a validation.
        accumulate: The number of batches whose gradients are accumulated.
        mode: A mode of ``torch.compile``; ``"lite"`` compiles no C++, which takes a tenth of the time.
        dynamic: An argument of ``torch.compile``.
    """

    blocks: tuple[str, ...]
    target: str = "net"
    inputs: str = "one"
    writes: bool = False
    output: str = "tensor"
    hooks: frozenset[str] = frozenset()
    shared: bool = False
    ragged: bool = False
    validates: bool = False
    accumulate: int = 1
    mode: str = "default"
    dynamic: bool | None = None

    @property
    def targets(self) -> list[str]:
        return [self.target, "side"] if self.shared else [self.target]


SPECS = st.builds(
    Spec,
    blocks=st.lists(st.sampled_from(KINDS), max_size=2).map(lambda kinds: ("batch_norm", *kinds)),
    target=st.sampled_from(["net", "net.encode", "forward"]),
    inputs=st.sampled_from(["one", "same", "view"]),
    writes=st.booleans(),
    output=st.sampled_from(["tensor", "dataclass"]),
    hooks=st.frozensets(st.sampled_from(["pre", "post", "count", "gradient"]), max_size=2),
    shared=st.booleans(),
    ragged=st.booleans(),
    validates=st.booleans(),
    accumulate=st.sampled_from([1, 2]),
    mode=st.sampled_from(["lite", "default"] if EXAMPLES else ["lite"]),
    dynamic=st.sampled_from([None, False, True]),
)


class Net(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block(kind) for kind in spec.blocks)

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
        logits = self.last(hidden)
        return Output(logits, hidden) if self.spec.output == "dataclass" else logits


class Model(pl.LightningModule):
    """Trains the network of a `Spec`, and keeps the inputs and losses."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, self.net = spec, Net(spec)
        self.side = nn.Sequential(nn.Linear(FEATURES, WIDTH), self.net.blocks[0]) if spec.shared else None
        self.seen: list[torch.Tensor] = []
        self.hook_calls = {"forward": 0, "gradient": 0}
        self.add_hooks(self.net.first)

    def add_hooks(self, layer: nn.Module) -> None:
        @torch.compiler.disable
        def count(name: str) -> None:
            self.hook_calls[name] += 1

        if "pre" in self.spec.hooks:
            layer.register_forward_pre_hook(lambda layer, args: (args[0] * 2,))
        if "post" in self.spec.hooks:
            layer.register_forward_hook(lambda layer, args, output: output * 0.5)
        if "count" in self.spec.hooks:
            layer.register_forward_hook(lambda *_: count("forward"))
        if "gradient" in self.spec.hooks:
            layer.weight.register_hook(lambda gradient: count("gradient"))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.net(*inputs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        inputs = {"one": (x,), "same": (x, x), "view": (x, x[:, ::2])}[self.spec.inputs]
        output = {"net": self.net, "net.encode": self.net.encode, "forward": self}[self.spec.target](*inputs)
        loss = nn.functional.cross_entropy(output.logits if isinstance(output, Output) else output, y)
        if isinstance(output, Output):
            loss = loss + output.hidden.square().mean()
        if self.side is not None:
            loss = loss + self.side(x).square().mean()
        self.seen += [x.clone(), loss.detach().clone()]
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def compile_by_hand(self, **settings: Any) -> None:
        for target in self.spec.targets:
            if target == "net.encode":
                self.net.encode = torch.compile(self.net.encode, **settings)
            else:
                (self if target == "forward" else self.get_submodule(target)).compile(**settings)


def fit(spec: Spec, *callbacks: pl.Callback, by_hand: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train for six steps, perhaps with `torch.compile`; return what the run computed, counted and drew."""
    torch._dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    utils.graph_break_reasons.clear()  # torch 2.11 does not in its reset
    pl.seed_everything(1, verbose=False)
    model = Model(spec)
    if by_hand is not None:
        model.compile_by_hand(**by_hand)
    settings = {"accumulate_grad_batches": spec.accumulate, "limit_val_batches": int(spec.validates)}
    batches = DataLoader(Subset(loader(6).dataset, range(24 - spec.ragged)), 4)
    trainer(*callbacks, num_sanity_val_steps=0, **settings).fit(model, batches, loader(1, seed=1))
    return {
        "seen": model.seen,
        "state_dict": dict(model.state_dict()),
        "counters": [(block.odd, block.calls) for block in model.net.blocks],
        "hooks": model.hook_calls,
        "python": random.getstate()[1],
        "numpy": [*np.random.get_state()[1].tolist(), np.random.get_state()[2]],
        "torch": torch.get_rng_state(),
    }


def assert_counts_are_torchs(report: CompileReport) -> None:
    train, infer = report.train, report.infer
    assert train.graphs + infer.graphs == utils.counters["stats"]["unique_graphs"] > 0
    recompiles = [metrics for metrics in utils.get_compilation_metrics() if metrics.recompile_reason]
    assert train.recompiles + infer.recompiles == len(recompiles)
    # torch counts a break again for each frame that is traced through it, and for each recompile.
    breaks = {(found.reason, found.user_stack[-1].lineno) for found in utils.graph_break_reasons}
    for phase in (train, infer):
        found = {(e["reason"], e["line"], e["target"]) for e in phase.diagnostics.events if e["kind"] == "graph_break"}
        assert len(found) == phase.graph_breaks
        assert phase.graphs == 0 or {(reason, line) for reason, line, _ in found} == breaks


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # torch 2.11 of random.random
@settings(
    max_examples=int(EXAMPLES or 25),
    phases=[Phase.explicit, Phase.generate],  # a smaller example takes minutes to find, and all are small
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@example(Spec(blocks=("dropout", "uncompiled_numpy"), hooks=frozenset({"count"})), True, 0)
@example(Spec(blocks=("python_random", "noise"), target="net.encode", output="dataclass", validates=True), False, 2)
@given(SPECS, st.booleans(), st.sampled_from([0, 2]))
def test_a_random_module_trains_as_it_does_without_the_callback(spec, by_hand, baseline_steps):
    """The other run is by `torch.compile`, or eager; ``fallback_random`` draws the numbers of eager."""
    draws = not by_hand and not {"dropout", "noise"}.isdisjoint(spec.blocks)
    options = torch._inductor.list_mode_options(spec.mode) | ({"fallback_random": True} if draws else {})
    settings = {"dynamic": spec.dynamic, "options": options}
    callback = InductorCompile(
        InductorConfig(**settings),
        InductorConfig(**settings),
        targets=spec.targets,
        baseline_steps=0 if by_hand else baseline_steps,
        on_error="raise",
        verify="raise",
    )
    ours = fit(spec, callback)
    assert_counts_are_torchs(callback.report)
    with warnings.catch_warnings(action="ignore"):  # torch's own
        theirs = fit(spec, by_hand=settings if by_hand else None)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
