"""``targets="repeated"``: repeated blocks are regions of one graph, or the whole target is compiled."""

from __future__ import annotations

import copy
import io
import pickle
import re

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.checkpoint import checkpoint

from compile_callbacks import InductorCompile, InductorConfig, Tune, compile_phases, report_of, restore
from compile_callbacks._torch import regions
from compile_callbacks._utils.errors import CompileError, CompileWarning
from tests.support import models
from tests.support.against_eager import FLOAT32, assert_fits_as_eager, assert_same_module, assert_same_values
from tests.support.models import FEATURES, Classifier, batches_of, loader, seeded, trainer
from tests.support.stacks import WIDTH, Block, Stack, blocks
from tests.support.uncached import Uncached
from tests.support.wrong_passes import Doubling

pytestmark = [
    pytest.mark.usefixtures("no_codegen"),
    pytest.mark.all_versions,
    pytest.mark.filterwarnings("ignore:Found . module.* in eval mode", "ignore:None of the inputs have requires_grad"),
]

OLDEST = torch.__version__.startswith("2.11.")


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def changed(change, **settings) -> Stack:
    """A stack with changed blocks."""
    stack = Stack(blocks(**settings))
    change(stack.layers)
    return stack


def with_adapters(layers: nn.ModuleList) -> None:
    layers.requires_grad_(False)
    for layer in (layers[1], layers[3]):
        layer.up = Lora(layer.up)


def with_autocast(block, x):
    with torch.autocast("cpu", torch.bfloat16, enabled=block.special):
        return block(x)


def without_gradients(block, x):
    with torch.set_grad_enabled(torch.is_grad_enabled() and not block.special):
        return block(x)


SHARED = {
    "alike": lambda: Stack(blocks()),
    "dropout": lambda: Stack(blocks(drop=0.5)),
    "one has a flag": lambda: Stack([*blocks(2), Block(tanh=True), *blocks(2)]),
    "one has a number": lambda: Stack([*blocks(2), Block(scale=0.5), *blocks(2)]),
    "one is in eval mode": lambda: changed(lambda layers: layers[1].eval(), drop=0.5),
    "called twice": lambda: Stack(blocks(), rounds=2),
    "checkpointed": lambda: Stack(blocks(), lambda block, x: checkpoint(block, x, use_reentrant=False)),
    "checkpointed, reentrant": lambda: Stack(blocks(), lambda block, x: checkpoint(block, x, use_reentrant=True)),
    "one is frozen": lambda: changed(lambda layers: layers[1].requires_grad_(False)),
    "the first are frozen": lambda: changed(lambda layers: layers[:2].requires_grad_(False)),
    "adapters in some": lambda: changed(with_adapters),
    "tied weights": lambda: changed(lambda layers: setattr(layers[3].up, "weight", layers[1].up.weight)),
    "autocast around some": lambda: Stack([*blocks(2, special=True), *blocks(2)], with_autocast),
    "no gradients in some": lambda: Stack([*blocks(3, special=True), *blocks(3)], without_gradients),
    "a hook": lambda: changed(lambda layers: layers[1].register_forward_hook(lambda *call: call[-1] * 2)),
    "two kinds": lambda: Stack([*blocks(3), *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))]),
}


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Broken(Block):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


class Aliasing(Block):
    def forward(self, x):
        return super().forward(x), x


WHOLE = {
    "batch norm": (lambda: Stack(blocks(kind=Normed)), "buffer mutations"),
    "a buffer counts": (lambda: Stack(blocks(kind=Counting)), "alias|does not belong to this graph"),
    "a graph break": (lambda: Stack(blocks(kind=Broken)), "graph break"),
    "an input is returned": (lambda: Stack(blocks(kind=Aliasing), lambda block, x: block(x)[0]), "alias"),
}


def repeated(train="default", infer="default", **settings) -> InductorCompile:
    return InductorCompile(train, infer, **({"targets": "repeated", "baseline_steps": 0} | settings))


def fit(make, *callbacks, validate: bool = True, **settings) -> Classifier:
    data = {"train": loader(4, 5), "validation": loader(2, 3) if validate else None}
    return models.fit(*callbacks, make=lambda: Classifier(make()), **data, **settings)


def assert_equals_eager(make, callback: InductorCompile, validate: bool = True, **settings) -> Classifier:
    """Train with the callback and without, and then again, and compare."""
    compiled = fit(make, callback, validate=validate, **settings)
    eager = fit(make, validate=validate, **settings)
    for module, callbacks in ((compiled, [callback]), (eager, [])):
        torch.manual_seed(2)
        trainer(*callbacks, **settings).fit(module, loader(3, 5))
    assert_same_values(compiled, eager)
    assert_same_module(compiled, eager)
    return compiled


# ------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_one_graph_computes_what_eager_computes(make):
    config = InductorConfig(options={"fallback_random": True})
    callback = repeated(config, config, on_error="raise")
    assert_equals_eager(make, callback)
    train = callback.report.train
    assert "whole_target" not in {event["kind"] for event in train.diagnostics.events}
    assert (train.graph_breaks, train.fallbacks) == (0, 0)
    assert train.verified.startswith("equal")
    assert train.targets[0].startswith("net (")


