"""Moves captured graphs to another process, compiles them there, and loads the compiled code.

torch's `GraphPickler` pickles the graph with the fake tensors and the symbols of its inputs. Weights and data never
leave the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_callbacks._torch import graphs


def _flags() -> tuple[Callable[[], Any], ...]:
    """Return calls that repeat each setting of this process that changes compiled code and is not in a config."""
    part, devices, cudnn, cuda = functools.partial, ("cpu", "cuda"), torch.backends.cudnn, torch.backends.cuda
    fixed = {"_benchmark": cudnn.benchmark, "_deterministic": cudnn.deterministic, "_allow_tf32": cudnn.allow_tf32}
    settings = "default_dtype", "num_threads", "float32_matmul_precision", "deterministic_debug_mode"
    kernels = "flash", "mem_efficient", "math", "cudnn"
    return (
        part(torch.set_grad_enabled, torch.is_grad_enabled()),
        *(part(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device)) for device in devices),
        *(part(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device)) for device in devices),
        *(part(getattr(torch, f"set_{name}"), getattr(torch, f"get_{name}")()) for name in settings),
        part(cudnn.set_flags, **fixed),
        part(torch.backends.mkldnn.set_flags, torch.backends.mkldnn.enabled),
        *(part(getattr(cuda, f"enable_{name}_sdp"), getattr(cuda, f"{name}_sdp_enabled")()) for name in kernels),
    )


def _configs() -> dict[str, Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    return {"inductor": inductor_config, "functorch": functorch_config}


class NotPortableError(Exception):
    """A graph that must be compiled in its own process. The message is the reason."""


@dataclass(frozen=True, kw_only=True)
class PortableGraph:
    """A captured graph, and the state of the process in which it was captured."""

    graph: bytes  # the pickled graph, its fake inputs and their sources
    symbol_positions: tuple[int, ...]  # the inputs that are symbols. Other integers are constants of the graph.
    flags: tuple[Callable[[], Any], ...]
    configs: Mapping[str, Mapping[str, Any]]  # what differs from the defaults of Inductor and AOTAutograd
    modules: tuple[str, ...]  # the packages with the names of the operators' namespaces


# ------------------------------------------------------------------------------------------ in the process that trains


def portable_graph(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> PortableGraph:
    """Describe a graph of Dynamo for another process.

    Raises:
        Exception: If the graph must be compiled in this process. The message is the reason.
    """
    from torch.fx.experimental.symbolic_shapes import free_symbols

    placeholders = graph_module.graph.find_nodes(op="placeholder")
    fakes = [node.meta["example_value"] for node in placeholders]
    symbols = {i: value.node.expr for i, value in enumerate(fakes) if isinstance(value, torch.SymInt)}
    if not set(symbols.values()).issuperset(free_symbols(fakes)):
        raise NotPortableError("a size is not an input of the graph")
    if unknown := {type(value) for value in inputs}.difference(_INPUT_TYPES):
        raise NotPortableError(f"an input is a {unknown.pop().__name__}")
    if next(itertools.chain(graph_module.parameters(), graph_module.buffers()), None) is not None:
        raise NotPortableError("it contains weights or a constant tensor")
    if any("_checkpoint_context_fn" in getattr(part, "meta", ()) for part in graph_module.modules()):
        raise NotPortableError("it has an activation checkpoint with a context_fn")
    nodes = list(graphs.all_nodes(graph_module))
    if any("triton_kernel_wrapper" in str(node.target) for node in nodes):  # refers to a table of this process
        raise NotPortableError("it calls a Triton kernel of the user")
    memory = [value.untyped_storage()._cdata for value in inputs if isinstance(value, torch.Tensor)]
    if len(set(memory)) < len(memory):
        raise NotPortableError("two inputs share memory")
    lean = graphs.copy_of_graph(graph_module)
    lean.meta.pop("backend_id", None)  # random. The same graph has the same request.
    for name in ("compile_subgraph_reason", "_source_to_user_stacks"):
        vars(lean).pop(name, None)
    data = _pickled((lean, fakes, [getattr(node, "_dynamo_source", None) for node in placeholders]))
    if b"__main__" in data:
        raise NotPortableError("it contains functions of the script itself (__main__)")
    return PortableGraph(
        graph=data,
        symbol_positions=tuple(symbols),
        flags=_flags(),
        configs={name: config._get_dict(skip_default=True) for name, config in _configs().items()},
        modules=tuple(sorted({graphs.namespace(node) for node in nodes} & sys.modules.keys())),
    )


_INPUT_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch.SymInt, int)


def _pickled(value: Any) -> bytes:
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler, Options

    class Pickler(GraphPickler):
        def reducer_override(self, obj: object) -> Any:
            # torch 2.11 cannot pickle the mode of a view, which `loads` sets, and no version pickles a `SymFloat`.
            left_out = isinstance(obj, FakeTensorMode | torch.SymFloat | torch.SymBool)
            return (type(None), ()) if left_out else super().reducer_override(obj)

    metadata = {"example_value", "tensor_dict"}
    return Pickler.dumps(value, Options(ops_filter=None, node_metadata_key_filter=metadata.__contains__))


def load(artifact: bytes, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Load compiled code. While it loads, the options must be set, because they ask for CUDA graphs."""
    from torch._inductor import config
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    needed = {name: value for name, value in options.items() if name.startswith("triton.cudagraph")}
    with config.patch({**needed, "compile_threads": 1}):  # otherwise, torch starts processes that compile kernels
        compiled: Callable[..., Any] = AOTCompiledArtifact.deserialize(artifact).inner_fn.compiled_fn
        return compiled


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


