"""Wraps Inductor: options, compiles, caches, generated modules, CUDA graphs, graph passes and AOTInductor packages."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

from compile_callbacks._torch import autograd, ports, torch_2_11
from compile_callbacks._torch.ports import optional


@optional("settings", lambda: {"default": {}})
def modes() -> dict[str, dict[str, Any]]:
    """Return the modes of the installed torch, with the Inductor options that each of them sets."""
    return {name: dict(options) for name, options in torch._inductor.list_mode_options().items()}


@functools.cache
def option_names() -> frozenset[str]:
    """Return the Inductor options of the installed torch."""
    return frozenset(settings().get_config_copy())


def settings() -> Any:
    """Return the module with the values that the process has set for Inductor's options, and with their types."""
    from torch._inductor import config

    return config


def import_inductor(*, starts_processes: bool = False) -> float:
    """Import Inductor's compiler, as the first compile does, and return the seconds that this took (one or more)."""
    started = time.perf_counter()
    import torch._inductor.async_compile
    import torch._inductor.compile_fx

    if starts_processes:  # as ``backend="inductor"`` does. Without them, Inductor compiles one kernel at a time.
        torch._inductor.async_compile.maybe_warm_pool()
    return time.perf_counter() - started


_TAGGED = "unsafe_marked_cacheable_functions"


def compile_graph(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any],
    activation_memory_budget: float | None = None,
    keeps_graph: bool = False,
    on_backward_lowered: Callable[[int], None],
) -> Any:
    """Compile a graph of Dynamo with ``compile_fx``, as ``backend="inductor"`` does. This changes the graph.

    The backward graph is compiled, too, because a failure in the user's ``backward()`` would end the step. With
    ``keeps_graph``, the backward pass may run more than once, and needs more memory. ``on_backward_lowered`` is called
    for each backward graph with the memory of the activations that it needs.
    """
    with ports.essential("inductor"):
        from torch._functorch import config as functorch_config
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if options.get("triton.cudagraphs"):
        torch.compile(lambda: None, options=dict(options))  # sets the environment variables that CUDA graphs need
    settings: dict[str, Any] = {"force_non_lazy_backward_lowering": True}
    if activation_memory_budget is not None:
        settings["activation_memory_budget"] = activation_memory_budget

    def compile_part(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        is_backward, inputs = bool(kwargs.get("is_backward")), graph.graph.find_nodes(op="placeholder")
        is_inference = bool(kwargs.get("is_inference"))
        if has_passes:
            _check_input_names(inputs, is_backward=is_backward, is_inference=is_inference)
        if not is_backward and not is_inference:
            autograd.save_copies(graph, buffers if len(inputs) == count else ())
            if keeps_graph:
                autograd.overwrite_no_saved_tensors()
        code = compile_fx_inner(graph, *args, **kwargs)
        if is_backward:
            on_backward_lowered(_saved_bytes(graph))
        return code

    has_passes = any("custom" in name and value is not None for name, value in options.items())
    count = len(example_inputs)  # torch keeps `compile_part`, which must not keep the inputs
    marks = [node.meta.get("tensor_dict") or {} for node in graph_module.graph.find_nodes(op="placeholder")]
    buffers = [  # Dynamo marks weights and buffers
        i
        for i, value in enumerate(example_inputs)
        if "_dynamo_static_input_type" in marks[i] and not isinstance(value, torch.nn.Parameter)
    ]
    # A tag prevents that the cache returns code that was compiled without these changes. All options are a part of its
    # keys, and no function has the name of this entry. With ``torch.compiler.config.cache_key_tag``, each warm start
    # would benchmark its kernels again, because the compile processes, which save the results, do not have it.
    tag = f"{torch_2_11.autocast_state()} copies_saved={buffers} keeps_graph={keeps_graph}"
    if _TAGGED not in config.save_config_portable(ignore_private_configs=False):
        raise RuntimeError(f"torch {torch.__version__} has no option {_TAGGED!r} in the keys of its caches")
    functions = {**getattr(config, _TAGGED), **options.get(_TAGGED, {}), "compile_callbacks tag": tag}
    options = {**options, _TAGGED: functions}
    with functorch_config.patch(settings), ports.optional_block("CUDA graphs", _switchable_cuda_graphs):
        compiled: Any = compile_fx(graph_module, example_inputs, inner_compile=compile_part, config_patches=options)
    _forget_constants()
    # Dynamo calls the result with its frame evaluation switched off. Switching it off again takes 2 µs.
    return getattr(torch._dynamo.eval_frame, "innermost_fn", lambda function: function)(compiled)


def _check_input_names(inputs: Sequence[torch.fx.Node], *, is_backward: bool, is_inference: bool) -> None:
    """Raise an error if the names of a graph's inputs do not tell its kind, which passes at some hooks need."""
    names = {node.name.partition("_")[0] for node in inputs}
    if ("tangents" in names, names.isdisjoint({"primals", "tangents"})) != (is_backward, is_inference):
        raise RuntimeError(f"torch {torch.__version__} names the inputs of a graph in another way: {sorted(names)}")


@optional("compile metrics", lambda: 0)
def _saved_bytes(backward_graph: torch.fx.GraphModule) -> int:
    """Return the memory of the activations that a backward graph needs, without the inputs of the forward graph."""
    nodes = backward_graph.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in nodes if not node.name.startswith(("primals_", "tangents_"))]
    sizes = [value.element_size() * value.numel() for value in values if isinstance(value, torch.Tensor)]
    return sum(size if isinstance(size, int) else size.node.hint or 0 for size in sizes)