@pytest.mark.parametrize(("make", "reason"), WHOLE.values(), ids=WHOLE)
def test_a_target_whose_blocks_cannot_be_regions_is_compiled_whole(make, reason):
    infer = "default" if reason == "buffer mutations" else None  # only training changes the buffers of a batch norm
    callback = repeated(infer=infer, on_error="raise")
    with pytest.warns(CompileWarning, match=rf"(?i)'net' is compiled whole in the train phase.*{reason}"):
        assert_equals_eager(make, callback)
    train = callback.report.train
    assert train.targets == ("net",)
    assert train.graphs >= 1
    assert train.fallbacks == 0
    (event,) = [event for event in train.diagnostics.events if event["kind"] == "whole_target"]
    assert re.search(reason, event["reason"].lower())
    if infer:
        assert callback.report.infer.targets == ("forward (4 x Normed)",)


def test_an_activation_checkpoint_recomputes_with_the_same_code():
    """The first call of a target fails within a checkpoint, and the next call compiles the whole target."""

    class Checkpointed(Classifier):
        def logits(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    callback = repeated(infer=None)
    with pytest.warns(CompileWarning, match="'net' is compiled whole"):
        assert_fits_as_eager(callback, make=lambda: Checkpointed(Stack(blocks(kind=Normed))), train=4, validation=None)
    assert callback.report.train.targets == ("net",)


@pytest.mark.codegen
@pytest.mark.parametrize(
    "exposed",
    [True, pytest.param(False, marks=pytest.mark.skipif(OLDEST, reason="its memory planning spares these views"))],
)
def test_memory_that_backward_reads_is_not_overwritten(monkeypatch, exposed):
    """Without the workaround gradients are wrong, which verification notices; the whole target is compiled."""

    class Plain(Block):
        def forward(self, x):
            return x + torch.relu(self.up(x))  # its transposed input is saved for the backward pass

    make = lambda: Stack(blocks(kind=Plain), lambda block, x: block(x) @ block.up.weight)  # noqa: E731
    callback = repeated(infer=None, passes=[Uncached()])
    if exposed:
        assert_equals_eager(make, callback, validate=False)
        assert callback.report.train.targets == ("net (4 x Plain)",)
    else:
        monkeypatch.setattr(regions, "expose_aliases", lambda graph_module: None)
        with pytest.warns(CompileWarning, match=r"compiled whole.*differs from eager: the gradient"):
            assert_equals_eager(make, callback, validate=False)


def test_blocks_that_share_nothing_are_reported():
    callback = repeated(infer=None)
    with pytest.warns(CompileWarning, match="target 'net' share no code in the train phase"):
        assert_equals_eager(lambda: Stack([Block(scale=i + 1) for i in range(4)]), callback)


@pytest.mark.parametrize("dynamic", [None, True])
def test_new_shapes_recompile_the_graph(dynamic):
    callback = repeated(InductorConfig(dynamic=dynamic), None)
    batches = batches_of(4, 4, 5, 5, 6, 6)
    assert_fits_as_eager(callback, make=lambda: Classifier(Stack(blocks())), train=batches, validation=None)
    assert callback.report.train.graphs <= 2
    assert callback.report.train.fallbacks == 0


@pytest.mark.parametrize("hook", ["post_grad_post", "joint_post"])
def test_graph_passes_run_once_on_each_region(hook):
    class Tanh(Block):
        def forward(self, x):
            return x + torch.tanh(self.up(x))

    x, outputs, double = torch.randn(3, FEATURES), [], Doubling(torch.ops.aten.tanh.default, hook=hook)
    for targets in (None, "repeated"):
        torch.manual_seed(2)
        net = compile_phases(Stack(blocks(kind=Tanh)), targets=targets, passes=[double], verify="off")
        if targets and hook.startswith("joint"):
            with pytest.warns(CompileWarning, match="twice on each region"):
                net(x)
        outputs.append(net(x))
        restore(net)
    torch.testing.assert_close(*outputs)


# ------------------------------------------------------------------------------------------ no trace


def test_copies_and_checkpoints_of_a_run_do_not_contain_the_marks(tmp_path):
    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            self.copy, self.pickle = copy.deepcopy(module.net), pickle.dumps(module.net.layers[0])
            assert not any("forward" in vars(part) for part in module.modules())
            self.expected = module.net(torch.ones(2, FEATURES)).detach()
            trainer.save_checkpoint(tmp_path / "run.ckpt")

    copies = Copies()
    module = fit(lambda: Stack(blocks()), repeated(), copies)
    assert_same_module(copies.copy, Stack(blocks()))
    assert_same_module(pickle.loads(copies.pickle), Block())
    torch.testing.assert_close(copies.copy(torch.ones(2, FEATURES)), copies.expected)
    keys = torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"].keys()
    assert keys == Classifier(Stack(blocks())).state_dict().keys() == module.state_dict().keys()


def test_an_exception_leaves_no_marks():
    def failing(block, x):
        if x.shape[0] == 3:
            raise ValueError("three")
        return block(x)

    net = compile_phases(Stack(blocks(), failing), targets="repeated", infer_mode=None)
    net(torch.randn(2, FEATURES))
    with pytest.raises(ValueError, match="three"):
        net(torch.randn(3, FEATURES))
    assert report_of(net).train.targets == ("forward (4 x Block)",)
    restore(net)
    assert_same_module(net, Stack(blocks()))


def test_a_failure_of_the_whole_target_raises():
    class Untraceable(Block):
        forward = torch.compiler.disable(Block.forward, recursive=False)

    callback = repeated(InductorConfig(fullgraph=True), None, on_error="raise")
    with pytest.warns(CompileWarning, match="compiled whole"), pytest.raises(CompileError, match="target 'net'"):
        fit(lambda: Stack(blocks(kind=Untraceable)), callback)


def test_a_cache_folder_keeps_the_graph_and_the_report_names_the_blocks(tmp_path):
    eager, reports = fit(lambda: Stack(blocks())), []
    for _ in range(2):
        torch._dynamo.reset()
        callback = repeated(cache_dir=tmp_path)
        assert_same_values(fit(lambda: Stack(blocks()), callback), eager)
        reports.append(callback.report)
    assert [(report.train.graphs, report.train.cache_hits) for report in reports] == [(1, 0), (1, 1)]
    for report in reports:
        assert report.train.targets == ("net (4 x Block)",)
        assert report.infer.targets == ("forward (4 x Block)",)
        assert "net (4 x Block)" in str(report)


COPIED = {name: SHARED[name] for name in ("alike", "adapters in some", "tied weights", "a hook")}
COPIED |= {name: WHOLE[name][0] for name in ("batch norm", "a buffer counts")}


@pytest.mark.filterwarnings("ignore::compile_callbacks.CompileWarning")
@pytest.mark.parametrize("make", COPIED.values(), ids=COPIED)
def test_averages_checkpoints_and_restored_modules_equal_eager(make):
    config = InductorConfig(options={"fallback_random": True})
    compiled, eager = nets = [seeded(make) for _ in range(2)]
    compile_phases(compiled, config, config, targets="repeated")
    x, results = torch.linspace(-1, 1, 5 * FEATURES).view(5, FEATURES), []
    for net in nets:
        torch.manual_seed(3)
        average = AveragedModel(net, avg_fn=get_ema_avg_fn(0.5))
        for _ in range(2):
            net(x).square().mean().backward()
            torch.optim.SGD(net.parameters(), 0.1).step()
            average.update_parameters(net)
        checkpoint, loaded = io.BytesIO(), make()
        torch.save(net.state_dict(), checkpoint)
        checkpoint.seek(0)
        loaded.load_state_dict(torch.load(checkpoint, weights_only=True))
        with torch.no_grad():
            outputs = [module.eval()(x) for module in (net, average, average.module, loaded)]
        torch.testing.assert_close(outputs[0], outputs[-1], **FLOAT32)
        results.append((outputs, dict(net.state_dict()), [weight.grad for weight in net.parameters()]))
    torch.testing.assert_close(*results, **FLOAT32)
    restore(compiled)
    assert_same_module(compiled, eager)
    torch.testing.assert_close(compiled(x), eager(x), **FLOAT32)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_cuda_graphs_compute_what_eager_computes(accumulate):
    callback = repeated("reduce-overhead", "reduce-overhead")
    assert_equals_eager(
        lambda: Stack(blocks(6)), callback, accelerator="gpu", accumulate_grad_batches=accumulate, max_epochs=3
    )
    assert not [event for event in callback.report.train.diagnostics.events if event["kind"] == "cudagraph_skip"]
    assert callback.report.train.targets == ("net (6 x Block)",)


# ------------------------------------------------------------------------------------------ which blocks


@pytest.mark.parametrize("targets", [None, "net.layers.*", "repeated"])
def test_blocks_that_the_steps_call_or_that_a_glob_names_share_a_graph(targets):
    class Steps(Classifier):
        def logits(self, x):
            if targets == "net.layers.*":
                return self.net(x)
            x = self.net.embed(x)
            for layer in self.net.layers:
                x = layer(x)
            return self.net.head(x)

    callback = repeated(infer=None, targets=targets)
    assert_fits_as_eager(callback, make=lambda: Steps(Stack(blocks())), train=4, validation=None)
    assert "net.layers.* (4 blocks, one graph)" in callback.report.train.targets


def test_weights_of_repeated_blocks_are_not_frozen():
    module, callback = seeded(lambda: Classifier(Stack(blocks()))), repeated(None, {"freezing": True})
    with pytest.warns(CompileWarning, match=r"no effect.*repeated blocks"):
        trainer(callback).predict(module, loader(3))
    assert callback.report.infer.graphs == 1


def test_a_tune_does_not_try_freezing():
    callback = repeated(None, Tune(["default", "freezing"], steps=5))
    trainer(callback).predict(seeded(lambda: Classifier(Stack(blocks()))), loader(40))
    verdicts = {trial["candidate"]: trial["verdict"] for trial in callback.report.infer.diagnostics.trials}
    assert verdicts["freezing"] == "not tried"
    assert verdicts["default"] != "not tried"
