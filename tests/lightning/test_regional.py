"""``targets="repeated"``: one graph for all blocks of one structure."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from compile_callbacks import InductorCompile, InductorConfig, Tune
from compile_callbacks._utils.errors import CompileError, CompileWarning
from compile_callbacks.runtime.repeated import RepeatedBlocks
from compile_callbacks.runtime.targets import check_target_names, resolve_targets
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


def test_a_block_in_several_places_is_repeated():
    block = Block()
    (found,) = resolve_targets(nn.Sequential(block, block, block), "repeated", nn.Module)
    assert (len(found.members), found.label(1)) == (1, "* (3 blocks, one graph)")


@pytest.mark.parametrize(
    "unlike",
    [
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH).bfloat16(), nn.ReLU()),
        lambda: nn.Linear(WIDTH, WIDTH),
    ],
    ids=["shape", "class", "dtype", "a layer"],
)
def test_unlike_blocks_are_not_repeated(unlike):
    module = nn.ModuleList([unlike(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, WIDTH)])
    with pytest.raises(ValueError, match=r"targets='repeated' finds nothing .* in ModuleList: .* None to have it"):
        resolve_targets(module, "repeated", nn.Module)


def test_a_part_of_that_name_is_reached_in_a_list():
    module = Classifier()
    module.repeated = nn.Linear(2, 2)
    assert check_target_names(["repeated"]) == ("repeated",)
    assert names(module, check_target_names(["repeated"])) == ["repeated"]


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


def test_blocks_with_buffers_keep_their_own():
    def with_statistics(count):
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(count)]

    callback = regional()
    module = fit(stacked(make=with_statistics), callback)
    assert_same_values(module, fit(stacked(make=with_statistics)))
    assert callback.report.train.graphs == 1
    assert not torch.equal(module.net.layers[0][1].running_mean, module.net.layers[1][1].running_mean)


def test_a_graph_for_the_block_whose_input_needs_no_gradient():
    callback = regional()
    module = seeded(lambda: Classifier(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))))
    eager = copy.deepcopy(module)
    assert_same_values(fit(module, callback), fit(eager))
    assert callback.report.train.targets == ("net.* (3 blocks, 2 graphs)",)
    assert [event["reason"] for event in callback.report.train.diagnostics.events if event["kind"] == "recompile"] == [
        "argument 0 now requires grad"
    ]


@pytest.mark.parametrize("new_shapes", ["eager", "raise"])
def test_new_shapes_are_those_that_a_block_did_not_see(new_shapes):
    module = seeded(lambda: Classifier(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))))
    callback = regional(new_shapes=new_shapes)
    fit(module, callback)  # the second block's input requires grad, the first one's does not
    assert (callback.report.train.graphs, callback.report.train.fallbacks) == (2, 0)


def test_blocks_with_a_graph_break_share_the_graphs_around_it():
    class Broken(Block):
        def forward(self, x):
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    def make(count):
        return [Broken() for _ in range(count)]

    callback = regional()
    assert_same_values(fit(stacked(make=make), callback), fit(stacked(make=make)))
    assert (callback.report.train.graphs, callback.report.train.graph_breaks) == (2, 1)


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


def test_more_blocks_that_differ_than_torchs_limit_are_all_compiled():
    callback = regional()
    with pytest.warns(CompileWarning, match="share no graph"), torch._dynamo.config.patch(recompile_limit=2):
        fit(stacked(4, make=numbered), callback)
    assert (callback.report.train.graphs, callback.report.train.fallbacks) == (4, 0)


def test_a_hook_on_one_block_is_called_and_gives_it_a_graph():
    def hooked():
        module = stacked(4)
        module.net.layers[1].register_forward_hook(lambda module, inputs, output: output * 2)
        return module

    callback = regional()
    assert_same_values(fit(hooked(), callback), fit(hooked()))
    assert callback.report.train.targets == ("net.layers.* (4 blocks, 2 graphs)",)


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


def test_a_candidate_that_would_bake_weights_in_is_not_tried():
    callback = regional(None, Tune(["default", "freezing"], steps=5))
    trainer(callback).predict(stacked(), loader(40))
    verdicts = {trial["candidate"]: trial["verdict"] for trial in callback.report.infer.diagnostics.trials}
    assert verdicts["freezing"] == "not tried"
    assert verdicts["default"] != "not tried"


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
