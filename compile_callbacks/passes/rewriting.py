"""Helpers that rewrite graphs of ATen operators: `pattern_pass`, and functions that find, count and insert nodes.

The functions work at ``"joint_pre"`` and later hook points. New nodes get ``meta["val"]``, from which Inductor reads
shapes, dtypes and devices.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_choice, check_type
from compile_callbacks._utils.phases import Phase
from compile_callbacks.passes.base import DEFAULT_HOOK, HOOK_OPTIONS, GraphPass

_HOOKS = [hook for hook in HOOK_OPTIONS if hook != "pre_grad"]


@dataclass(frozen=True, kw_only=True)
class PatternMatch:
    """A place in a graph that matches a pattern.

    Attributes:
        is_inference: Whether the graph has no backward pass.
        phase: The phase that is being compiled. ``None`` outside this library.
        output: The pattern's result as a fake tensor: ``output.dtype``, ``output.device``, ``output.shape``.
        inputs: The value of each of the pattern's arguments, as a fake tensor or a number.
    """

    is_inference: bool
    phase: Phase | None
    output: torch.Tensor
    inputs: dict[str, Any]


class PatternPass(GraphPass):
    """A pass that replaces the operators of one function by the operators of another function.

    The pass uses torch's pattern matcher, which traces both functions to ATen operators. A part of a graph matches if
    it has the same operators, with any shapes. No other node may read a value between the pattern's inputs and its
    output.

    Args:
        pattern: The function whose operators the pass replaces. It takes tensors and returns one tensor.
        replacement: The function to compute instead, with the same arguments.
        example_inputs: A tensor for each argument, with the dtype and the number of dimensions of the pattern. Use
            small tensors, because the constructor calls both functions with them.
        where: A function that takes a `PatternMatch` and returns whether to replace the match.
        hook: The hook point, ``"joint_pre"`` or later, because a graph has no ATen operators before autograd.

    Attributes:
        replaced: The number of replacements in all graphs so far.

    Raises:
        TypeError: If an argument has the wrong type, or a function does not accept the example inputs.
        ValueError: If the results of the two functions differ in shape or dtype, or the hook point is unknown.

    Example::

        >>> double = pattern_pass(lambda x: x * 2, lambda x: x + x, [torch.ones(3)])
        >>> double.hook
        'post_grad_post'
    """

    def __init__(
        self,
        pattern: Callable[..., torch.Tensor],
        replacement: Callable[..., torch.Tensor],
        example_inputs: Sequence[torch.Tensor],
        *,
        where: Callable[[PatternMatch], bool] | None = None,
        hook: str = DEFAULT_HOOK,
    ) -> None:
        check_type("where", where, (Callable, type(None)), "a function of a PatternMatch or None")  # type: ignore[arg-type]
        check_type("example_inputs", example_inputs, (list, tuple), "a list of tensors, one for each argument")
        check_choice("hook", hook, _HOOKS)
        result = _describe_result("pattern", pattern, example_inputs)
        replaced = _describe_result("replacement", replacement, example_inputs)
        if result != replaced:
            text = f"pattern returns {result} for example_inputs, and replacement returns {replaced}"
            raise ValueError(with_code("CC702", text))
        self.pattern = pattern
        self.replacement = replacement
        self.example_inputs = tuple(example_inputs)
        self.where = where
        self.hook = hook  # type: ignore[misc]
        self.replaced = 0
        self._is_inference = False
        self._matcher: Any = None

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Replace each match that ``where`` accepts."""
        if self._matcher is None:
            self._matcher = _torch.inductor.pattern_matcher(
                self.pattern, self.replacement, self.example_inputs, self._accepts, self.name
            )
        self._is_inference = is_inference
        self.replaced += self._matcher(graph)

    def _accepts(self, output: torch.Tensor, inputs: dict[str, Any]) -> bool:
        match = PatternMatch(is_inference=self._is_inference, phase=self.phase, output=output, inputs=inputs)
        return self.where is None or bool(self.where(match))

    @property
    def name(self) -> str:
        """The pattern's name."""
        return getattr(self.pattern, "__name__", type(self.pattern).__name__)


