"""A CUDA graph whose first run raised: torch's own tree of CUDA graphs, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager, CUDAWarmupNode, ExecutionState

from compile_callbacks.graphs.compiled_graph import CudaGraph
from compile_callbacks.graphs.failures import EagerFallback, TargetSettings
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.recorder import CallInProgress, CompileRecorder

pytestmark = pytest.mark.all_versions

KEY = CompileKey("net", "train")


@pytest.fixture
def manager(monkeypatch):
    """The device's tree of CUDA graphs, whose current node is a first run of two outputs that raised."""
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
    monkeypatch.setattr(cudagraph_trees.MarkStepBox, "mark_step_counter", -2)  # a new step begins
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda index, create_if_none_exists: tree)
    return tree


@pytest.fixture
def call():
    """A running call of the target, whose warnings are issued when it ends."""
    call = CallInProgress()
    call.key = KEY
    return call


def graph_of(compiled, call):
    recorder = CompileRecorder()
    recorder.calling.current = call
    return CudaGraph(compiled, torch.device("cuda", 0), EagerFallback(KEY, recorder, TargetSettings()))


def test_the_call_after_a_first_run_that_raised_works_and_reports_it(manager, call):
    def compiled(x):
        if manager.in_warmup:  # as torch does first; on torch 2.11 it raised an AssertionError
            manager.try_end_curr_warmup("function")
        return [x + 1]

    graph = graph_of(compiled, call)
    assert graph(1) == [2]
    assert manager.current_node is None
    assert manager.path_state == ExecutionState.NONE
    assert manager.warmed_up_functions == {"another"}
    ((code, message, about),) = call.warnings
    assert (code, about) == ("CC305", ("net", "train"))
    assert message.startswith("target 'net' (train phase): the first run of a CUDA graph raised")
    assert graph(2) == [3]
    assert len(call.warnings) == 1


@pytest.mark.parametrize("tree", [None, SimpleNamespace(current_node=None)], ids=["no tree", "no run"])
def test_nothing_is_repaired_if_memory_was_short_before_the_first_run(monkeypatch, call, tree):
    """To make the tree of CUDA graphs, torch allocates on a new stream, which takes 2 MiB."""
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda index, create_if_none_exists: tree)
    assert graph_of(lambda x: [x], call)(1) == [1]
    assert not call.warnings
