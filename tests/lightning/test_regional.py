"""``targets="repeated"``: one graph for all blocks of one structure."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from compile_callbacks import InductorCompile, InductorConfig
from compile_callbacks._utils.errors import CompileError, CompileWarning
from compile_callbacks.runtime.repeated import RepeatedBlocks
from compile_callbacks.runtime.targets import resolve_targets
from tests.support.against_eager import assert_same_module, assert_same_values
from tests.support.models import CLASSES, FEATURES, Classifier, loader, seeded, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

WIDTH = 16


class Block(nn.Module):
    def __init__(self, scale: float | None = None, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.drop(self.up(self.norm(x)).relu())
        return x + (out if self.scale is None else out * self.scale)


class Stack(nn.Module):
    """An embedding, blocks and a head, as a transformer has them."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def blocks(count: int = 3, **settings: object) -> list[nn.Module]:
    return [Block(**settings) for _ in range(count)]


def stacked(count: int = 3, make=blocks, **settings: object) -> Classifier:
    return seeded(lambda: Classifier(Stack(make(count, **settings))))


def regional(train: object = "default", infer: object = None, **settings: object) -> InductorCompile:
    return InductorCompile(train, infer, **({"targets": "repeated", "baseline_steps": 0} | settings))


def fit(module: pl.LightningModule, *callbacks: pl.Callback, validate: bool = False, **settings: object):
    loaders = (loader(4), loader(2)) if validate else (loader(4),)
    trainer(*callbacks, **settings).fit(module, *loaders)
    return module


def names(module, targets="repeated"):
    return [target.name for target in resolve_targets(module, targets, pl.LightningModule)]


# ------------------------------------------------------------------------------------------ what is repeated


def test_blocks_of_a_list_are_one_target():
    (found,) = resolve_targets(stacked(), "repeated", pl.LightningModule)
    assert isinstance(found, RepeatedBlocks)
    assert [member.name for member in found.members] == ["net.layers.0", "net.layers.1", "net.layers.2"]
    assert [found.label(graphs) for graphs in (0, 1, 2)] == [
        "net.layers.* (3 blocks)", "net.layers.* (3 blocks, one graph)", "net.layers.* (3 blocks, 2 graphs)",
    ]  # fmt: skip


def test_the_outermost_repetition_wins():
    inner = lambda: nn.Sequential(*blocks(2))  # noqa: E731
    assert names(nn.Sequential(inner(), inner())) == ["*"]
    assert names(nn.Sequential(inner(), nn.Linear(WIDTH, WIDTH))) == ["0.*"]
    # One that is repeated within another as well as beside it: the one beside has nothing to share a graph with.
    beside = nn.ModuleList([inner(), inner(), nn.Sequential(Block(), nn.ReLU())])
    assert names(beside) == ["{0-1}"]


# ------------------------------------------------------------------------------------------ one graph


def test_blocks_share_one_graph_and_the_run_equals_eager():
    callback = regional(infer="default")
    module = fit(stacked(5), callback, validate=True)
    eager = fit(stacked(5), validate=True)
    assert_same_values(module, eager)
    assert_same_module(module, eager)
    for phase in (callback.report.train, callback.report.infer):
        assert phase.targets == ("net.layers.* (5 blocks, one graph)",)
        assert (phase.graphs, phase.recompiles, phase.graph_breaks, phase.fallbacks) == (1, 0, 0, 0)
        assert phase.verified == f"equal {phase.graphs}"


