"""Sharded weights: the same results as eager in two processes, checkpoints for any number, and what is refused."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from compile_callbacks import InductorBackend, InductorCompile, Tune, compile_phases, export, report_of, restore
from compile_callbacks.runtime.fsdp import WEIGHTS_ARE_SHARDED
from compile_callbacks.runtime.targets import resolve_targets
from tests.support.against_eager import FLOAT32
from tests.support.pairs import made_once, run_pairs
from tests.support.sharded_models import BLOCKS, WIDTH, Blocks, Whole, data, loader, one_device

PARTS = [f"net.layers.{index}" for index in range(BLOCKS)]
ONE_GRAPH = f"net.layers.* ({BLOCKS} blocks, one graph)"


# ------------------------------------------------------------------------------------------ two processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory, worker_id):
    """What two processes left of all cases, run once; to start them takes longer than most cases do."""
    return made_once("fsdp", _fill, tmp_path_factory, worker_id)


def _fill(folder: Path) -> None:
    module, trainer = Whole(), one_device(InductorCompile(baseline_steps=0))
    trainer.fit(module, loader(1), loader(1))
    trainer.save_checkpoint(folder / "one.ckpt")
    run_pairs("fsdp_ranks.py", folder, [])


@pytest.fixture
def seen(folder):
    """What both ranks saw of a case."""

    def of_case(name: str) -> list[dict]:
        both = []
        for rank in (0, 1):
            left = folder / f"rank{rank}.json"
            assert left.exists(), (folder / f"printed0.{rank}").read_text()[-3000:]
            cases = json.loads(left.read_text())
            assert name in cases, next(reversed(cases.values()))
            if isinstance(cases[name], dict):
                assert "error" not in cases[name], cases[name]["error"]
            both.append(cases[name])
        return both

    return of_case


def assert_close(apart: dict[str, float]) -> None:
    assert apart["losses"] < 1e-5
    assert apart["weights"] < 1e-5
    assert apart["moved"] > 1e-3  # of all weights the one that moved least


def assert_compiled(phase: dict, target: str = ONE_GRAPH) -> None:
    assert phase["targets"] == [target]
    assert phase["graphs"] == 1
    assert [phase["graph_breaks"], phase["recompiles"], phase["fallbacks"]] == [0, 0, 0]
    assert phase["verified"] == f"equal {phase['graphs']}"


def test_sharded_blocks_share_a_graph_and_train_as_eager_ones(seen):
    for rank in seen("fits"):
        assert_close(rank["apart"])
        assert_compiled(rank["report"]["train"])
        assert_compiled(rank["report"]["infer"])
        assert rank["left"] == []


def test_weights_sharded_as_one_compile_as_one(seen):
    for rank in seen("sharded_as_one"):
        assert_close(rank["apart"])
        assert_compiled(rank["report"]["train"], "net")


@pytest.mark.parametrize("case", ["accumulates_and_clips", "thaws"])
def test_sharded_training_equals_eager(seen, case):
    for rank in seen(case):
        assert_close(rank)


def test_activation_checkpoints_of_sharded_blocks(seen):
    for rank in seen("checkpoints_activations"):
        assert_close(rank["apart"])
        assert_compiled(rank["report"]["train"])


def test_sharded_weights_in_lower_precision(seen):
    for rank in seen("lower_precision"):
        assert rank["apart"]["losses"] < 0.02
        assert_compiled(rank["report"]["train"])


def test_a_compiler_that_fails_on_one_rank_ends_well(seen):
    ranks = seen("one_rank_fails")
    for rank in ranks:
        assert_close(rank["apart"])
    assert ranks[1]["report"]["train"]["fallbacks"] >= 1
    events = ranks[1]["report"]["train"]["diagnostics"]["events"]
    told = [event["reason"] for event in events if event["kind"] == "fallback"]
    assert "no code on this rank" in told[0]
    other = ranks[0]["report"]["train"]  # stays compiled
    assert (other["graphs"], other["fallbacks"]) == (1, 0)


def test_sharded_weights_are_not_baked_in(seen):
    for number, rank in enumerate(seen("predicts_without_baking_in")):
        assert rank["apart"] < 1e-5
        assert rank["apart_moved"] < 1e-5
        assert rank["moved"] > 0.1
        assert len(rank["warned"]) == (1 if number == 0 else 0)  # the first process warns for all
        assert all("freezing" in message and WEIGHTS_ARE_SHARDED in message for message in rank["warned"])
        diagnostics = rank["report"]["infer"]["diagnostics"]
        reasons = {event.get("reason") for event in diagnostics["events"] if event["kind"] == "fold"}
        assert WEIGHTS_ARE_SHARDED in reasons  # folding
        assert diagnostics["folded_mib"] is None


@pytest.mark.parametrize("case", ["without_a_trainer", "fsdp1"])
def test_sharded_modules_compile_without_a_trainer(seen, case):
    for rank in seen(case):
        torch.testing.assert_close(rank["losses"], rank["eager"], **FLOAT32)
        assert_compiled(rank["report"]["train"], ONE_GRAPH.removeprefix("net."))
        assert_compiled(rank["report"]["infer"], ONE_GRAPH.removeprefix("net."))


def test_fsdp1_compiles_in_a_trainer(seen):
    for rank in seen("fsdp1_in_a_trainer"):
        torch.testing.assert_close(rank["losses"], rank["eager"], **FLOAT32)
        assert_compiled(rank["report"]["train"])


def test_fsdp1_without_original_parameters_is_refused(seen):
    for rank in seen("fsdp1"):
        assert "use_orig_params=False" in rank["refused"]


# ------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("case", ["resumes_what_two_devices_saved", "resumes_what_one_device_saved"])
def test_two_devices_resume(seen, case):
    for rank in seen(case):
        assert_close(rank)


def test_a_checkpoint_of_two_devices_loads_into_one_eager_module(seen, folder, tmp_path, monkeypatch):
    seen("fits"), seen("saves_in_parts")
    tool = "lightning.fabric.utilities.consolidate_checkpoint"
    monkeypatch.setattr(sys, "argv", [tool, str(folder / "parts.ckpt"), "--output_file", str(tmp_path / "whole.pt")])
    runpy.run_module(tool, run_name="__main__")
    whole = torch.load(folder / "full.ckpt", weights_only=False)["state_dict"]
    from_parts = torch.load(tmp_path / "whole.pt", weights_only=False)["state_dict"]
    for state in (whole, from_parts):
        module = Whole()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        assert list(state) == list(before)
        module.load_state_dict(state)
        assert not any(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_one_device_resumes_what_two_saved(seen, folder):
    seen("fits")
    resumed, straight = Whole(), Whole()
    one_device(InductorCompile(baseline_steps=0), max_epochs=3).fit(
        resumed, loader(1), loader(1), ckpt_path=folder / "full.ckpt"
    )
    one_device(max_epochs=3).fit(straight, loader(1), loader(1))
    assert len(resumed.losses) == len(loader(1))
    torch.testing.assert_close(resumed.losses, straight.losses[-len(resumed.losses) :], **FLOAT32)
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------------------ one process


@pytest.fixture
def mesh():
    """A mesh of one device: weights are sharded in one part."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Stack(LightningModule):
    """A LightningModule whose own call holds sharded parts, beside a part that is not sharded."""

    def __init__(self, mesh) -> None:
        super().__init__()
        self.net, self.teacher = Blocks(), nn.Linear(WIDTH, WIDTH)
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.teacher(x))


