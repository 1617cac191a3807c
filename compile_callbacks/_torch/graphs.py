"""Copies and examines FX graphs of Dynamo and AOTAutograd, and adds nodes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from compile_callbacks._torch.ports import optional


def copy_of_graph(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copy a graph module, with the metadata that AOTAutograd needs to compile the copy."""
    copied = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    vars(copied).update({name: value for name, value in vars(graph_module).items() if name not in vars(copied)})
    copied.meta.update(graph_module.meta)
    for node, original in zip(copied.graph.nodes, graph_module.graph.nodes, strict=True):
        # Dynamo's `GraphArg` has a weak reference to a weight, and remains until Python collects garbage.
        node.meta.pop("grapharg", None)
        for name, value in getattr(original, "__dict__", {}).items():
            if name.startswith("_dynamo"):
                setattr(node, name, value)
    return copied


def eager_graph(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copy a graph module, without Dynamo's metadata, to run the copy eagerly.

    The metadata of placeholders contains weak references to the weights. While such a reference exists,
    ``module.cpu()`` fails for weights that are tensor subclasses.
    """
    copied = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    for node in copied.graph.nodes:
        node.meta.clear()
        # torch implements these operators only for tracing.
        if node.target is torch.ops.higher_order.invoke_subgraph:
            node.target, node.args = _call_subgraph, (node.args[0], *node.args[2:])
        elif node.target is torch.ops.higher_order.tag_activation_checkpoint:
            node.target = _call_checkpoint
        elif node.target is getattr(torch.ops.higher_order, "register_hook", node):  # since torch 2.15
            node.target = _register_hook
    copied.recompile()
    for name, subgraph in list(copied.named_children()):
        if isinstance(subgraph, torch.fx.GraphModule):  # a subgraph, which Inductor also changes
            setattr(copied, name, eager_graph(subgraph))
    return copied


def _call_subgraph(subgraph: torch.fx.GraphModule, *args: Any) -> Any:
    return subgraph.forward(*args)


def _register_hook(tensor: torch.Tensor, hook: torch.fx.GraphModule, *args: Any) -> torch.Tensor:
    """Register a hook of the captured graph. torch's operator fails without gradients, as on fake tensors."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: hook.forward(gradient, *args))
    return tensor


def _call_checkpoint(subgraph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Run an activation checkpoint of a captured graph eagerly.

    Workaround (until `tag_activation_checkpoint` restores the random state when it runs eagerly; pytorch#160773): torch
    2.15 does not restore it.
    """
    from torch.utils.checkpoint import checkpoint

    def run(*_: torch.Tensor) -> Any:
        return subgraph.forward(*args)

    # `checkpoint` reads the device from these arguments, but must not get the buffers that the subgraph writes.
    differentiable = [value for value in args if isinstance(value, torch.Tensor) and value.requires_grad]
    keeps_random_state = kwargs.get("preserve_rng_state", True)
    return checkpoint(run, *differentiable, use_reentrant=False, preserve_rng_state=keeps_random_state)


SUBGRAPH_CALLS = _call_subgraph, _call_checkpoint  # of an `eager_graph`


def all_nodes(graph_module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the nodes of a graph and its subgraphs."""
    for subgraph in graph_module.modules():
        yield from subgraph.graph.nodes if isinstance(subgraph, torch.fx.GraphModule) else ()


def namespace(node: torch.fx.Node) -> str:
    """Return the namespace of a node's operator, or an empty string for a function of Python."""
    return str(node.target).partition(".")[0] if isinstance(node.target, OPERATOR_TYPES) else ""


@optional("comparison", lambda: True)
def is_wrapper_subclass(value: object) -> bool:
    """Return whether a value is a tensor subclass that torch can trace, because it consists of other tensors."""
    return torch.utils._python_dispatch.is_traceable_wrapper_subclass(value)


class GraphFacts(NamedTuple):
    """What `examine_graph` finds."""

    written: frozenset[int]  # the positions of the inputs that the graph writes
    dtypes: frozenset[torch.dtype]  # of the inputs and of all values that the graph computes
    has_subclasses: bool  # whether an input or output is a tensor subclass
    peak_bytes: int  # the largest size of the values that exist at one time, if no backward pass needs them
    value_bytes: Sequence[int]  # the sizes of all values, which a backward pass may need
    output_bytes: int


def examine_graph(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> GraphFacts:
    """Run a graph on fake tensors, and record the dtypes and sizes of its values and the inputs that it writes.

    The grad mode must be the one of the capture, because a graph may contain a gradient (`torch.func.grad`).
    AOTAutograd does not report which inputs a graph writes if the compiled graph comes from its cache.
    """
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    written, dtypes, sizes, live_bytes = set[int](), set[torch.dtype](), list[int](), [0]

    class Examination(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            written.update(map(storage_of, tensors_in(_written_arguments(func, args, kwargs or {}))))
            outputs = func(*args, **(kwargs or {}))
            dtypes.update(tensor.dtype for tensor in tensors_in(outputs))
            for address in [address for address, (storage, _) in values.items() if storage.expired()]:
                del values[address]
            for tensor in tensors_in(outputs):
                if (address := storage_of(tensor)) not in values and address not in of_inputs:
                    sizes.append(bytes_of(tensor))
                    values[address] = StorageWeakRef(tensor.untyped_storage()), sizes[-1]
            live_bytes.append(sum(size for _, size in values.values()))
            return outputs

    def tensors_in(value: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    def storage_of(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def bytes_of(tensor: torch.Tensor) -> int:
        size = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
        return size if isinstance(size, int) else 0  # a symbol if the graph computes the size from values

    # With the shape environment, numbers that a graph reads from tensors become symbols instead of errors.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    fakes = [mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value for value in inputs]
    of_inputs, values = set(map(storage_of, tensors_in(fakes))), dict[int, tuple[StorageWeakRef, int]]()
    try:
        with mode, Examination():  # type: ignore[no-untyped-call]
            outputs = graph_module.forward(*fakes)
    finally:
        torch.clear_autocast_cache()  # within the user's autocast, it has fake weights
    tensors = {i: fake for i, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)}
    positions = frozenset(i for i, fake in tensors.items() if storage_of(fake) in written)
    has_subclasses = any(type(tensor) is not FakeTensor for tensor in tensors_in((fakes, outputs)))
    dtypes.update(fake.dtype for fake in tensors.values())
    output_bytes = sum(map(bytes_of, tensors_in(outputs)))
    return GraphFacts(positions, frozenset(dtypes), has_subclasses, max(live_bytes), sizes, output_bytes)


def _written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not isinstance(operator, OPERATOR_TYPES):  # a higher-order operator, such as the call of a Triton kernel
        return () if "flex_attention" in operator.name() else (args, kwargs)
    arguments = operator._schema.arguments
    written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    # The schemas of batch norms do not declare that they write the running statistics.
    written |= {"running_mean", "running_var"}
    return [value for name, value in given.items() if name in written]


DOUBLE_OF = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}
"""Maps each dtype that `computing_in_double` replaces to its replacement."""


def computing_in_double(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager with which a graph with float64 inputs computes in float64.

    Casts to a lower precision, and tensors that the graph creates, also become float64.
    """
    if not enabled:
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    def double(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(DOUBLE_OF.get(value.dtype, value.dtype))
        return DOUBLE_OF.get(value, value) if isinstance(value, torch.dtype) else value

    class InDouble(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return tree_map(double, func(*tree_map(double, args), **tree_map(double, kwargs or {})))

    return InDouble()  # type: ignore[no-untyped-call]


def add_node(
    graph: torch.fx.Graph, target: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> torch.fx.Node:
    """Add a call to a graph. ``meta["val"]`` of the new node is its value as a fake tensor."""
    kwargs = dict(kwargs or {})
    node = graph.call_function(target, tuple(arguments), kwargs)
    values, keywords = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    fake_mode = torch._guards.detect_fake_mode(tree_leaves((values, keywords)))
    with fake_mode or contextlib.nullcontext(), torch.no_grad():
        node.meta["val"] = target(*values, **keywords)
    return node


OPERATOR_TYPES: tuple[Any, ...] = (type(torch.ops.aten.mul.Tensor), type(torch.ops.aten.mul))
"""The types of ``torch.ops.aten.mul.Tensor`` and ``torch.ops.aten.mul``."""
