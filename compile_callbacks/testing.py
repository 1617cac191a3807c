"""To test a custom graph pass in a few lines: what it did to the graphs, and whether results stay those of eager.

Example::

    def test_my_pass():
        result = check_pass(MyPass(), torch.nn.Linear(4, 4), torch.randn(2, 4), phase="infer")
        assert result.ops_after["aten.mul.Tensor"] == 0
        result.assert_close()
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from compile_callbacks._utils.messages import unknown
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.passes import GraphPass, as_passes, pass_hook
from compile_callbacks.passes.hooks import GraphKind, graph_kind
from compile_callbacks.passes.library.record_graphs import graph_text
from compile_callbacks.passes.nodes import count_ops
from compile_callbacks.profiling.compile_events import CompileRecorder
from compile_callbacks.runtime.compiled_target import CompiledTarget
from compile_callbacks.runtime.target import Target
from compile_callbacks.runtime.target_settings import TargetSettings

__all__ = ["CheckedGraph", "PassCheck", "check_pass"]


@dataclass(frozen=True)
class CheckedGraph:
    """One graph before and after the pass.

    Attributes:
        kind: What it holds: ``"module"``, ``"joint"``, ``"forward"``, ``"backward"`` or ``"inference"``.
        is_inference: What the pass was told.
        before: The graph as text.
        after: The same after the pass.
        ops_before: How often each operator was called, by name: ``"aten.mul.Tensor"``.
        ops_after: The same after the pass.
    """

    kind: GraphKind
    is_inference: bool
    before: str
    after: str
    ops_before: Counter[str]
    ops_after: Counter[str]


@dataclass(frozen=True)
class PassCheck:
    """What a pass did.

    Attributes:
        graphs: The graphs that it saw, in order.
        actual: Outputs and, in training, gradients of inputs and parameters, compiled with the pass.
        expected: The same, eager.
    """

    graphs: tuple[CheckedGraph, ...]
    actual: Any
    expected: Any

    @property
    def changed(self) -> bool:
        """Whether the pass changed any graph."""
        return any(graph.before != graph.after for graph in self.graphs)

    @property
    def ops_before(self) -> Counter[str]:
        """How often each operator is called in all graphs, before the pass."""
        return sum((graph.ops_before for graph in self.graphs), Counter())

    @property
    def ops_after(self) -> Counter[str]:
        """The same after the pass."""
        return sum((graph.ops_after for graph in self.graphs), Counter())

    @property
    def max_abs_error(self) -> float:
        """The largest difference from eager of any element."""
        pairs = zip(tree_leaves(self.actual), tree_leaves(self.expected), strict=True)
        return max((float((a.double() - b.double()).abs().max()) for a, b in pairs if _has_elements(a)), default=0.0)

    def assert_close(self, *, rtol: float | None = None, atol: float | None = None) -> None:
        """Raise an ``AssertionError`` where results differ from eager's; tolerances as in `torch.testing`."""
        torch.testing.assert_close(self.actual, self.expected, rtol=rtol, atol=atol)


def check_pass(
    graph_pass: Any,
    module: nn.Module,
    *inputs: Any,
    phase: Phase = "infer",
    options: dict[str, Any] | None = None,
    fold_weights: bool = False,
) -> PassCheck:
    """Compile a copy of a module with a pass, call it once, and compare with eager.

    Args:
        graph_pass: The pass.
        module: The module; a copy of it is used, in training mode in the train phase and else in evaluation mode.
        inputs: What it is called with.
        phase: ``"infer"`` calls it without gradients; ``"train"`` with them, and backward through the sum of its
            outputs.
        options: Inductor options to compile with.
        fold_weights: Whether the pass sees the graph without what depends on weights alone, as it is in the infer
            phase of a run. Left out here, so that a graph is as it was written.

    Raises:
        TypeError: No graph pass, or no module.
        ValueError: An unknown phase.
        CompileError: The pass or the compiler failed.
    """
    (graph_pass,) = as_passes((graph_pass,), "graph_pass")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r} must be a torch.nn.Module, not {type(module).__name__}")
    if phase not in PHASES:
        raise ValueError(unknown("phase", phase, PHASES))
    before, after = _Look(pass_hook(graph_pass)), _Look(pass_hook(graph_pass))
    config = InductorConfig(passes=(before, graph_pass, after), options=options or {}, fold_weights=fold_weights)
    results = []
    for compiled in (True, False):
        twin = copy.deepcopy(module).train(phase == "train")
        call: Any = twin
        if compiled:
            recorder, settings = CompileRecorder(), TargetSettings(on_error="raise")
            call = CompiledTarget(Target("module", twin), phase, config, recorder=recorder, settings=settings)
        torch.manual_seed(0)
        results.append(_results(call, twin, copy.deepcopy(inputs), phase))
    graphs = tuple(
        CheckedGraph(kind, is_inference, text, text_after, ops, ops_after)
        for (kind, is_inference, text, ops), (_, _, text_after, ops_after) in zip(before.seen, after.seen, strict=True)
    )
    return PassCheck(graphs, *results)


def _results(call: Any, module: nn.Module, inputs: tuple[Any, ...], phase: Phase) -> Any:
    with torch.set_grad_enabled(phase == "train"):
        outputs = call(*inputs)
    if phase == "infer":
        return outputs
    differentiable = [out for out in tree_leaves(outputs) if isinstance(out, torch.Tensor) and out.requires_grad]
    if differentiable:
        torch.autograd.backward([out.sum() for out in differentiable])
    leaves = [*module.parameters(), *(x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor))]
    return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), [
        leaf.grad for leaf in leaves if leaf.requires_grad
    ]


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


class _Look(GraphPass):
    """Keeps what it sees; never cached, so that it sees everything."""

    def __init__(self, hook: str) -> None:
        self.hook = hook  # type: ignore[misc]
        self.seen: list[tuple[GraphKind, bool, str, Counter[str]]] = []

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        self.seen.append((graph_kind(self.hook, graph), is_inference, graph_text(graph), count_ops(graph)))

    def uuid(self) -> None:
        return None
