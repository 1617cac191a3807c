"""A CUDA graph whose first run raised: torch's own tree of CUDA graphs, without a GPU."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager, CUDAWarmupNode, ExecutionState

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import Classifier, Wrapper, loader, trainer
from tests.support.step_times import OnGpu, Times

pytestmark = pytest.mark.all_versions


def failed_tree():
    """The tree of CUDA graphs of a device, whose current node is a first run of two outputs that raised."""
    function = SimpleNamespace(id="function", user_visible_output_idxs=())
    arguments = [None, (0, 0), None, 0, ["first", "second"], None, False, cudagraph_trees.GraphID(-1)]
    tree = object.__new__(CUDAGraphTreeManager)
    tree.current_node = CUDAWarmupNode(function, *arguments)
    tree.path_state = ExecutionState.WARMUP
    tree.warmed_up_functions = {"function", "another"}
    tree.disable_invalidate_aliases = False
    tree.has_live_user_visible_output_cloning = False
    tree.running_forwards_with_pending_backwards = False
    tree.current_gen, tree.id_to_mode = -1, {"function": cudagraph_trees.CompilationMode.FORWARD}
    return tree


class Net(Wrapper):
    """Has an input of the graph that says it is on a GPU."""

    def __init__(self):
        super().__init__(nn.Linear(8, 3))
        self._parameters["on_gpu"] = OnGpu(torch.zeros(1))

    def forward(self, x):
        return self.net(x), self.on_gpu.view(-1)


class OnTwoDevices(Classifier):
    def logits(self, x):
        return self.net(x)[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.net.parameters(), 0.1)


def warned(monkeypatch, tree):
    """Train with CUDA graphs and this tree, and return the warnings."""

    def compile_fx(graph_module, inputs, **arguments):
        def run(*inputs):
            if tree is not None and tree.current_node is not None:  # as torch does, on 2.11 with an AssertionError
                tree.try_end_curr_warmup("function")
            return graph_module.forward(*inputs)

        return run

    Times(monkeypatch)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda index, create_if_none_exists: tree)
    monkeypatch.setattr(cudagraph_trees.MarkStepBox, "mark_step_counter", -2)  # a new step begins
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CompileWarning)
        callback = InductorCompile("reduce-overhead", None, verify="off", baseline_steps=0, targets="net")
        trainer(callback).fit(OnTwoDevices(Net()), loader(4))
    assert callback.report.train.diagnostics.steps["compiled"] == 4
    return [str(warning.message) for warning in caught]


def test_the_call_after_a_first_run_that_raised_works_and_reports_it(monkeypatch):
    tree = failed_tree()
    (message,) = warned(monkeypatch, tree)
    assert message.startswith("target 'net' (train phase): the first run of a CUDA graph raised")
    assert "CC305" in message
    assert (tree.current_node, tree.path_state) == (None, ExecutionState.NONE)
    assert tree.warmed_up_functions == {"another"}


@pytest.mark.parametrize("tree", [None, SimpleNamespace(current_node=None)], ids=["no tree", "no run"])
def test_nothing_is_repaired_if_memory_was_short_before_the_first_run(monkeypatch, tree):
    """To make the tree of CUDA graphs, torch allocates on a new stream, which takes 2 MiB."""
    assert warned(monkeypatch, tree) == []