@optional("generated code")
def _forget_constants() -> None:
    """Let Inductor forget the modules with constants, such as frozen weights. It would keep each that it has loaded."""
    from torch._inductor.codecache import PyCodeCache

    for module in set(PyCodeCache.modules) - set(PyCodeCache.modules_no_attr.values()):
        PyCodeCache.modules.remove(module)
        sys.modules.pop(module.__name__, None)


_cuda_graphs = types.SimpleNamespace(run=True, marks=0)  # for the process, because autograd has its own threads


@contextlib.contextmanager
def without_cuda_graphs() -> Iterator[None]:
    """Run the code that `compile_graph` compiled without its CUDA graphs, so that torch records none.

    Workaround (until torch can run compiled code without CUDA graphs; no issue): ``cudagraphify`` is replaced.
    """
    _cuda_graphs.run = False
    try:
        yield
    finally:
        _cuda_graphs.run = True


def _switchable_cuda_graphs() -> Any:
    """Compile code whose CUDA graphs `without_cuda_graphs` can switch off."""
    from torch._inductor import compile_fx

    cudagraphify = compile_fx.cudagraphify

    def with_switch(code: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        graphed = cudagraphify(code, *args, **kwargs)
        return lambda inputs: graphed(inputs) if _cuda_graphs.run else code(inputs)

    return patch.object(compile_fx, "cudagraphify", with_switch)


@optional("CUDA graphs")
def end_failed_warmup(device_index: int) -> None:
    """Repair the CUDA graphs of a device after the first run of a CUDA graph raised, such as `torch.OutOfMemoryError`.

    Workaround (until ``CUDAGraphTreeManager.run_eager`` restores the current node after an exception; no issue): the
    failed run remains the current node, without its outputs (2.11 to 2.15). All later calls then fail with an empty
    ``AssertionError``, or skip the first run of that graph.
    """
    from torch._inductor.cudagraph_trees import CUDAWarmupNode, get_manager

    manager = get_manager(device_index, create_if_none_exists=False)
    node = manager and manager.current_node
    if isinstance(node, CUDAWarmupNode) and len(node.tensor_weakrefs) < len(traces := node.stack_traces or []):
        missing = [None] * (len(traces) - len(node.tensor_weakrefs))
        node.tensor_weakrefs += missing
        node.outputs_weakrefs += missing
        manager.warmed_up_functions.discard(node.wrapped_function.id)  # type: ignore[union-attr]


@optional("CUDA graphs", lambda: lambda: None)
def begin_marks() -> Callable[[], None] | None:
    """Begin to mark the steps of CUDA graphs, and return a function that ends this.

    Before `import_inductor`, return ``None``: there are no CUDA graphs, and the import would lengthen a step.

    Workaround (until `torch.compiler` can end what ``cudagraph_mark_step_begin`` begins; no issue): after a mark, torch
    waits for the next one, and records a CUDA graph in each step of a later loop without marks (2.11 to 2.15).
    """
    if "torch._inductor.compile_fx" not in sys.modules:
        return None
    from torch._inductor.cudagraph_trees import MarkStepBox

    if MarkStepBox.mark_step_counter:  # the user or an outer run marks steps
        return lambda: None
    _cuda_graphs.marks -= 2**40  # torch takes a step with the number of an earlier one for the same step
    MarkStepBox.mark_step_counter = _cuda_graphs.marks
    return functools.partial(setattr, MarkStepBox, "mark_step_counter", 0)


@optional("graph passes")
def register_pass_type(of_library: type) -> None:
    """Let torch treat a class of this library as a class of graph passes."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    CustomGraphPass.register(of_library)


# ------------------------------------------------------------------------------------------ AOTInductor


def compile_package(program: Any, path: str, options: Mapping[str, Any]) -> None:
    """Compile an exported program with AOTInductor, which changes the options, and write the package."""
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=dict(options))


def load_package(path: str) -> Callable[[list[torch.Tensor]], Any]:
    """Load an AOTInductor package as a function of its input tensors, in the order of the export.

    In each call, the function of ``torch._inductor.aoti_load_package`` parses two tree specs, which takes longer than a
    small model. It also compiles programs to find the processor's instructions.
    """
    from torch.utils._pytree import tree_unflatten, treespec_loads

    loader = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
    outputs = treespec_loads(loader.get_call_spec()[1])
    return lambda tensors: tree_unflatten(loader.boxed_run(tensors), outputs)
