"""Wraps Inductor: options, the C++ compiler, compiles, caches, graph passes, generated modules and CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import custom_graph_pass as _custom_graph_pass

from compile_callbacks._torch import autograd


def mode_names() -> list[str]:
    """Return the modes of the installed torch."""
    return list(torch._inductor.list_mode_options())


@functools.cache
def option_names() -> frozenset[str]:
    """Return the Inductor options of the installed torch."""
    return frozenset(torch._inductor.list_options())


def option_type(name: str) -> Any:
    """Return the annotated type of an Inductor option."""
    from torch._inductor import config

    return config.get_type(name)  # type: ignore[attr-defined]


def option_value(name: str) -> Any:
    """Return the value of an Inductor option that the process has set, or its default."""
    from torch._inductor import config

    return getattr(config, name)


def has_cutlass() -> bool:
    """Return whether Inductor finds the CUTLASS library."""
    from torch._inductor.codegen.cutlass.utils import try_import_cutlass

    return bool(try_import_cutlass())


def options_of_mode(name: str) -> dict[str, Any]:
    """Return the Inductor options that a mode of ``torch.compile`` sets."""
    return dict(torch._inductor.list_mode_options(name))


def cpp_compiler() -> str:
    """Return the C++ compiler that Inductor calls."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def import_inductor() -> float:
    """Import Inductor's compiler, as a call of ``torch.compile(module)`` does, and return the seconds that this took.

    The import takes a second, which would otherwise be a part of the first compiled step.
    """
    started = time.perf_counter()
    import torch._inductor.compile_fx  # noqa: F401

    return time.perf_counter() - started


def collect_unused_code() -> None:
    """Free compiled code that nothing calls any more, with its frozen weights and its CUDA graphs.

    Generated code has reference cycles, so only Python's garbage collector frees it. Steps that allocate few objects
    may never start the collector.
    """
    gc.collect()


def start_compile_processes() -> None:
    """Start Inductor's processes that compile Triton kernels, as ``backend="inductor"`` does at its first graph.

    Until they have started, Inductor compiles kernels one after another.
    """
    from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool

    maybe_warm_pool()
    AsyncCompile.wakeup()


def compile_processes() -> int:
    """Return the number of processes in which Inductor may compile kernels, which the user can set."""
    from torch._inductor import config

    return config.compile_threads or 1


def compile_graph(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any],
    activation_memory_budget: float | None = None,
    keeps_graph: bool = False,
    on_backward_lowered: Callable[[int, float], None],
    compile_by: Callable[..., Any] | None = None,
) -> Any:
    """Compile a graph of Dynamo with ``compile_fx``, as ``backend="inductor"`` does. This changes the graph.

    ``compile_by`` replaces ``compile_fx``.

    As ``torch.compile`` does, the function sets the environment variables that CUDA graphs need.

    The function compiles the backward graph together with the forward graph (``force_non_lazy_backward_lowering``,
    which torch's ahead-of-time path also sets). Otherwise, a failure would occur in the user's ``backward()``, when the
    step can no longer run eagerly. The memory budget is a setting of AOTAutograd's partitioner. ``None`` does not
    change it. With ``keeps_graph``, the backward pass may run more than once (``retain_graph=True``), and needs more
    memory. ``on_backward_lowered`` is called for each backward graph with the memory of the activations that it
    needs, and with the seconds that Inductor took for it.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner, cudagraphify

    options = torch._TorchCompileInductorWrapper(None, dict(options), None).config
    settings: dict[str, Any] = {"force_non_lazy_backward_lowering": True}
    if activation_memory_budget is not None:
        settings["activation_memory_budget"] = activation_memory_budget
    if keeps_graph:
        settings["donated_buffer"] = False

    def compile_part(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        is_backward = bool(kwargs.get("is_backward"))
        if not is_backward and not kwargs.get("is_inference"):
            inputs = graph.graph.find_nodes(op="placeholder")
            autograd.save_copies(graph, buffers if len(inputs) == count else ())
            if keeps_graph:
                autograd.overwrite_no_saved_tensors()
        started = time.perf_counter()
        code = compile_fx_inner(graph, *args, **kwargs)
        if is_backward:
            on_backward_lowered(_saved_bytes(graph), time.perf_counter() - started)
        return code

    count = len(example_inputs)  # torch keeps `compile_part`, which must not keep the inputs
    buffers = [
        i
        for i, value in enumerate(example_inputs)
        if torch._dynamo.utils.get_static_address_type(value) is not None and not isinstance(value, torch.nn.Parameter)
    ]
    with_switch = functools.partial(_cudagraphify_with_switch, cudagraphify)
    # The tag prevents that the cache returns code that was compiled without these changes.
    options = tagged(options, f"{autocast_state()} copies_saved={buffers} keeps_graph={keeps_graph}")
    with functorch_config.patch(settings), patch("torch._inductor.compile_fx.cudagraphify", with_switch):
        compiler = compile_by or compile_fx
        return compiler(graph_module, example_inputs, inner_compile=compile_part, config_patches=options)


def _saved_bytes(backward_graph: torch.fx.GraphModule) -> int:
    """Return the memory of the activations that a backward graph needs, without the inputs of the forward graph."""
    nodes = backward_graph.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in nodes if not node.name.startswith(("primals_", "tangents_"))]
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            count = value.numel()
            total += value.element_size() * (count if isinstance(count, int) else count.node.hint or 0)
    return total


def draws_as_eager(options: Mapping[str, Any]) -> bool:
    """Return whether compiled code draws the same random numbers as eager code."""
    from torch._inductor import config

    return bool(options.get("fallback_random", config.fallback_random))


def eager_random_numbers() -> Any:
    """Return a context manager in which each compile draws the random numbers of eager code."""
    from torch._inductor import config

    return config.patch(fallback_random=True)


def tagged(options: Mapping[str, Any], tag: str) -> dict[str, Any]:
    """Return options of Inductor with a tag, which is a part of the keys of torch's caches for graphs.

    All options are a part of these keys, and no function has the name of this entry. torch's setting for tags,
    ``torch.compiler.config.cache_key_tag``, is also a part of the keys under which the configurations of autotuned
    kernels are read. But it is not a part of the keys under which they are saved, because the compile processes do not
    have the setting (torch 2.11 and 2.15). So each warm start would benchmark its kernels again. When they have
    it, use that setting instead.
    """
    from torch._inductor import config

    name = "unsafe_marked_cacheable_functions"
    functions = {**getattr(config, name), **options.get(name, {}), "compile_callbacks tag": tag}
    return {**options, name: functions}


def autocast_state() -> str:
    """Return the enabled autocast, by device, as a tag for the cache.

    Workaround (torch<2.12): AOTAutograd's key contains whether autocast is enabled, but not its dtype. The cache would
    return a graph for bfloat16 under float16.
    """
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return " ".join(f"autocast_{device}={torch.get_autocast_dtype(device)}" for device in devices)


def cache_folder() -> Path:
    """Return the folder of Inductor's caches, also if ``TORCHINDUCTOR_CACHE_DIR`` is not set."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


