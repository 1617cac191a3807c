"""FX graphs of Dynamo and AOTAutograd: copies, facts about them, and new nodes."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves


def copy_of_graph(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a graph module that can be compiled: with the metadata that AOTAutograd needs."""
    copied = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    vars(copied).update({name: value for name, value in vars(graph_module).items() if name not in vars(copied)})
    copied.meta.update(graph_module.meta)
    for node, original in zip(copied.graph.nodes, graph_module.graph.nodes, strict=True):
        # It has a weak reference to a weight, and would live until Python collects garbage.
        node.meta.pop("grapharg", None)
        for name, value in getattr(original, "__dict__", {}).items():
            if name.startswith("_dynamo"):
                setattr(node, name, value)
    return copied


def eager_graph(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a graph module that runs eagerly, without Dynamo's metadata.

    The metadata of the placeholders holds weak references to the weights. With these, ``module.cpu()`` fails for
    weights that are tensor subclasses.
    """
    copied = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    for node in copied.graph.nodes:
        node.meta.clear()
        # Both operators are made for tracing. Workaround (until the operator of checkpoints restores random states when
        # it runs eagerly): torch 2.15 runs the checkpoint without its random state.
        if node.target is torch.ops.higher_order.invoke_subgraph:
            node.target, node.args = _call_subgraph, (node.args[0], *node.args[2:])
        elif node.target is torch.ops.higher_order.tag_activation_checkpoint:
            node.target = _call_checkpoint
    copied.recompile()
    copied.meta.update(graph_module.meta)
    for name, part in list(copied.named_children()):
        if isinstance(part, torch.fx.GraphModule):  # a subgraph, which Inductor changes too
            setattr(copied, name, eager_graph(part))
    return copied


def _call_subgraph(subgraph: torch.fx.GraphModule, *args: Any) -> Any:
    return subgraph.forward(*args)


def _call_checkpoint(subgraph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    def run(*_: torch.Tensor) -> Any:
        return subgraph.forward(*args)

    # `checkpoint` takes the device from these arguments. Buffers that the subgraph writes to must not be among them.
    differentiable = [value for value in args if isinstance(value, torch.Tensor) and value.requires_grad]
    keeps_random_state = kwargs.get("preserve_rng_state", True)
    return checkpoint(run, *differentiable, use_reentrant=False, preserve_rng_state=keeps_random_state)


_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "fsdp")


def has_collective(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a graph of Dynamo communicates with other processes, forward or backward."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for part in graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            namespace = str(node.target).partition(".")[0] if isinstance(node.target, OPERATOR_TYPES) else ""
            of_distributed = str(getattr(node.target, "__module__", "")).startswith("torch.distributed")
            has_shards = isinstance(node.meta.get("example_value"), dtensor)
            if namespace in _COLLECTIVE_NAMESPACES or of_distributed or has_shards:
                return True
    return False


class GraphFacts(NamedTuple):
    """Facts about a graph.

    Attributes:
        written: Positions of the inputs whose memory the graph writes to.
        dtypes: The dtypes of all values that it computes.
        has_subclasses: Whether an input or output is a tensor subclass.
    """

    written: frozenset[int]
    dtypes: frozenset[torch.dtype]
    has_subclasses: bool


def examine_graph(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> GraphFacts:
    """Run a graph on fake tensors to find its facts.

    AOTAutograd knows the inputs that a graph writes to, but not if the compiled graph comes from its cache.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._python_dispatch import TorchDispatchMode

    class Examination(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            written.update(storage_of(tensor) for tensor in tensors_in(_written_arguments(func, args, kwargs)))
            outputs = func(*args, **kwargs)
            dtypes.update(tensor.dtype for tensor in tensors_in(outputs))
            return outputs

    def tensors_in(value: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    def storage_of(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    written, dtypes = set[int](), set[torch.dtype]()
    # With a shape environment, numbers that a graph reads from tensors are symbols. Without one they are an error.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in inputs]
    with mode, Examination(), torch.no_grad():  # type: ignore[no-untyped-call]
        outputs = graph_module.forward(*fakes)
    tensors = {i: fake for i, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)}
    positions = frozenset(i for i, fake in tensors.items() if storage_of(fake) in written)
    has_subclasses = any(type(tensor) is not FakeTensor for tensor in tensors_in((fakes, outputs)))
    return GraphFacts(positions, frozenset(dtypes | {fake.dtype for fake in tensors.values()}), has_subclasses)


def _written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments that an operator may write to."""
    if not isinstance(operator, OpOverload):  # a higher-order operator, such as the call of a Triton kernel
        return () if "flex_attention" in operator.name() else (args, kwargs)
    arguments = operator._schema.arguments
    written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    # The schemas of batch norms do not mark the running statistics as written.
    written |= {"running_mean", "running_var"}
    return [value for name, value in given.items() if name in written]


DOUBLE_OF = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}
"""By dtype, its replacement in `computing_in_double`."""


def computing_in_double(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which a graph computes in float64.

    All inputs must be float64 already. This changes the casts in the graph, and the tensors that the graph creates.
    """
    if not enabled:
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    def requested(value: Any) -> Any:
        return DOUBLE_OF.get(value, value) if isinstance(value, torch.dtype) else value

    def result(value: Any) -> Any:
        return value.to(DOUBLE_OF.get(value.dtype, value.dtype)) if isinstance(value, torch.Tensor) else value

    class InDouble(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return tree_map(result, func(*tree_map(requested, args), **tree_map(requested, kwargs or {})))

    return InDouble()  # type: ignore[no-untyped-call]


def is_as_accurate(
    expected: torch.Tensor, actual: torch.Tensor, reference: torch.Tensor, *, tolerance: float, lenient: bool
) -> bool:
    """Whether ``actual`` is as close to a float64 reference as ``expected`` is.

    Args:
        expected: What eager computed.
        actual: The result of the compiled graph.
        reference: The same in float64.
        tolerance: An absolute and relative error that is always allowed.
        lenient: Whether ten times the error of ``expected`` is allowed, in place of two to ten times.
    """
    from torch._dynamo.utils import same

    return bool(
        same(
            expected,
            actual,
            reference,
            tol=tolerance,
            log_error=lambda *args: None,
            use_larger_multiplier_for_smaller_tensor=True,
            force_max_multiplier=lenient,
        )
    )


OpOverload = torch._ops.OpOverload


def add_node(
    graph: torch.fx.Graph, target: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> torch.fx.Node:
    """A call in a graph, with its value as a fake tensor in ``meta["val"]``."""
    kwargs = dict(kwargs or {})
    node = graph.call_function(target, tuple(arguments), kwargs)
    values, keywords = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    fake_mode = torch._guards.detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])
    with fake_mode or contextlib.nullcontext(), torch.no_grad():
        node.meta["val"] = target(*values, **keywords)
    return node


def is_decomposed(target: Any) -> bool:
    """Whether Inductor replaces an operator by others while AOTAutograd traces, and has no lowering for it."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    return target in decompositions and target not in lowerings


def fake_tensor(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A fake tensor of the compile that is running."""
    with torch._guards.TracingContext.get().fake_mode:  # type: ignore[union-attr]
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


OPERATOR_TYPES: tuple[type, ...] = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""The types of ``torch.ops.aten.mul.Tensor`` and ``torch.ops.aten.mul``."""


def has_tensor_subclasses(module: torch.nn.Module) -> bool:
    """Whether a module has weights that wrap other tensors, such as a ``DTensor``."""
    return any(is_tensor_subclass(tensor) for tensor in (*module.parameters(), *module.buffers()))


def is_tensor_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor wraps other tensors, which its ``__tensor_flatten__`` names."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)
