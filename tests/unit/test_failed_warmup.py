"""A CUDA graph whose first run raised: torch's own tree of CUDA graphs, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager, CUDAWarmupNode, ExecutionState

from compile_callbacks.runtime.cudagraphs import with_warmup_repair

pytestmark = pytest.mark.all_versions


@pytest.fixture
def manager(monkeypatch):
    """The device's tree of CUDA graphs, whose current node is a warm-up run of two outputs that raised."""
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


def test_the_next_call_runs_after_a_warmup_that_raised(manager):
    said = []

    def compiled(x):
        if manager.in_warmup:  # as torch does first; on torch 2.11 it raised an AssertionError
            manager.try_end_curr_warmup("function")
        return x + 1

    call = with_warmup_repair(compiled, torch.device("cuda", 0), lambda: said.append("repaired"))
    assert call(1) == 2
    assert manager.current_node is None
    assert manager.path_state == ExecutionState.NONE
    assert manager.warmed_up_functions == {"another"}
    assert said == ["repaired"]
    assert call(2) == 3
    assert said == ["repaired"]


def test_a_warmup_that_succeeded_is_left_alone(manager):
    manager.current_node.tensor_weakrefs += [None, None]
    call = with_warmup_repair(lambda x: x, torch.device("cuda", 0), lambda: pytest.fail("nothing to repair"))
    assert call(1) == 1
    assert "function" in manager.warmed_up_functions