def test_targets_of_a_sharded_module_are_its_innermost_parts(mesh):
    root = Stack(mesh)

    def found(names):
        targets = [member for target in resolve_targets(root, names, LightningModule) for member in target.members]
        return [(target.name, target.method) for target in targets]

    parts = [(name, "forward") for name in PARTS]
    assert found(None) == [*parts, ("teacher", None)]
    assert found(["net"]) == found(["forward"]) == found(["net.forward"]) == parts
    assert found(["net.layers.?"]) == parts
    assert found("repeated") == parts
    assert [target.name for target in resolve_targets(root, "repeated", LightningModule)] == ["net.layers.*"]
    assert found(["net.layers.1"]) == [("net.layers.1", "forward")]
    assert found(["net.head", "net.layers.1.inner"]) == [("net.head", None), ("net.layers.1.inner", None)]
    sharded = {
        target.name: target.sharded for target in resolve_targets(root, ["net.head", "teacher"], LightningModule)
    }
    assert sharded == {"net.head": True, "teacher": False}


def test_a_patched_forward_of_a_sharded_part_is_what_is_compiled(mesh):
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    original = net[1].forward
    net[1].forward = lambda x: 2 * original(x)
    x = torch.ones(4, 8)
    expected = net(x)
    for part in (*net, net):
        fully_shard(part, mesh=mesh)
    compile_phases(net)
    torch.testing.assert_close(net(x), expected)
    assert report_of(net).train.targets[-1] == "1"  # the patched part shares no graph
    restore(net)