# ------------------------------------------------------------------------------------------ in the other process


@contextlib.contextmanager
def restored(portable: PortableGraph) -> Iterator[tuple[torch.fx.GraphModule, list[Any]]]:
    """Yield the graph and its fake inputs, in the state in which it was captured, to compile code for `serialized`."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for module in portable.modules:
        importlib.import_module(module)
    for set_flag in portable.flags:
        set_flag()
    configs = _configs()
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with contextlib.ExitStack() as state:
        for name, config in configs.items():
            state.enter_context(config.patch(dict(portable.configs[name])))
        # As `torch._inductor.standalone_compile` does, which compiles a copy without the sources of the inputs.
        state.enter_context(configs["functorch"].patch(bundled_autograd_cache=True))
        state.enter_context(configs["inductor"].patch({"triton.autotune_at_compile_time": True}))
        loaded: Any = GraphPickler.loads(portable.graph, fake_mode)
        graph_module, inputs, sources = loaded
        for subgraph in graph_module.modules():
            if isinstance(subgraph, torch.fx.GraphModule):
                subgraph.recompile()
        for node, source in zip(graph_module.graph.find_nodes(op="placeholder"), sources, strict=True):
            node._dynamo_source = source
        state.enter_context(tracing(TracingContext(fake_mode)))
        yield graph_module, inputs


def serialized(compiled: Any, inputs: Sequence[Any]) -> tuple[bytes, str | None]:
    """Return the artifact of compiled code, and the condition on the inputs for which it is valid."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    if getattr(compiled, "serialize", None) is None:
        raise NotPortableError("torch cannot serialize its compiled code")
    integers: list[Any] = [value for value in inputs if isinstance(value, torch.SymInt)]
    expression = None
    if integers:
        shape_env = integers[0].node.shape_env
        expression = shape_env.produce_guards_expression(integers, guards=shape_env.get_pruned_guards(integers))
        if not guard_of(expression, range(len(integers)))([value.node.hint for value in integers]):
            raise NotPortableError(f"torch {torch.__version__} writes guards in another way: {expression}")
    return AOTCompiledArtifact(compiled).serialize(), expression