@contextlib.contextmanager
def generated_with_constants() -> Iterator[list[types.ModuleType]]:
    """Yield a list of the Python modules with constants, such as frozen weights, that Inductor generates in the block.

    Inductor keeps each module that it has loaded. Graphs share the modules without constants.
    """
    from torch._inductor.codecache import PyCodeCache

    before, generated = len(PyCodeCache.modules), list[types.ModuleType]()
    try:
        yield generated
    finally:
        shared = set(map(id, PyCodeCache.modules_no_attr.values()))
        generated += [module for module in PyCodeCache.modules[before:] if id(module) not in shared]


def forget_generated(modules: Sequence[types.ModuleType]) -> None:
    """Remove modules of `generated_with_constants` from Inductor's list, so that Python can free them."""
    from torch._inductor.codecache import PyCodeCache

    gone = set(map(id, modules))
    PyCodeCache.modules[:] = [module for module in PyCodeCache.modules if id(module) not in gone]
    for module in modules:
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]


def is_from_compiled_code(error: BaseException) -> bool:
    """Return whether the code of Inductor raised an error: its file is in the traceback."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "torch._inductor.output_code" for frame, _ in frames)


# One switch for the process, because autograd may run the backward pass in another thread.
_cuda_graphs = types.SimpleNamespace(run=True)


@contextlib.contextmanager
def without_cuda_graphs() -> Iterator[None]:
    """Run the code that `compile_graph` compiled without its CUDA graphs, so that torch records none.

    Workaround (until torch can run compiled code without CUDA graphs): `CompiledFxGraph` keeps only the function that
    records, which `compile_graph` replaces (``cudagraphify``).
    """
    _cuda_graphs.run = False
    try:
        yield
    finally:
        _cuda_graphs.run = True


def _cudagraphify_with_switch(
    cudagraphify: Callable[..., Any], code: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    graphed = cudagraphify(code, *args, **kwargs)
    return lambda inputs: graphed(inputs) if _cuda_graphs.run else code(inputs)


def end_failed_warmup(device_index: int) -> bool:
    """Repair the CUDA graphs of a device after the first run of a CUDA graph raised, such as `torch.OutOfMemoryError`.

    Workaround (until ``CUDAGraphTreeManager.run_eager`` restores the current node after an exception): torch 2.11 and
    2.15 keep the failed run as the current node of the device's tree, without its outputs. All later calls then fail
    with an empty ``AssertionError`` (2.11), or skip the first run of that graph. The only public fix is
    ``torch.compiler.reset()``, which deletes the compiled code of the whole process.
    """
    from torch._inductor.cudagraph_trees import CUDAWarmupNode, get_manager

    manager = get_manager(device_index, create_if_none_exists=False)
    node = manager and manager.current_node
    if not isinstance(node, CUDAWarmupNode) or not node.stack_traces:
        return False
    missing = len(node.stack_traces) - len(node.tensor_weakrefs)
    if missing <= 0:
        return False
    node.tensor_weakrefs += [None] * missing
    node.outputs_weakrefs += [None] * missing
    manager.warmed_up_functions.discard(node.wrapped_function.id)  # type: ignore[union-attr]
    return True


TORCH_PASS_TYPES: tuple[type, ...] = (_custom_graph_pass.CustomGraphPass,)

_WITH_FLAG = getattr(_custom_graph_pass, "CustomInferenceAwareGraphPass", None)

FLAGGED_PASS_TYPES: tuple[Any, ...] = () if _WITH_FLAG is None else (_WITH_FLAG,)
"""The classes of passes that get ``is_inference`` from torch. Workaround (torch<2.13): there is no such class."""

GRAPH_PASS_BASE: Any = _WITH_FLAG or _custom_graph_pass.CustomGraphPass
