"""The helpers to write and test graph passes."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from compile_callbacks import InductorCompile, graph_pass
from compile_callbacks.passes import RecordGraphs, call_before, count_ops, find_nodes, replace_node
from compile_callbacks.passes.testing import check_pass
from tests.support.models import Classifier, loader, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

aten = torch.ops.aten


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
