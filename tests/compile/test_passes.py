"""The helpers to write and test graph passes, and `TritonMaxPoolBackward`."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from compile_callbacks import InductorCompile, graph_pass
from compile_callbacks.passes import (
    RecordGraphs,
    TritonMaxPoolBackward,
    call_before,
    count_ops,
    find_nodes,
    pattern_pass,
    replace_node,
)
from compile_callbacks.passes.library.max_pool_backward import max_pool2d_backward
from compile_callbacks.passes.testing import check_pass
from tests.support.models import Classifier, Wrapper, loader, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

aten = torch.ops.aten


class AddAndClamp(nn.Module):
    def forward(self, x, y):
        return torch.relu(x.sin() + y).cos()


def clamped_sum(x, y):
    return torch.relu(x + y)


def where_positive(x, y):
    total = x + y
    return torch.where(total > 0, total, 0)


@pytest.mark.parametrize("hook", ["joint_pre", "joint_post", "post_grad_pre", "post_grad_post"])
def test_a_pattern_is_replaced_at_every_hook_point_with_operators(hook):
    replacing = pattern_pass(clamped_sum, where_positive, [torch.ones(2, 3)] * 2, hook=hook)
    result = check_pass(replacing, AddAndClamp(), torch.randn(5, 7), torch.randn(5, 7))
    result.assert_close()
    assert replacing.replaced == 1
    assert (result.ops_before["aten.relu.default"], result.ops_after["aten.relu.default"]) == (1, 0)
    assert result.ops_after["aten.where.self"] == 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3, clamped_sum, [torch.ones(1)] * 2), TypeError, "pattern=3"),
        ((nn.functional.gelu, torch.relu, [torch.ones(1)]), TypeError, "pattern=.* is built in"),
        ((clamped_sum, clamped_sum, [torch.ones(1)]), TypeError, "pattern cannot be called"),
        ((clamped_sum, lambda x, y: (x, y), [torch.ones(1)] * 2), TypeError, "replacement must return a tensor"),
        ((clamped_sum, lambda x, y: x.sum(), [torch.ones(2)] * 2), ValueError, r"float32\[2\].*float32\[\]"),
    ],
)
def test_wrong_patterns_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        pattern_pass(*arguments)


def test_nodes_are_found_counted_inserted_and_replaced():
    @graph_pass
    def smooth(graph, is_inference):
        (relu,) = find_nodes(graph, aten.relu)
        assert find_nodes(graph, aten.relu.default, aten.tanh) == [relu]
        new = replace_node(relu, aten.sigmoid.default, relu.args[0])
        assert new.meta["val"].shape == (4, 16)
        before = call_before(new, aten.sum.dim_IntList, new.args[0], [1])
        assert before.meta["val"].shape == (4,)
        assert count_ops(graph)["aten.sigmoid.default"] == 1

    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    result = check_pass(smooth, module, torch.randn(4, 8))
    assert torch.equal(result.expected, result.expected.relu())
    assert 0 < result.actual.min() < result.actual.max() < 1
    assert result.changed
    assert result.max_abs_error > 0
    with pytest.raises(AssertionError, match="not close"):
        result.assert_close()


def test_record_graphs_writes_files_and_to_tensorboard(tmp_path):
    record = RecordGraphs(tmp_path / "graphs", hook="post_grad_pre")
    callback = InductorCompile(passes=[record], targets=["net"], baseline_steps=0, verify="off")
    logger = TensorBoardLogger(tmp_path)
    trainer(callback, logger=logger, log_every_n_steps=1).fit(Classifier(), loader(2), loader(1))
    graphs = ["000_train_forward", "001_train_backward", "002_infer_inference"]
    titles = [f"{name}_post_grad_pre" for name in graphs]
    assert [graph.title for graph in record.graphs] == titles
    assert sorted(path.stem for path in (tmp_path / "graphs").iterdir()) == titles
    text = (tmp_path / "graphs" / f"{titles[0]}.txt").read_text()
    assert 'primals_1: "f32[16, 8]"' in text
    assert "addmm" in text
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0}).Reload()
    assert {f"graphs/{title}/text_summary" for title in titles} <= set(events.Tags()["tensors"])


# ------------------------------------------------------------------------------------------ TritonMaxPoolBackward

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Half(Wrapper):
    """Runs a module under autocast."""

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.net(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings", [(3, 2, 1), (2,), (3, 1, 1), ((3, 2), (2, 3), (1, 0))], ids=["3 by 2", "2", "3 by 1", "uneven"]
)
def test_the_gradient_of_a_max_pooling(settings, device):
    net = nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.MaxPool2d(*settings))
    x = torch.randn(4, 16, 8, 8, device=device).to(memory_format=torch.channels_last)
    graph_pass = TritonMaxPoolBackward()
    graph_pass.devices = (device,)  # on a CPU, its operator is its reference
    result = check_pass(graph_pass, Half(net.to(device, memory_format=torch.channels_last)), x, phase="train")
    result.assert_close(rtol=3e-2, atol=3e-2)  # bfloat16, of values about 1
    ops = result.ops_after
    assert (ops[str(max_pool2d_backward)], ops["aten.max_pool2d_with_indices_backward.default"]) == (1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [3, 64, 100])
@pytest.mark.parametrize("size", [(112, 112), (7, 9), (1, 33)])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_the_triton_kernel_of_max_pooling_equals_its_reference(channels, size, ceil_mode):
    x = torch.randn(5, channels, *size, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    pool = nn.MaxPool2d(3, 2, 1, ceil_mode=ceil_mode)
    out = torch.compile(pool, options={"post_grad_custom_post_pass": TritonMaxPoolBackward()})(x)
    grad_output = torch.randn_like(out)
    (actual,) = torch.autograd.grad(out, x, grad_output)
    (expected,) = torch.autograd.grad(pool(x), x, grad_output)
    torch.testing.assert_close(actual, expected)