def test_a_graph_for_the_block_whose_input_needs_no_gradient():
    callback = regional()
    module = seeded(lambda: Classifier(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))))
    eager = copy.deepcopy(module)
    assert_same_values(fit(module, callback), fit(eager))
    assert callback.report.train.targets == ("net.* (3 blocks, 2 graphs)",)
    assert [event["reason"] for event in callback.report.train.diagnostics.events if event["kind"] == "recompile"] == [
        "argument 0 now requires grad"
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_equal_eager(reentrant):
    class Checkpointed(Stack):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return self.head(x)

    def run(*callbacks):
        return fit(seeded(lambda: Classifier(Checkpointed(blocks()))), *callbacks)

    callback = regional()
    assert_same_values(run(callback), run())
    assert callback.report.train.graphs == (2 if reentrant else 1)  # without grad, and again with it


def test_two_towers_share_graphs_and_a_frozen_one_has_its_own():
    class Distilled(Classifier):
        def __init__(self):
            super().__init__(Stack(blocks(2)))
            self.teacher = Stack(blocks(2)).requires_grad_(False)

        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                wanted = self.teacher(batch[0])
            loss = nn.functional.mse_loss(self.net(batch[0]), wanted)
            self.losses.append(loss.item())
            return loss

    callback = regional()
    assert_same_values(fit(seeded(Distilled), callback), fit(seeded(Distilled)))
    assert callback.report.train.targets == ("*.layers.* (4 blocks, 2 graphs)",)


# ------------------------------------------------------------------------------------------ blocks that differ


def numbered(count):
    return [Numbered(i) for i in range(count)]


class Numbered(Block):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x):
        return super().forward(x) * (1 + self.number)


def test_blocks_that_differ_have_a_graph_each_and_are_warned_about():
    callback = regional()
    with pytest.warns(CompileWarning, match=r"'net.layers.\*' share no graph .*value of 'number': no longer"):
        module = fit(stacked(3, make=numbered), callback)
    assert_same_values(module, fit(stacked(3, make=numbered)))
    assert callback.report.train.targets == ("net.layers.* (3 blocks, 3 graphs)",)
    assert callback.report.train.recompiles == 2


# ------------------------------------------------------------------------------------------ what goes wrong


def test_a_failure_of_the_compiler_is_told_of_once_for_all_blocks():
    @torch.compiler.disable
    def not_traced(x):
        return x

    class Untraceable(Block):
        def forward(self, x):
            return super().forward(not_traced(x))

    def make(count):
        return [Untraceable() for _ in range(count)]

    callback = regional(InductorConfig(fullgraph=True))
    with pytest.warns(CompileWarning, match=r"'net.layers.\*' runs eagerly") as told:
        module = fit(stacked(make=make), callback)
    assert sum("runs eagerly" in str(warning.message) for warning in told) == 1
    assert_same_values(module, fit(stacked(make=make)))
    assert (callback.report.train.fallbacks, callback.report.train.graphs) == (1, 0)
    with pytest.raises(CompileError, match=r"compiling target 'net.layers.\*'"):
        fit(stacked(make=make), regional(InductorConfig(fullgraph=True), on_error="raise"))


# ------------------------------------------------------------------------------------------ settings without effect


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"freezing": True}, "freezing, which has no effect: repeated blocks share a graph"),
        ({"fold_weights": True}, "fold_weights=True has no effect in the infer phase: repeated blocks"),
    ],
)
def test_weights_of_shared_graphs_are_not_folded(settings, said):
    callback, module = regional(None, settings), stacked()
    with pytest.warns(CompileWarning, match=said):
        predicted = torch.cat(trainer(callback).predict(module, loader(2)))
    torch.testing.assert_close(predicted, module(next(iter(loader(1, 8)))[0]), rtol=1e-4, atol=1e-5)
    assert (callback.report.infer.graphs, callback.report.infer.diagnostics.folded_mib) == (1, None)


# ------------------------------------------------------------------------------------------ nothing left behind


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_cuda_graph_of_many_calls_equals_eager(accumulate):
    settings = {"accelerator": "gpu", "accumulate_grad_batches": accumulate, "max_epochs": 3}
    callback = regional("reduce-overhead", "reduce-overhead")
    module = fit(stacked(6), callback, validate=True, **settings)
    eager = fit(stacked(6), validate=True, **settings)
    assert_same_values(module, eager)
    assert not [e for e in callback.report.train.diagnostics.events if e["kind"] in ("fallback", "cudagraph_skip")]
    assert callback.report.train.graphs == callback.report.infer.graphs == 1
    ours, theirs = (torch.cat(trainer(*c, accelerator="gpu").predict(module, loader(4))) for c in ([callback], []))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
