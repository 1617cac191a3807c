"""Moves captured graphs to another process, compiles them there, and loads the compiled code.

torch's `GraphPickler` pickles the graph, and `standalone_compile` compiles it. Dynamo's metadata cannot be pickled: it
has weak references and the weights themselves. So a request contains the operators of the graph and a description of
its inputs, from which the other process makes fake tensors. Weights and data never leave the process.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_callbacks._torch import graphs
from compile_callbacks._torch.ports import optional

MAX_CONSTANT_BYTES = 2**20
"""The size up to which a constant of a graph travels. Larger constants are frozen weights or data."""

_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "cudnn": (
        lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32),
        lambda values: torch.backends.cudnn.set_flags(
            _benchmark=values[0], _deterministic=values[1], _allow_tf32=values[2]
        ),
    ),
    "mkldnn": (lambda: torch.backends.mkldnn.enabled, torch.backends.mkldnn.set_flags),
    "flash_attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "efficient_attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "math_attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "cudnn_attention": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
}
"""How to get and to set each setting of torch that changes compiled code and is not in a config."""


def _configs() -> dict[str, Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    return {"inductor": inductor_config, "functorch": functorch_config}


class NotPortableError(Exception):
    """A graph that must be compiled in its own process. The message is the reason."""


@dataclass(frozen=True, kw_only=True)
class _TensorInput:
    """An input of a graph. Sizes, strides and the offset are integers or expressions of `PortableGraph.symbols`."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool
    is_parameter: bool
    address: str | None  # Dynamo's mark that says whether the input keeps its address


@dataclass(frozen=True, kw_only=True)
class PortableGraph:
    """A captured graph, and the state of the process in which it was captured."""

    graph: bytes  # the pickled operators
    inputs: tuple[Any, ...]  # a `_TensorInput` for each tensor, or the expression of an integer
    symbols: Mapping[Any, tuple[int, Any]]  # the value and the bounds of each symbol
    grad_mode: bool  # whether autograd was enabled
    autocast: tuple[Mapping[str, Any], ...]  # the arguments of each enabled `torch.autocast`
    flags: Mapping[str, Any]  # the settings of `_FLAGS`
    configs: Mapping[str, Mapping[str, Any]]  # what differs from the defaults of Inductor and AOTAutograd
    modules: tuple[str, ...]  # the modules that register the custom operators of the graph
    sharing: tuple[int, ...]  # the positions of inputs that share memory with other inputs

    @property
    def symbol_positions(self) -> list[int]:
        """The positions of the inputs that are symbols. Other integers are constants of the graph."""
        return [i for i, value in enumerate(self.inputs) if not isinstance(value, _TensorInput | int)]


# ------------------------------------------------------------------------------------------ in the process that trains


