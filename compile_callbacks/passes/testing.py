"""Shows what a pass does: `RecordGraphs` writes graphs to files, and `check_pass` compares results with eager.

Example::

    def test_my_pass():
        result = check_pass(MyPass(), torch.nn.Linear(4, 4), torch.randn(2, 4), phase="infer")
        assert result.ops_after["aten.mul.Tensor"] == 0
        result.assert_close()
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph
from torch.utils._pytree import tree_leaves, tree_map_only

from compile_callbacks import _torch
from compile_callbacks._utils.messages import check_choice, check_type
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.passes.base import (
    DEFAULT_HOOK,
    HOOK_OPTIONS,
    GraphKind,
    GraphPass,
    as_passes,
    graph_kind,
    pass_hook,
)
from compile_callbacks.passes.manager import find_pass_error, pass_options
from compile_callbacks.passes.rewriting import count_ops

__all__ = ["PassCheck", "check_pass"]


@dataclass(frozen=True)
class RecordedGraph:
    """A graph as text.

    Attributes:
        title: The number, phase, kind and hook point, such as ``"000_infer_inference_post_grad_post"``.
        kind: The kind of the graph.
        is_inference: Whether the graph has no backward pass.
        text: The text, with one line for each node.
        ops: The number of calls of each operator, by operator name, such as ``"aten.mul.Tensor"``.
    """

    title: str
    kind: GraphKind
    is_inference: bool
    text: str
    ops: Counter[str]


class RecordGraphs(GraphPass):
    """Writes each graph to a file, and to TensorBoard's text tab at the end of a run.

    The pass does not change the graph. With this pass, torch does not use its compile cache, so the pass gets each
    graph. A line of a graph looks like this::

        mul: "f32[4, 16]" = torch.ops.aten.mul.Tensor(linear, 0.5)

    Args:
        folder: The folder for the files, whose names are `RecordedGraph.title`. If ``None``, the pass writes no files.
        hook: The hook point. See `GraphPass`. Passes at one hook point run in the order of ``passes``. To see the
            changes of a pass, put one `RecordGraphs` before the pass and one after it.

    Raises:
        TypeError: If the folder is not a path.
        ValueError: If the hook point is unknown.
        OSError: If the folder cannot be created.

    Example::

        >>> record = RecordGraphs(hook="joint_post")
        >>> record.graphs
        []
    """

    def __init__(self, folder: str | Path | None = None, *, hook: str = DEFAULT_HOOK) -> None:
        check_choice("hook", hook, list(HOOK_OPTIONS))
        check_type("folder", folder, (str, Path, type(None)), "a path or None")
        self.hook = hook  # type: ignore[misc]
        self.folder = None if folder is None else Path(folder)
        self.graphs: list[RecordedGraph] = []
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Record the graph."""
        kind = graph_kind(self.hook, graph)
        title = f"{len(self.graphs):03d}_{self.phase or 'no_phase'}_{kind}_{self.hook}"
        text = graph.python_code("self", verbose=True).src
        self.graphs.append(RecordedGraph(title, kind, is_inference, text, count_ops(graph)))
        if self.folder is not None:
            (self.folder / f"{title}.txt").write_text(text)

    def uuid(self) -> None:
        """Return ``None``, so that torch compiles each graph again instead of loading it from its cache."""
        return


@dataclass(frozen=True)
class PassCheck:
    """The result of `check_pass`: the graphs before and after the pass, and the compiled and eager outputs.

    Attributes:
        before: The graphs before the pass.
        after: The graphs after the pass.
        actual: The compiled outputs. In the train phase, also the gradients of inputs and parameters.
        expected: The eager outputs. In the train phase, also the gradients of inputs and parameters.
    """

    before: tuple[RecordedGraph, ...]
    after: tuple[RecordedGraph, ...]
    actual: Any
    expected: Any

    @property
    def changed(self) -> bool:
        """Whether the pass changed a graph."""
        return [graph.text for graph in self.before] != [graph.text for graph in self.after]

    @property
    def ops_before(self) -> Counter[str]:
        """The number of calls of each operator in all graphs before the pass."""
        return sum((graph.ops for graph in self.before), Counter())

    @property
    def ops_after(self) -> Counter[str]:
        """The number of calls of each operator in all graphs after the pass."""
        return sum((graph.ops for graph in self.after), Counter())

    @property
    def max_abs_error(self) -> float:
        """The largest absolute difference from eager in any element."""
        pairs = zip(tree_leaves(self.actual), tree_leaves(self.expected), strict=True)
        tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and a.numel()]
        return max((float((a.double() - b.double()).abs().max()) for a, b in tensors), default=0.0)

    def assert_close(self, *, rtol: float | None = None, atol: float | None = None) -> None:
        """Compare the compiled results with eager by `torch.testing.assert_close`.

        Raises:
            AssertionError: If a result differs from eager by more than the tolerances.
        """
        torch.testing.assert_close(self.actual, self.expected, rtol=rtol, atol=atol)


def check_pass(
    graph_pass: Any,
    module: nn.Module,
    *inputs: Any,
    phase: Phase = "infer",
    options: Mapping[str, Any] | None = None,
) -> PassCheck:
    """Compile a copy of a module with a pass, call the copy once, and compare the results with eager.

    Args:
        graph_pass: The pass.
        module: The module. Its copy is in training mode in the train phase, and in evaluation mode in the infer phase.
        inputs: The positional inputs of the call.
        phase: ``"infer"`` calls the module without gradients. ``"train"`` calls it with gradients, and runs backward
            through the sum of its outputs.
        options: Inductor options to compile with.

    Raises:
        TypeError: If ``graph_pass`` is not a graph pass, or ``module`` is not a ``torch.nn.Module``.
        ValueError: If the phase is unknown.
        GraphPassError: If the pass raises an exception or leaves an invalid graph.
    """
    (graph_pass,) = as_passes((graph_pass,), "graph_pass")
    check_type("module", module, nn.Module, "a torch.nn.Module")
    check_choice("phase", phase, PHASES)
    before, after = RecordGraphs(hook=pass_hook(graph_pass)), RecordGraphs(hook=pass_hook(graph_pass))
    # Each check needs its own code object, because torch's recompile limit counts the graphs of one code object.
    function = _torch.dynamo.function_with_own_cache(_call_module, "checked_module")  # type: ignore[arg-type]
    all_options = {**(options or {}), **pass_options((before, graph_pass, after), phase)}
    with _torch.dynamo.keep_argument_validation():
        call = torch.compile(function, options=all_options)
        try:
            actual = _results(call, module, inputs, phase)
        except Exception as error:
            raise find_pass_error(error) or error from None
    expected = _results(_call_module, module, inputs, phase)
    return PassCheck(tuple(before.graphs), tuple(after.graphs), actual, expected)


def _call_module(module: nn.Module, *inputs: Any) -> Any:
    return module(*inputs)


def _results(call: Callable[..., Any], module: nn.Module, inputs: tuple[Any, ...], phase: Phase) -> Any:
    module, inputs = copy.deepcopy(module).train(phase == "train"), copy.deepcopy(inputs)
    torch.manual_seed(0)
    with torch.set_grad_enabled(phase == "train"):
        outputs = call(module, *inputs)
    if phase == "infer":
        return outputs
    differentiable = [out for out in tree_leaves(outputs) if isinstance(out, torch.Tensor) and out.requires_grad]
    if differentiable:
        torch.autograd.backward([out.sum() for out in differentiable])
    leaves = [*module.parameters(), *(x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor))]
    gradients = [leaf.grad for leaf in leaves if leaf.requires_grad]
    return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), gradients
