"""Sharded weights: results equal eager in two processes, checkpoints of any number of devices, refused settings.

The two processes use gloo on the CPU and, if there are two GPUs, NCCL.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from compile_callbacks import CompileWarning, InductorBackend, InductorCompile, Tune, compile_phases, export, report_of
from tests.support.fsdp_ranks import BLOCKS, WIDTH, Blocks, Whole, data, loader, one_device, shard_blocks
from tests.support.models import FLOAT32
from tests.support.pairs import pair_of

CASES = ["fits", "predicts", "accumulates_clips_and_thaws", "sharded_as_one", "one_rank_fails"]
CASES += ["without_a_trainer", "fsdp1_in_a_trainer"]
WEIGHTS_ARE_SHARDED = "the weights are sharded"
ONE_GRAPH = f"net.layers.* ({BLOCKS} blocks, one graph)"


# ------------------------------------------------------------------------------------------ two processes

pair = pair_of("fsdp_ranks.py", CASES)


def assert_close(apart, close):
    assert apart["losses"] < close["atol"]
    assert apart["weights"] < close["atol"]
    assert apart["moved"] > 1e-3


def assert_compiled(phase, target=ONE_GRAPH):
    assert phase["targets"] == [target]
    assert phase["graphs"] == 1
    assert [phase["graph_breaks"], phase["recompiles"], phase["fallbacks"]] == [0, 0, 0]
    assert phase["verified"] == "equal 1"


@pytest.mark.parametrize(("case", "target"), [("fits", ONE_GRAPH), ("sharded_as_one", "net")])
def test_sharded_blocks_share_a_graph_and_train_as_in_eager(pair, case, target):
    for rank in pair(case):
        assert_close(rank["apart"], pair.close)
        assert_compiled(rank["report"]["train"], target)
        if case == "fits":
            assert_compiled(rank["report"]["infer"])
            assert rank["left"] == []


def test_sharded_training_equals_eager(pair):
    for rank in pair("accumulates_clips_and_thaws"):
        assert_close(rank["apart"], pair.close)


def test_a_compiler_that_fails_on_one_rank_does_not_end_the_run(pair):
    ranks = pair("one_rank_fails")
    for rank in ranks:
        assert_close(rank["apart"], pair.close)
    failed, other = ranks[1]["report"]["train"], ranks[0]["report"]["train"]
    assert failed["fallbacks"] >= 1
    reasons = [event["reason"] for event in failed["diagnostics"]["events"] if event["kind"] == "fallback"]
    assert "no code on this rank" in reasons[0]
    assert (other["graphs"], other["fallbacks"]) == (1, 0)


def test_sharded_weights_are_not_frozen(pair):
    for number, rank in enumerate(pair("predicts")):
        assert rank["apart"] < pair.close["atol"]
        assert len(rank["warnings"]) == (1 if number == 0 else 0)  # the first process warns for all
        assert all("freezing" in message and WEIGHTS_ARE_SHARDED in message for message in rank["warnings"])
        diagnostics = rank["report"]["infer"]["diagnostics"]
        reasons = [event["reason"] for event in diagnostics["events"] if event["kind"] == "freezing"]
        assert [WEIGHTS_ARE_SHARDED in reason for reason in reasons] == [True]


@pytest.mark.parametrize("case", ["without_a_trainer", "fsdp1_in_a_trainer"])
def test_fsdp1_and_modules_without_a_trainer_equal_eager(pair, case):
    for rank in pair(case):
        torch.testing.assert_close(rank["losses"], rank["eager"], **pair.close)
        target = ONE_GRAPH if case == "fsdp1_in_a_trainer" else ONE_GRAPH.removeprefix("net.")
        assert_compiled(rank["report"]["train"], target)


def test_a_checkpoint_of_two_devices_loads_into_one_eager_module(pair):
    pair("fits")
    state = torch.load(pair.folder / "full.ckpt", weights_only=False)["state_dict"]
    module = Whole()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert list(state) == list(before)
    module.load_state_dict(state)
    assert not any(torch.equal(before[name], value) for name, value in module.state_dict().items())


# ------------------------------------------------------------------------------------------ one process


@pytest.fixture
def mesh(process_group):
    """A mesh of one device: weights are sharded in one part."""
    return init_device_mesh("cpu", (1,))


class Stack(LightningModule):
    """Its own call runs sharded parts, and a part that is not sharded."""

    def __init__(self, mesh):
        super().__init__()
        self.net, self.teacher = Blocks(), nn.Linear(WIDTH, WIDTH)
        shard_blocks(self.net, mesh=mesh)

    def forward(self, x):
        return self.net(self.teacher(x))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        *((names, [ONE_GRAPH]) for names in (["net"], ["forward"], ["net.layers.?"])),
        (["net.head", "net.layers.1.inner"], ["net.head", "net.layers.1.inner"]),
    ],
)
def test_targets_of_a_sharded_module_are_its_innermost_parts(mesh, names, found, compiled):
    root = compiled(Stack(mesh), targets=names, verify="off")
    root(data().tensors[0]).sum().backward()
    assert sorted(report_of(root).train.targets) == found


def test_a_replaced_forward_of_a_sharded_part_runs(mesh, compiled):
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    original = net[1].forward
    net[1].forward = lambda x: 2 * original(x)
    x = torch.ones(4, 8)
    expected = net(x)
    for part in (*net, net):
        fully_shard(part, mesh=mesh)
    with pytest.warns(CompileWarning, match="target '1' is not compiled: its forward is an attribute"):
        compiled(net)
    torch.testing.assert_close(net(x), expected)
    assert "1" not in report_of(net).train.targets


def test_sharded_blocks_that_differ_have_separate_graphs(mesh, compiled):
    """Dynamo may drop guards on modules of FSDP. A number that differs and a frozen weight need separate graphs."""

    def built():
        torch.manual_seed(1)
        net = Blocks()
        net.layers[1].norm.eps = 0.5
        net.layers[2].requires_grad_(False)
        return shard_blocks(net, mesh=mesh)

    x, losses, gradients = data().tensors[0], [], []
    for net in (built(), built()):
        if losses:
            compiled(net, infer_mode=None, verify="off")
        losses.append(net(x).square().mean())
        losses[-1].backward()
        gradients.append([None if p.grad is None else p.grad.full_tensor() for p in net.parameters()])
    torch.testing.assert_close(losses[1], losses[0], **FLOAT32)
    torch.testing.assert_close(gradients[1], gradients[0], **FLOAT32)
    assert sum(gradient is not None for gradient in gradients[1]) > 10
    report = report_of(net).train
    assert report.graphs == BLOCKS
    assert report.targets == (f"layers.* ({BLOCKS} blocks, {BLOCKS} graphs)",)


def test_settings_that_need_all_weights_in_one_process_are_refused(mesh):
    root = Stack(mesh)
    with pytest.raises(ValueError, match="train_mode='reduce-overhead' records CUDA graphs"):
        compile_phases(root, train_mode="reduce-overhead")
    with pytest.raises(ValueError, match="FSDP shards the weights"):
        InductorBackend("default").build(root, [data().tensors[0]])
    with pytest.raises(ValueError, match="FSDP shards the weights"):
        export(root, (data().tensors[0],), "unused.pt2")


def test_cuda_graphs_of_sharded_weights_are_refused_and_not_tried(mesh):
    class Trained(Whole):
        def configure_model(self):
            fully_shard(self.net, mesh=mesh)

    with pytest.raises(MisconfigurationException, match="infer_mode='max-autotune' records CUDA graphs"):
        one_device(InductorCompile(None, "max-autotune")).fit(Trained(), loader(1))
    ours = InductorCompile(Tune(["reduce-overhead"]), None)
    one_device(ours, max_epochs=9).fit(Trained(), loader(1))
    reasons = {trial["candidate"]: trial["reason"] for trial in ours.report.train.diagnostics.trials}
    assert WEIGHTS_ARE_SHARDED in reasons["reduce-overhead"]


def test_deepspeed_is_refused():
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    with pytest.raises(MisconfigurationException, match="DeepSpeed"):
        InductorCompile().setup(mock.Mock(strategy=strategy, world_size=1, callbacks=[]), Whole(), "fit")
