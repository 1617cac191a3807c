"""Wraps nested compile regions: parts of a graph that torch compiles once and calls several times.

In torch 2.11 and 2.15, regions compute wrong results in three cases, without an error. This file works around all
three, and keeps torch from tracing a region several times in each call.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import TracingContext
from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphHOP
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from compile_callbacks._torch.graphs import add_node

_INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph


def region_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes ``forward`` as a region of the graph that Dynamo traces around it.

    Workaround (until ``save_reuse_entry`` uses the source of the realized variable for ``self``): Dynamo 2.15 reuses
    the trace of a region if the region returns tensors. For a bound method that is an attribute of a module, a reused
    trace contains the weights of the first module. Our region returns a dict, so Dynamo traces each call.
    """

    def region(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return {"output": forward(module, *args, **kwargs)}

    marked = torch.compiler.nested_compile_region(region)

    def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return marked(module, *args, **kwargs)["output"]

    return call


def strict_comparison() -> contextlib.AbstractContextManager[Any]:
    """Within the ``with`` block, two regions share code only if all operators have the same arguments and results.

    Workaround (until ``are_same_graph_modules`` compares both): Dynamo's comparison stops at the end of the shorter
    list of arguments, and ignores results (2.11 to 2.15). A region with ``gelu(x, approximate="tanh")`` then runs the
    code of a region with ``gelu(x)``, and a region outside ``torch.autocast`` runs the code of a region within it.
    torch has no public function to compare regions.
    """
    from torch._dynamo.variables import higher_order_ops

    lenient = higher_order_ops.are_same_graph_modules

    def strict(name: str, first: GraphModule, second: GraphModule, fake_mode: Any) -> bool:
        return _operators(first) == _operators(second) and lenient(name, first, second, fake_mode)

    return patch.object(higher_order_ops, "are_same_graph_modules", strict)


def _operators(graph_module: GraphModule) -> list[Any]:
    """Return the constant arguments of each operator, and the dtype and ``requires_grad`` of each result."""
    return [
        (
            repr(torch.fx.map_arg((node.args, node.kwargs), lambda argument: "node")),  # text, as 1 == 1.0 == True
            [
                (x.dtype, x.requires_grad)
                for x in tree_leaves(node.meta.get("example_value"))
                if isinstance(x, torch.Tensor)
            ],
        )
        for node in graph_module.graph.nodes
    ]


@contextlib.contextmanager
def kept_schemas() -> Iterator[None]:
    """Within the ``with`` block, torch derives the schema of a region once for each kind of inputs.

    Workaround (until ``InvokeSubgraphHOP.gen_schema`` keeps schemas): torch traces the region again for each schema, in
    2.11 five times for each call, in 2.15 twice. For 16 layers of a Llama, this took half of the time before Inductor.
    Within a trace, a name belongs to one region. A region that changes an input is not kept, because its schema depends
    on which inputs share memory.
    """
    derive: Any = InvokeSubgraphHOP.gen_schema
    kept = dict[Any, Any]()

    def gen_schema(hop: Any, subgraph: Any, name: str | None, *operands: Any) -> Any:
        key = TracingContext.try_get(), name, torch.is_grad_enabled(), *map(_metadata, operands)
        if key not in kept or None in key[:2]:
            schema = derive(hop, subgraph, name, *operands)
            if schema.is_mutable:
                return schema
            kept[key] = schema
        return kept[key]

    with patch.object(InvokeSubgraphHOP, "gen_schema", gen_schema):
        yield


def _metadata(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        layout = str(value.shape), value.layout  # text, because symbolic sizes have no hash
        return type(value), value.dtype, value.device, value.requires_grad, *layout
    return str(value)


def with_constant_floats() -> Any:
    """Return a context manager with which Dynamo treats Python floats as constants, even with ``dynamic=True``.

    Workaround (until ``InvokeSubgraphHOP`` accepts ``SymFloat``): otherwise, the ``eps`` of a layer norm becomes an
    input of the region, which raises ``AssertionError`` (2.11 to 2.15).
    """
    return torch._dynamo.config.patch(specialize_float=True)


def shares_code(graph_module: GraphModule) -> bool:
    """Return whether a graph of Dynamo calls a region more than once."""
    calls = calls_of_regions(graph_module)
    return len({call.args[1] for call in calls}) < len(calls)


def calls_of_regions(graph_module: GraphModule) -> list[Any]:
    """Return the calls of regions in a graph and in its subgraphs."""
    subgraphs = (module for module in graph_module.modules() if isinstance(module, GraphModule))
    return [call for subgraph in subgraphs for call in _calls(subgraph)]


def _calls(graph_module: GraphModule) -> list[Any]:
    return list(graph_module.graph.find_nodes(op="call_function", target=_INVOKE_SUBGRAPH))


def expose_aliases(graph_module: GraphModule) -> None:
    """Move the views that a region returns out of the region.

    Workaround (until Inductor's ``InvokeSubgraph`` knows which outputs are aliases): Inductor assumes that each output
    of a region has its own memory. A training graph saves views of the inputs and outputs of a region for the backward
    pass. Inductor overwrites the memory of these views, so gradients are wrong (2.11 to 2.15)::

        before:  y, saved = region(x)          # saved is permute(x, [1, 0]), computed in the region
                 z = mm(y, w)                  # Inductor writes z to the memory of x
        after:   y = region(x)
                 saved = permute(x, [1, 0])
    """
    calls_of: dict[str, list[Any]] = {}
    for node in _calls(graph_module):
        calls_of.setdefault(node.args[0].target, []).append(node)
    for name, calls in calls_of.items():
        # A copy, because with activation checkpointing the backward graph recomputes the same region.
        body = GraphModule(getattr(graph_module, name), copy.deepcopy(getattr(graph_module, name).graph))
        setattr(graph_module, name, body)
        expose_aliases(body)
        output: Any = body.graph.output_node()
        results, inputs = output.args[0], body.graph.find_nodes(op="placeholder")
        returned = list(dict.fromkeys(base for base in map(_base, results) if base not in inputs))
        if returned == list(results):
            continue
        for call in calls:
            _rewrite(call, results, returned, dict(zip(inputs, call.args[2:], strict=True)))
        output.args = (tuple(returned),)
        body.graph.eliminate_dead_code()
        body.recompile()
    if calls_of:
        graph_module.recompile()


def _base(result: Any) -> Any:
    """Return the value that a result of a region is a view of, or the result itself."""
    while isinstance(result, Node) and _is_view(result):
        result = result.args[0]
    return result


def _is_view(node: Any) -> bool:
    if node.target is operator.getitem:  # for example, an item of split(x)
        return isinstance(node.args[0], Node) and _is_view(node.args[0])
    return (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view) or node.target in _VIEWS_OF_INDUCTOR


_VIEWS_OF_INDUCTOR = (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)
"""Operators that return a copy according to their schema, but that Inductor compiles as views."""


def _rewrite(call: Any, results: Sequence[Any], returned: Sequence[Any], operands: Mapping[Any, Any]) -> None:
    """Change a call of a region to return only ``returned``, and compute the views after the call."""
    graph, value_of = call.graph, dict(zip(results, call.meta["val"], strict=True))
    call.meta["val"] = tuple(value_of[base] if base in value_of else _new_value(base) for base in returned)
    outside = dict(operands)  # for each node of the region, the node of the graph with the same value

    def outer(node: Any) -> Any:
        if node not in outside:
            if node in returned:
                outside[node] = add_node(graph, operator.getitem, (call, returned.index(node)))
            elif isinstance(node.meta["val"], torch.Tensor) and not _is_view(node):
                raise RuntimeError(f"a region returns a view whose size is computed from {node.name}")
            else:
                outside[node] = add_node(graph, node.target, *torch.fx.map_arg((node.args, node.kwargs), outer))
        return outside[node]

    getitems = list(call.users)
    with graph.inserting_before(call.next):
        for getitem in getitems:
            getitem.replace_all_uses_with(outer(results[getitem.args[1]]))
    for getitem in getitems:
        graph.erase_node(getitem)


def _new_value(node: Any) -> Any:
    """Return a fake tensor for a result, in memory that no other value shares."""
    value = node.meta["val"] if isinstance(node, Node) else node
    if not isinstance(value, torch.Tensor):
        return value
    with torch._guards.detect_fake_mode([value]) or contextlib.nullcontext():
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