pattern_pass = PatternPass
"""The usual name of `PatternPass`, as `graph_pass` is for a pass that calls a function."""


def _describe_result(argument: str, function: Any, inputs: Sequence[torch.Tensor]) -> str:
    """Call a function with the example inputs, and return the dtype and the shape of its result."""
    check_type(argument, function, Callable, "a function of tensors")  # type: ignore[arg-type]
    try:
        inspect.signature(function)
    except ValueError:
        text = f"{argument}={function!r} is built in and has no signature; use a Python function that calls it"
        raise TypeError(with_code("CC202", text)) from None
    try:
        with torch.no_grad():
            result = function(*inputs)
    except Exception as error:
        text = f"{argument} cannot be called with example_inputs: {type(error).__name__}: {error}"
        raise TypeError(with_code("CC702", text)) from error
    if not isinstance(result, torch.Tensor):
        raise TypeError(with_code("CC702", f"{argument} must return a tensor, not {type(result).__name__}"))
    return f"{result.dtype}{list(result.shape)}"


# ------------------------------------------------------------------------------------------ nodes


def find_nodes(graph: Graph, *targets: Any) -> list[Node]:
    """Return the nodes that call one of the operators, in the graph's order.

    Args:
        graph: The graph to search.
        targets: Operators, such as ``torch.ops.aten.mul.Tensor``, or ``torch.ops.aten.mul`` for all its overloads.

    Raises:
        TypeError: If a target is not an operator.
    """
    for target in targets:
        if not isinstance(target, _torch.graphs.OPERATOR_TYPES):
            text = f"target={target!r} must be an operator such as torch.ops.aten.mul.Tensor"
            raise TypeError(with_code("CC202", text))
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and (node.target in targets or getattr(node.target, "overloadpacket", None) in targets)
    ]


def count_ops(graph: Graph) -> Counter[str]:
    """Return the number of calls of each operator, by operator name, such as ``"aten.mul.Tensor"``."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def call_before(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call of an operator before a node, and return the new node.

    Args:
        node: The node before which the function inserts the call.
        target: The operator to call, such as ``torch.ops.aten.mul.Tensor``.
        args: The operator's positional arguments: nodes and numbers.
        kwargs: The operator's keyword arguments.

    Raises:
        ValueError: If an argument is a node without ``meta["val"]``, as at ``"pre_grad"``, or if Inductor has no code
            for the operator. Inductor has no code for operators that it decomposes before the passes run.
    """
    if _torch.graphs.is_decomposed(target):
        text = f"Inductor has no code for {target} at this hook point, because it decomposes the operator earlier"
        raise ValueError(with_code("CC702", text))
    for source in tree_leaves((args, kwargs)):
        if isinstance(source, Node) and "val" not in source.meta:
            text = f"node {source.name!r} has no meta['val'], which nodes get after 'pre_grad'"
            raise ValueError(with_code("CC702", text))
    with node.graph.inserting_before(node):
        return _torch.graphs.add_node(node.graph, target, args, kwargs)


def replace_node(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Replace a node by a call of another operator, and return the new node.

    Args:
        node: The node to replace. The function erases it.
        target: The operator to call instead, such as ``torch.ops.aten.mul.Tensor``.
        args: The operator's positional arguments: nodes and numbers.
        kwargs: The operator's keyword arguments.

    Raises:
        ValueError: If the new value has another shape, dtype or device, or for the reasons that `call_before` lists.
    """
    new = call_before(node, target, *args, **kwargs)
    before, after = _layout(node), _layout(new)
    if before != after:
        new.graph.erase_node(new)
        text = f"{target} returns {after}, and cannot replace {node.name!r}, which is {before}"
        raise ValueError(with_code("CC702", text))
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


def _layout(node: Node) -> Any:
    return [
        f"{value.dtype}{list(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else value
        for value in tree_leaves(node.meta.get("val"))
    ]
