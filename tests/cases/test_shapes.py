"""Sizes that vary in eager steps are dynamic in the first graph. Later calls that no graph fits run eagerly."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.checkpoint import checkpoint

from compile_callbacks import InductorCompile
from tests.cases import zoo
from tests.cases.case import Case, check, net
from tests.cases.zoo import Calls, Words, blocks, smooth, words
from tests.support.models import Classifier, batches_of, fit, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


def case(name, make, train, graphs, eager_calls=0, *, baseline_steps=0, epochs=1, expect=(), others=list, **callback):
    """A case that trains only, and whose graphs but the first one are recompiles of the target ``net``."""
    callback = {"infer_mode": None, "targets": "net", "baseline_steps": baseline_steps, **callback}
    calls = {"net": eager_calls} if eager_calls else {}
    counts = {"train.graphs": graphs, "train.recompiles": graphs - 1, "train.diagnostics.eager_calls": calls}
    return Case(name=name, make=make, train=train, validation=None, predict=None, trainer={"max_epochs": epochs},
                callback=callback, expect=counts | dict(expect), others=others)  # fmt: skip


def scaled(requires_grad=True, run=lambda net, x: net[2](net[:2](x) * net.scale)):
    """A function that makes a module whose network multiplies by a number."""

    def make():
        net = Calls(smooth().requires_grad_(requires_grad), run)
        net.net[2].requires_grad_(True)
        net.net.scale = 2
        return Classifier(net)

    return make


def scales_behind_a_break(net, x):
    torch._dynamo.graph_break()
    return x * net.scale


def twice_behind_breaks(net, x):
    """Call one frame twice, which does not fit when the number changes."""
    return net[2](scales_behind_a_break(net, net[1](scales_behind_a_break(net, net[0](x)))))


def before_step_6(change):
    """A function that makes the callback that changes the network there."""

    def on_train_batch_start(trainer, pl_module, batch, batch_idx):
        if batch_idx == 6:
            change(pl_module.net.net)

    return lambda: [LambdaCallback(on_train_batch_start=on_train_batch_start)]


# torch would compile batch size 1 separately, which comes twice and runs eagerly
VARYING = words((4, 5), (4, 5), (6, 7), (4, 5), (5, 9), (6, 5), (3, 8), (4, 4), (1, 6), (1, 8), (8, 3))
LATER = words(*[(4, 5)] * 9, *[(4, 6 + i % 7) for i in range(30)])
TWO_SIZES = (4, 4, 3, 4, 3)
CASES = [
    case("sizes vary in the baseline", Words, VARYING, 1, 2, baseline_steps=3),
    case("sizes after the baseline", Words, LATER, 2, 7, baseline_steps=3),
    *[
        Case(name=f"a smaller last batch after {steps} eager steps", train=(16,) * 15 + (9,), predict=(16,),
             validation=(16,) * 15 + (5,), trainer={"max_epochs": 3}, callback={"baseline_steps": steps},
             expect={"train.diagnostics.eager_calls": {"net": 3}, "infer.diagnostics.eager_calls": {"forward": 3}})
        for steps in (0, 10)
    ],
    # The second size gets a static graph at its eighth call, and the third one a graph that fits all further sizes.
    case("two sizes", Classifier, (4, 4, 4, 4, 3), 2, 7, baseline_steps=10, epochs=10),
    case("five sizes", Classifier, (4,) + (4, 3) * 10 + (4, 3, 5, 6, 7) * 6, 3, 14),
    case("fewer than eight misses in 100 calls", net(smooth), ((4,) * 14 + (3,)) * 10, 1, 10),
    case("unfrozen", scaled(requires_grad=False), (4,) * 20, 2, 7, baseline_steps=2,
         others=before_step_6(lambda net: net.requires_grad_(True))),
    case("another number", scaled(), (4,) * 20, 2, 7, baseline_steps=2,
         others=before_step_6(lambda net: setattr(net, "scale", 3))),
    case("two floats and two sizes", zoo.annealed, (8,) * 12 + (8, 3) * 26, 4, 21, baseline_steps=2),
    # These must be compiled at once.
    case("checkpoint", lambda: zoo.CallsInTraining(smooth(), zoo.in_checkpoint), TWO_SIZES, 2),
    case("fullgraph", net(smooth), TWO_SIZES, 2, train_mode={"fullgraph": True}),
    case("equal blocks", net(blocks), TWO_SIZES, 4, targets="net.*"),
    case("a call of two frames counts once", scaled(run=twice_behind_breaks), (4,) * 20, 4, 7, baseline_steps=2,
         expect=dict.fromkeys(("train.graphs", "train.graph_breaks", "train.recompiles"), ...),
         others=before_step_6(lambda net: setattr(net, "scale", 3))),
    case("a graph break counts once", lambda: Classifier(Calls(smooth(), zoo.breaks)), (4,) * 5 + (3,) * 12, 4, 7,
         expect={"train.graph_breaks": 1, "train.recompiles": 4}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_of_other_sizes(case):
    check(case)


DAMAGED = (
    *(b"null", b"[" * 200_000, b"\xff\xfe\x00", b'{"version": 2, "shapes": {"train": {}}}'),
    b'{"version": 1, "winners": null, "shapes": {"k": null, "l": "default"}}',
)


@pytest.mark.usefixtures("captured_graph")
@pytest.mark.filterwarnings("ignore:cache_dir has no effect")  # on captured graphs
def test_cache_dir_remembers_the_shapes_for_the_next_run_and_a_damaged_file_costs_the_record_only(tmp_path):
    def graphs():
        torch.compiler.reset()
        callback = InductorCompile(infer_mode=None, baseline_steps=2, cache_dir=tmp_path)
        fit(callback, make=Words, train=words(*[(4, 5)] * 6, *[(4, 5), (6, 7), (3, 6)] * 8)(), validation=None)
        return callback.report.train.graphs

    assert [graphs(), graphs()] == [2, 1]
    (file,) = tmp_path.glob("model-*.json")
    assert json.loads(file.read_text())["shapes"] == {"train": {"net": {"args[0]['words']:2": [0, 1]}}}
    for content in DAMAGED:
        file.write_bytes(content)
        assert [graphs(), graphs()] == [2, 1]
    file.unlink()
    os.mkfifo(file)  # opening it would wait for a writer
    assert graphs() == 2


def test_validation_outside_of_fit_takes_its_graph_from_the_cache_and_is_no_recompile():
    callback = InductorCompile(None, {"dynamic": False}, baseline_steps=0, targets="net")
    module, run = seeded(), trainer(callback, num_sanity_val_steps=0)
    run.fit(module, loader(1), loader(1))
    for _ in range(8):
        run.validate(module, loader(1), verbose=False)
    infer = callback.report.infer
    assert (infer.graphs, infer.recompiles, infer.cache_hits) == (2, 0, 2 - infer.diagnostics.cache_misses)


class Reentrant(Classifier):
    """Compares the gradient of a bias in front of dropout with the mask of the forward pass."""

    def training_step(self, batch, batch_idx):
        outputs = checkpoint(self.net, batch[0].clone().requires_grad_(), use_reentrant=True)
        self.kept = outputs != 0
        return outputs.sum()

    def on_after_backward(self):
        torch.testing.assert_close(self.net[0].bias.grad, 2.0 * self.kept.sum(0))


def test_a_reentrant_checkpoint_recomputes_with_the_mask_of_its_forward_pass():
    callback = InductorCompile(infer_mode=None, targets="net", baseline_steps=2)
    make = lambda: Reentrant(nn.Sequential(nn.Linear(8, 3), nn.Dropout()))  # noqa: E731
    fit(callback, make=make, train=batches_of(*[4] * 10, 3), validation=None)
    assert callback.report.train.diagnostics.eager_calls == {}


def test_no_compile_begins_after_sigterm():
    callback = InductorCompile(targets="net", baseline_steps=0)
    stops = lambda net, x: os.kill(os.getpid(), signal.SIGTERM) or net(x)  # noqa: E731
    with pytest.raises(SystemExit):
        fit(callback, make=lambda: zoo.CallsInTraining(smooth(), stops))
    assert callback.report.train.graphs == 0
    assert "asked to stop" in str(callback.report.train.diagnostics.events)


class Resets(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 5:
            torch.compiler.reset()


def test_a_compile_after_reset_is_no_recompile_and_no_sample():
    settings = {"infer_mode": None, "targets": ["net"], "verify": "off"}
    expect = {"train.graphs": 2, "train.recompiles": 0}
    found = check(Case(name="reset", make=Resets, train=(4,) * 12, callback=settings, expect=expect)).report.train
    assert [series["steps"] for series in found.diagnostics.series if series["kind"] == "compiling"] == [[1, 7]]