def portable_graph(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> PortableGraph:
    """Describe a graph of Dynamo for another process.

    Raises:
        NotPortableError: If the graph must be compiled in this process.
    """
    try:
        return _portable_graph(graph_module, inputs)
    except NotPortableError:
        raise
    except Exception as error:  # also if torch has changed what this file needs
        raise NotPortableError(f"it cannot be pickled: {error}") from error


def _portable_graph(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> PortableGraph:
    from torch.fx._graph_pickler import GraphPickler, Options

    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in placeholders]
    symbols: dict[Any, tuple[int, Any]] = {}
    described = tuple(_describe(value, fake, symbols) for value, fake in zip(inputs, values, strict=True))
    known = {expression for expression in described if not isinstance(expression, (_TensorInput, int))}
    if not symbols.keys() <= known:
        raise NotPortableError("a size is not an input of the graph")
    lean = _without_metadata(graph_module)
    modules = _modules_of_operators(lean)
    data = GraphPickler.dumps(lean, Options(ops_filter=None))
    if b"__main__" in data:
        raise NotPortableError("it contains functions of the script itself (__main__)")
    return PortableGraph(
        graph=data,
        inputs=described,
        symbols=symbols,
        grad_mode=torch.is_grad_enabled(),
        autocast=tuple(
            {"device_type": device, "dtype": torch.get_autocast_dtype(device)}
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ),
        flags={name: get() for name, (get, _) in _FLAGS.items()},
        configs={name: config._get_dict(skip_default=True) for name, config in _configs().items()},
        modules=modules,
        sharing=_sharing_memory(inputs),
    )


def load(artifact: bytes, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Load compiled code. While it loads, the options must be set, because they ask for CUDA graphs."""
    from torch._inductor import config
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    with config.patch({name: value for name, value in options.items() if name.startswith("triton.cudagraph")}):
        compiled: Callable[..., Any] = AOTCompiledArtifact.deserialize(artifact).inner_fn.compiled_fn
        return compiled


@optional("background")
def prepare_loading() -> None:
    """Make the next `load` faster. This is for a thread, because it waits for processes.

    The first load of code for the CPU looks for the vector instructions of the processor, and torch 2.11 starts three
    Python processes for that, which took 26 to 42 s on a busy machine.
    """
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list()


def guard_of(expression: str | None, positions: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
    """Return a function that checks whether compiled code is valid for the inputs of a call.

    ``positions`` are those of the symbols among the inputs, which the expression numbers.
    """
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    code = compile(expression or "True", "<guards of a graph>", "eval")

    def is_valid(inputs: Sequence[Any]) -> bool:
        symbols = {f"t{i}": inputs[position] for i, position in enumerate(positions)}
        return bool(eval(code, SYMPY_INTERP, {"L": symbols}))

    return is_valid


def _sharing_memory(inputs: Sequence[Any]) -> tuple[int, ...]:
    memory = {i: value.untyped_storage()._cdata for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    counts = Counter(memory.values())
    return tuple(i for i, address in memory.items() if counts[address] > 1)


def _describe(value: Any, fake: Any, symbols: dict[Any, tuple[int, Any]]) -> Any:
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return _expression(value, symbols)
    if type(value) not in _TENSOR_TYPES or not isinstance(fake, torch.Tensor):
        raise NotPortableError(f"an input is a {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
        raise NotPortableError("an input is sparse, quantized or a lazy view")
    return _TensorInput(
        size=tuple(_expression(size, symbols) for size in fake.size()),
        stride=tuple(_expression(stride, symbols) for stride in fake.stride()),
        offset=_expression(fake.storage_offset(), symbols),
        dtype=value.dtype,
        device=value.device,
        requires_grad=value.requires_grad,
        is_leaf=value.is_leaf,
        is_parameter=isinstance(value, torch.nn.Parameter),
        address=graphs.address_type(value),
    )


def _expression(value: Any, symbols: dict[Any, tuple[int, Any]]) -> Any:
    if not isinstance(value, torch.SymInt):
        return value
    node: Any = value.node
    for symbol in node.expr.free_symbols:
        shape_env = node.shape_env
        if symbol not in shape_env.backed_var_to_val:
            raise NotPortableError("an input has a size that depends on data")
        symbols[symbol] = int(shape_env.backed_var_to_val[symbol]), shape_env.var_to_range[symbol]
    return node.expr if node.expr.free_symbols else int(node.expr)


def _without_metadata(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    lean = torch.fx.GraphModule(graph_module, graph)
    if "_checkpoint_context_fn" in graph_module.meta:
        raise NotPortableError("it has an activation checkpoint with a context_fn")
    for node in lean.graph.nodes:
        node.meta = {}
        if getattr(node.target, "__name__", None) in _NOT_PORTABLE_OPERATORS:
            raise NotPortableError(f"it calls {node.target}")
    for name, constant in itertools.chain(lean.named_parameters(), lean.named_buffers()):
        if constant.nbytes > MAX_CONSTANT_BYTES or type(constant) not in _TENSOR_TYPES:
            raise NotPortableError(f"it contains weights or a large constant ({name})")
    for name, subgraph in list(lean.named_children()):
        if isinstance(subgraph, torch.fx.GraphModule):
            setattr(lean, name, _without_metadata(subgraph))
    return lean


_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

_NOT_PORTABLE_OPERATORS = ("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional")
"""The names of operators that refer to a table of this process. torch may not have imported the operators yet."""


def _modules_of_operators(graph_module: torch.fx.GraphModule) -> tuple[str, ...]:
    from torch._library.custom_ops import OPDEFS

    modules = set()
    for subgraph in graph_module.modules():
        for node in subgraph.graph.nodes if isinstance(subgraph, torch.fx.GraphModule) else ():
            if isinstance(node.target, graphs.OPERATOR_TYPES):
                name = str(node.target).replace(".", "::", 1).partition(".")[0]
                namespace = name.partition("::")[0]
                if name in OPDEFS:
                    modules.add(OPDEFS[name]._init_fn.__module__)
                elif namespace in sys.modules:
                    modules.add(namespace)
    if "__main__" in modules:
        raise NotPortableError("it calls a custom operator of the script itself (__main__)")
    return tuple(sorted(modules))


# ------------------------------------------------------------------------------------------ in the other process


@contextlib.contextmanager
def restored(portable: PortableGraph) -> Iterator[tuple[torch.fx.GraphModule, list[Any]]]:
    """Yield the graph and its fake inputs, in the state in which it was captured."""
    import importlib

    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for module in portable.modules:
        importlib.import_module(module)
    for name, (_, set_flag) in _FLAGS.items():
        set_flag(portable.flags[name])
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with contextlib.ExitStack() as state:
        for name, config in _configs().items():
            state.enter_context(config.patch(dict(portable.configs[name])))
        for autocast in portable.autocast:
            state.enter_context(torch.autocast(**autocast, cache_enabled=False))
        state.enter_context(torch.set_grad_enabled(portable.grad_mode))
        graph_module = GraphPickler.loads(portable.graph, fake_mode)
        assert isinstance(graph_module, torch.fx.GraphModule)
        for subgraph in graph_module.modules():
            if isinstance(subgraph, torch.fx.GraphModule):
                subgraph.recompile()
        inputs = _fake_inputs(portable, fake_mode)
        with fake_mode:
            _Propagation(graph_module).run(*inputs)
        if any(inputs[i]._version for i in portable.sharing):
            raise NotPortableError("it writes an input that shares memory with another input")
        _restore_sources(graph_module, portable.inputs)
        yield graph_module, inputs


def compile_portable(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], **arguments: Any
) -> tuple[bytes, str | None]:
    """Compile a graph of `restored`. Return the artifact, and the condition on the inputs for which it is valid."""
    from torch._inductor.standalone_compile import standalone_compile

    # `standalone_compile` copies the graph, and the copy loses the attributes of `_restore_sources`.
    type(graph_module).__deepcopy__ = lambda self, memo: self  # type: ignore[method-assign]
    artifact = standalone_compile(graph_module, inputs, dynamic_shapes="from_graph", options=arguments, aot=True)
    if artifact.inner_fn.compiled_fn.serialize is None:  # type: ignore[attr-defined]
        raise NotPortableError("torch cannot serialize its compiled code")
    integers = [value for value in inputs if isinstance(value, torch.SymInt)]
    expression = None
    if integers:
        shape_env: Any = integers[0].node.shape_env
        expression = shape_env.produce_guards_expression(integers, guards=shape_env.get_pruned_guards(integers))
    return artifact.serialize(), expression  # type: ignore[attr-defined]


def _fake_inputs(portable: PortableGraph, fake_mode: Any) -> list[Any]:
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    shape_env, new = fake_mode.shape_env, {}
    for i, (symbol, (value, bounds)) in enumerate(portable.symbols.items()):
        source = LocalSource(f"size_{i}")
        created = shape_env.create_symbol(value, source, DimDynamic.DYNAMIC, do_not_specialize_zero_one=True)
        new[symbol] = created
        shape_env.var_to_range[created] = bounds
    values = {symbol: value for symbol, (value, _) in portable.symbols.items()}

    def integer(expression: Any) -> Any:
        if isinstance(expression, int):
            return expression
        return shape_env.create_symintnode(expression.xreplace(new), hint=int(expression.xreplace(values)))

    def tensor(described: _TensorInput) -> torch.Tensor:
        size, stride = ([*map(integer, numbers)] for numbers in (described.size, described.stride))
        offset = integer(described.offset)
        with torch.no_grad():
            value = torch.empty_strided(size, stride, dtype=described.dtype, device=described.device)
            if isinstance(offset, torch.SymInt) or offset:
                count = 1 + offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
                memory = torch.empty(count, dtype=described.dtype, device=described.device)
                value = memory.as_strided(size, stride, offset)
        if described.is_parameter:
            value = torch.nn.Parameter(value, described.requires_grad)
        elif described.requires_grad and described.is_leaf:
            value.requires_grad_()
        elif described.requires_grad:
            with torch.enable_grad():
                value.copy_(torch.empty_strided(size, stride, dtype=value.dtype, device=value.device).requires_grad_())
        if described.address is not None:
            value._dynamo_static_input_type = described.address  # type: ignore[attr-defined]
        return value

    with fake_mode:
        return [tensor(x) if isinstance(x, _TensorInput) else integer(x) for x in portable.inputs]


class _Propagation(torch.fx.Interpreter):
    """Runs a graph on fake tensors, and stores the values as Dynamo does."""

    def run_node(self, n: torch.fx.Node) -> Any:
        n.meta["example_value"] = result = super().run_node(n)
        return result


def _restore_sources(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Restore what AOTAutograd reads to see which inputs keep their address.

    Without it, CUDA graphs are skipped "due to mutated inputs".
    """
    from torch._dynamo.source import LocalSource

    graph_module.meta["dynamo_compile_id"] = "0/0"
    graph_module._param_name_to_source = {}  # type: ignore[assignment]
    for i, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        node._dynamo_source = LocalSource(f"input_{i}")
        address = getattr(inputs[i], "address", None)
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": address} if address else {}