@pytest.mark.parametrize("targets", [None, "repeated"])
def test_sharded_blocks_that_differ_have_graphs_of_their_own(mesh, targets):
    """Torch is free to drop guards on what FSDP manages; a number that differs, or a frozen weight, must be seen."""

    def built() -> Blocks:
        torch.manual_seed(1)
        net = Blocks()
        net.layers[1].norm.eps = 0.5
        net.layers[2].requires_grad_(False)
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    x, losses, gradients = data().tensors[0], [], []
    for net in (built(), built()):
        if losses:
            compile_phases(net, infer_mode=None, targets=targets, verify="off")
        losses.append(net(x).square().mean())
        losses[-1].backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    torch.testing.assert_close(losses[1], losses[0], **FLOAT32)
    assert [g is None for g in gradients[1]] == [g is None for g in gradients[0]]
    pairs = [(g.full_tensor(), e.full_tensor()) for g, e in zip(*gradients, strict=True) if g is not None]
    assert len(pairs) > 10
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, **FLOAT32)
    # Where sharing was asked for, it is told that there is none.
    with pytest.warns(match="share no graph") if targets else contextlib.nullcontext():
        report = report_of(net).train
    assert report.graphs == BLOCKS
    assert report.targets == (f"layers.* ({BLOCKS} blocks, {BLOCKS} graphs)",)
    restore(net)


def test_settings_that_need_weights_in_one_place_are_refused(mesh):
    root = Stack(mesh)
    with pytest.raises(ValueError, match="train_mode='reduce-overhead' records CUDA graphs"):
        compile_phases(root, train_mode="reduce-overhead")
    with pytest.raises(ValueError, match="weights are sharded by FSDP"):
        InductorBackend("default").build(root, [data().tensors[0]])
    with pytest.raises(ValueError, match="weights are sharded by FSDP"):
        export(root, (data().tensors[0],), "unused.pt2")


def test_cuda_graphs_of_sharded_weights_are_refused_and_not_tried(mesh):
    class Trained(Whole):
        def configure_model(self):
            fully_shard(self.net, mesh=mesh)

    with pytest.raises(MisconfigurationException, match=r"infer_mode='max-autotune'.*max-autotune-no-cudagraphs"):
        one_device(InductorCompile(None, "max-autotune")).fit(Trained(), loader(1))
    ours = InductorCompile(Tune(["reduce-overhead"]), None)
    one_device(ours, max_epochs=9).fit(Trained(), loader(1))
    reasons = {trial["candidate"]: trial["reason"] for trial in ours.report.train.diagnostics.trials}
    assert WEIGHTS_ARE_SHARDED in reasons["reduce-overhead"]


def test_deepspeed_is_refused():
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    with pytest.raises(MisconfigurationException, match="DeepSpeed"):
        InductorCompile().setup(mock.Mock(strategy=strategy, world_size=1), Whole(), "fit")
