"""The one importer of ``torch._dynamo`` and ``torch._inductor`` internals: version differences end here.

Seen working on torch 2.11 and 2.15. Each function says which private part it touches and why the public one
does not do.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import os
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C import _functorch
from torch._dynamo import exc as _exc
from torch._inductor import custom_graph_pass as _custom_graph_pass
from torch.autograd import forward_ad

# ---------------------------------------------------------------------------------------------- settings


def mode_names() -> list[str]:
    """The modes that the installed torch knows."""
    return list(torch._inductor.list_mode_options())


@functools.cache
def option_names() -> frozenset[str]:
    """The Inductor options that the installed torch knows."""
    return frozenset(torch._inductor.list_options())


def option_type(name: str) -> Any:
    """The annotated type of an Inductor option. ``list_options()`` gives names alone."""
    from torch._inductor import config

    return config.get_type(name)  # type: ignore[attr-defined]


def has_triton() -> bool:
    """Whether Triton is installed and knows this machine's GPU."""
    from torch.utils._triton import has_triton

    return bool(has_triton())


def has_triton_tma() -> bool:
    """Whether Triton can load through the Tensor Memory Accelerator, by either of its interfaces."""
    from torch.utils._triton import has_triton_tma_device

    return bool(has_triton_tma_device())


def has_cutlass() -> bool:
    """Whether Inductor finds the CUTLASS library."""
    from torch._inductor.codegen.cutlass.utils import try_import_cutlass

    return bool(try_import_cutlass())


def resolve_options(mode: str | None, options: Mapping[str, Any], dynamic: bool | None) -> dict[str, Any]:
    """What a mode and options come to, as patches of ``torch._inductor.config``.

    Torch's own wrapper does the work, so that a mode means here what it means in ``torch.compile``, with the
    environment variables that CUDA graphs need.
    """
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options) or None, dynamic)
    return dict(wrapper.config)


# ---------------------------------------------------------------------------------------------- toolchain


def cpp_compiler() -> str:
    """The C++ compiler that Inductor calls; where it looks, and what it takes for one that works, is its own.

    Raises:
        RuntimeError: None of `cpp_compilers_tried` works.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def cpp_compilers_tried() -> list[str]:
    """What Inductor would call as C++ compiler, the first that works: ``CXX`` as it was when torch was imported."""
    from torch._inductor import config

    tried = config.cpp.cxx
    return [name for name in (tried if isinstance(tried, (list, tuple)) else [tried]) if name]


def build_cpp(source: Path) -> Path:
    """Build a shared library of a C++ file beside it, as Inductor does of its kernels.

    The flags for OpenMP, Python's headers and torch's differ between compilers; Inductor's builder knows them.

    Raises:
        RuntimeError: There is no compiler, or it fails.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

    builder = CppBuilder(source.stem, str(source), CppTorchOptions(warning_all=False), str(source.parent))
    builder.build()
    return Path(builder.get_target_file_path())


# ---------------------------------------------------------------------------------------------- compiling


def raised_while_compiling(error: BaseException) -> bool:
    """Whether an error came out of Dynamo compiling a frame, and not out of running one.

    By its type or, as torch 2.11 lets an ``AssertionError`` of Dynamo's own through, by where it was raised; from
    its own types Dynamo removes the frames that would tell.
    """
    if isinstance(error, (_exc.TorchDynamoException, _exc.FailOnRecompileLimitHit)):
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "torch._dynamo.convert_frame" for frame, _ in frames)


# Dynamo's control flow, which passes through a backend. The last ones ask Dynamo for a graph break.
_CONTROL_FLOW = (_exc.RestartAnalysis, _exc.SkipFrame, *_exc.exceptions_allowed_to_be_fallback)

SHARES_RECOMPILE_LIMIT = "isolate_recompiles" not in inspect.signature(torch.compile).parameters
"""Whether two settings of one code object use up one ``recompile_limit`` (torch before 2.13)."""


def function_with_own_cache(function: types.FunctionType, name: str) -> types.FunctionType:
    """A copy of ``function`` with a code object, and so a Dynamo cache and recompile limit, of its own.

    Dynamo keeps compiled graphs per code object; two settings of one function would share its
    ``recompile_limit``. ``torch.compile(isolate_recompiles=True)`` ends that, but is not in torch 2.11.
    """
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def import_inductor() -> None:
    """Import Inductor's compiler, as ``torch.compile(module)`` does when it is called.

    The import takes a second, which would otherwise be part of the first compiled step.
    """
    import torch._inductor.compile_fx  # noqa: F401


def compile_function(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    *,
    fullgraph: bool,
    dynamic: bool | None,
) -> Callable[..., Any]:
    """``torch.compile``, isolated from other compiles of the same code where torch can (2.13 and later)."""
    isolate: dict[str, Any] = {"isolate_recompiles": True} if not SHARES_RECOMPILE_LIMIT else {}
    compiled: Callable[..., Any] = torch.compile(
        function, backend=backend, fullgraph=fullgraph, dynamic=dynamic, **isolate
    )
    return compiled


def with_dynamo_settings(compiled: Callable[..., Any], **settings: Callable[[Any], Any]) -> Callable[..., Any]:
    """``compiled``, called with Dynamo settings that are functions of what they are else; costs 10 µs a call."""
    from torch._dynamo import config

    def call(*args: Any, **kwargs: Any) -> Any:
        with _settings_lock:
            _settings_active.append(settings)
            for name, change in settings.items():
                _settings_before.setdefault(name, getattr(config, name))
                setattr(config, name, change(_settings_before[name]))
        try:
            return compiled(*args, **kwargs)
        finally:
            with _settings_lock:
                _settings_active.remove(settings)
                while not _settings_active and _settings_before:
                    setattr(config, *_settings_before.popitem())

    return call


# Calls of several threads overlap. `config.patch` would restore the value that another thread had set.
_settings_lock = threading.Lock()
_settings_active: list[Mapping[str, Any]] = []
_settings_before: dict[str, Any] = {}


def recompile_limit() -> int:
    """How many graphs torch compiles of the code of one function."""
    from torch._dynamo import config

    return int(config.recompile_limit)


def ddp_treatment_is_chosen() -> bool:
    """Whether somebody chose how Dynamo treats DDP: ``True``, which stands for its splits, is torch's own default."""
    from torch._dynamo import config

    return config.optimize_ddp is not True


def outside_ddp(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, called as if outside of `DistributedDataParallel`; costs less than 1 µs a call.

    Within its forward Dynamo splits every graph, so that gradients can be reduced while the backward pass of others
    runs; also graphs that have no backward pass. It goes by this attribute of the class.
    """
    from torch.nn.parallel import DistributedDataParallel

    def call(*args: Any, **kwargs: Any) -> Any:
        active = DistributedDataParallel._active_ddp_module
        DistributedDataParallel._active_ddp_module = None
        try:
            return compiled(*args, **kwargs)
        finally:
            DistributedDataParallel._active_ddp_module = active

    return call


def hooks_registered() -> int:
    """A number that grows with every hook that is registered on any module or tensor of the process."""
    return torch.utils.hooks.RemovableHandle.next_id


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode AD is at work around a call, which Dynamo then leaves alone.

    Asked before each call; 0.1 us. There is no public question for either (2.11 to 2.15).
    """
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def has_call_hooks(module: torch.nn.Module, *, own: bool = True) -> bool:
    """Whether forward or backward hooks are registered on a module or within it.

    Args:
        module: The module.
        own: Whether those on the module itself count.
    """
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
        if own or part is not module
    )


@contextlib.contextmanager
def beside_activation_checkpoints() -> Iterator[None]:
    """What runs within is no part of an activation checkpoint that it is called in, which counts what is saved.

    The innermost hooks on saved tensors are the ones that count. They are set only where there are any, which no public
    function tells: where torch has them disabled, setting some is an error.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    with torch.autograd.graph.saved_tensors_hooks(_same, _same) if hooks else contextlib.nullcontext():
        yield


def saves_through_hooks() -> bool:
    """Whether hooks handle the tensors that are saved for backward, as in an activation checkpoint.

    They do in its forward pass and in its recomputation. No public function tells (2.11 to 2.15).
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# ---------------------------------------------------------------------------------------------- sharded modules


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether weights of a module are gathered from shards for a call and freed after it.

    Both FSDPs mark each module that they manage for Dynamo, by this attribute (torch 2.11 to 2.15). The weights
    themselves do not tell: while a call runs they are ordinary tensors.
    """
    return any(getattr(part, "_is_fsdp_managed_module", False) for part in module.modules())


def has_flat_weights(module: torch.nn.Module) -> bool:
    """Whether FSDP1 put weights together without ``use_orig_params=True``, for which Dynamo has no support."""
    return any(
        part._is_fsdp_managed_module and not part._fsdp_use_orig_params
        for part in module.modules()
        if hasattr(part, "_fsdp_use_orig_params")
    )


def is_fsdp2_unit(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a module: its own hooks gather and free the weights."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded by what was not imported
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_fsdp1_unit(module: torch.nn.Module) -> bool:
    """Whether a module is FSDP1's wrapper, whose ``module`` is what it gathers the weights for."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def compile_graph(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    patches: Mapping[str, Any],
    fallback: Callable[[Exception], bool],
    other_patches: Callable[[Exception], Mapping[str, Any] | None] = lambda error: None,
    on_lowered: Callable[[float, bool], None],
    inner_compile: Callable[..., Any],
) -> Callable[..., Any]:
    """Compile one Dynamo graph, forward and backward, with Inductor.

    ``compile_fx`` is what ``backend="inductor"`` calls. The backward graph is compiled with the forward one
    (``force_non_lazy_backward_lowering``, the setting of torch's own ahead-of-time path), because a failure in
    it would else surface in the user's ``backward()``, where the step can no longer be done eagerly.

    Args:
        graph_module: The traced graph.
        example_inputs: Its inputs.
        patches: Inductor settings for this graph.
        fallback: Asked with the error where compiling fails; ``True`` has the graph run eagerly.
        other_patches: Asked first: settings to compile the graph with once more, from the start; ``None`` for none.
        on_lowered: Told the seconds that each half took, and whether it was the backward one.
        inner_compile: Compiles what AOTAutograd makes of the graph; see `compile_inner`.

    Returns:
        The compiled graph, or the graph itself, untouched, where compiling failed and ``fallback`` agreed.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    def timed_inner_compile(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = inner_compile(*args, **kwargs)
        on_lowered(time.perf_counter() - started, bool(kwargs.get("is_backward")))
        return output

    # compile_fx owns and changes what it is given.
    eager = copy_of_graph(graph_module)
    while True:
        try:
            with functorch_config.patch(force_non_lazy_backward_lowering=True), _tagged_cache(_autocast_state()):
                return compile_fx(  # type: ignore[return-value]
                    graph_module, example_inputs, inner_compile=timed_inner_compile, config_patches=dict(patches)
                )
        except _CONTROL_FLOW:
            raise
        except Exception as error:
            if (others := other_patches(error)) is not None:
                graph_module, patches = copy_of_graph(eager), others
            elif fallback(error):
                return eager_graph(eager).forward
            else:
                raise


def copy_of_graph(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph module of the same weights, with what Dynamo notes down on it for AOTAutograd."""
    copied = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    vars(copied).update({name: value for name, value in vars(graph_module).items() if name not in vars(copied)})
    copied.meta.update(graph_module.meta)
    for node, original in zip(copied.graph.nodes, graph_module.graph.nodes, strict=True):
        # It has a weak reference to a weight, and goes with the graph only when Python collects garbage.
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
        # Both operators are made for tracing; eagerly, torch 2.15 runs checkpoints without their random state.
        if node.target is torch.ops.higher_order.invoke_subgraph:
            node.target, node.args = _call_subgraph, (node.args[0], *node.args[2:])
        elif node.target is torch.ops.higher_order.tag_activation_checkpoint:
            node.target = _call_checkpoint
    copied.recompile()
    copied.meta.update(graph_module.meta)
    for name, part in list(copied.named_children()):
        if isinstance(part, torch.fx.GraphModule):  # Inductor changes these too
            setattr(copied, name, eager_graph(part))
    return copied


def _call_subgraph(subgraph: torch.fx.GraphModule, *args: Any) -> Any:
    return subgraph.forward(*args)


def _call_checkpoint(subgraph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    def run(*_: torch.Tensor) -> Any:
        return subgraph.forward(*args)

    # The arguments tell the device; others, such as buffers, must not be among them if the subgraph writes to them.
    differentiable = [value for value in args if isinstance(value, torch.Tensor) and value.requires_grad]
    keeps_random_state = kwargs.get("preserve_rng_state", True)
    return checkpoint(run, *differentiable, use_reentrant=False, preserve_rng_state=keeps_random_state)


# ---------------------------------------------------------------------------------------------- comparing graphs

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
    """What a graph does to its inputs.

    Attributes:
        written: Positions of the inputs whose memory the graph writes to.
        dtypes: The dtypes of all values that it computes.
        has_subclasses: Whether an input or output is a tensor subclass.
    """

    written: frozenset[int]
    dtypes: frozenset[torch.dtype]
    has_subclasses: bool


def examine_graph(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> GraphFacts:
    """Run a graph on fake tensors, and note what each operator writes to.

    AOTAutograd knows the inputs that a graph writes to, but keeps that to itself if the compiled graph comes out of its
    cache.
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
    # With a shape environment, the numbers that a graph takes out of tensors are unknown, and no error.
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
    if not isinstance(operator, OpOverload):  # an operator of higher order, such as the call of a Triton kernel
        return () if "flex_attention" in operator.name() else (args, kwargs)
    arguments = operator._schema.arguments
    written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    # The schemas of batch norms do not say that they write to the running statistics.
    written |= {"running_mean", "running_var"}
    return [value for name, value in given.items() if name in written]


DOUBLE_OF = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}
"""By dtype, the one that `computing_in_double` puts in its place."""


def computing_in_double(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which operators compute in float64 that were written for another precision.

    All inputs must be float64 already: this changes the casts within, and the tensors that are created there.
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
        actual: What the compiled graph computed.
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


def draws_as_eager(options: Mapping[str, Any]) -> bool:
    """Whether compiled code draws the random numbers that eager code draws."""
    from torch._inductor import config

    return bool(options.get("fallback_random", config.fallback_random))


def without_weak_references() -> Any:
    """A context in which Dynamo drops its weak references to weights when a compile ends.

    By default it does so for its own backends alone, and ``module.cpu()`` then fails for weights that are tensor
    subclasses.
    """
    return torch._dynamo.config.patch(invalidate_compile_context_weakrefs=True)


@contextlib.contextmanager
def without_odd_gradients() -> Iterator[None]:
    """A context in which Dynamo overlooks gradients that it fails on, so that it can compile after a backward pass.

    While FSDP1 has gathered a weight, the weight's gradient of the step before is still sharded: "attempting to assign
    a gradient of size ..." (2.11 to 2.15; to be deleted with the support for FSDP1). For gradients of tensor subclasses
    2.11 fails with "Expected SubclassSymbolicContext" (to be deleted with the support for 2.11). There is no public way
    to hide a gradient.
    """
    from torch._subclasses import meta_utils
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    safe_grad = meta_utils.safe_grad

    def plain_grad(tensor: Any) -> Any:
        grad = safe_grad(tensor)
        odd = grad is not None and (grad.shape != tensor.shape or is_traceable_wrapper_subclass(grad))
        return None if odd else grad

    meta_utils.safe_grad = plain_grad  # type: ignore[assignment]
    try:
        yield
    finally:
        meta_utils.safe_grad = safe_grad


# ---------------------------------------------------------------------------------------------- repeated backward

# Torch 2.11 to 2.15: what AOTAutograd compiles is the forward and backward of an autograd.Function. The latter refuses
# to keep its graph where it computes in saved tensors ("donated buffers"), and to be differentiated.


def is_compiled_node(node: Any) -> bool:
    """Whether a node of autograd's graph is a compiled graph's backward pass."""
    return hasattr(getattr(node, "_forward_cls", None), "num_symints_saved_for_bw")


def wrap_backward(node: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have all backward passes of the graph that a compiled node is of run what ``wrap`` makes of theirs."""
    node._forward_cls.backward = staticmethod(wrap(node._forward_cls.backward))


def gradients_given(arguments: Sequence[Any]) -> Sequence[torch.Tensor | None]:
    """The gradients that a backward pass of a compiled node gets: from torch 2.13 on they come in a list."""
    return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list) else arguments


def graph_is_kept() -> bool:
    """Whether the backward pass that runs keeps its graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def mutated_inputs(node: Any) -> Sequence[int]:
    """Positions of the inputs that the graph of a compiled node changes."""
    return [i for i, info in enumerate(node._forward_cls.metadata.input_info) if info.mutates_data]


def has_backward_of_its_own(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a graph has an operator of higher order, which may hide from autograd how it computes its gradient.

    That of `torch.autograd.Function` does. That of an activation checkpoint does not.
    """
    from torch._ops import HigherOrderOperator

    for part in graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            higher_order = isinstance(node.target, HigherOrderOperator)
            if higher_order and node.target is not torch.ops.higher_order.tag_activation_checkpoint:
                return True
    return False


class _UnpackedOnce:
    """Autograd's node as a backward pass sees it, its saved tensors unpacked already: some hooks do that once."""

    def __init__(self, node: Any, saved: Sequence[torch.Tensor]) -> None:
        self._node = node
        self.saved_tensors = saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


@contextlib.contextmanager
def donated_buffers_kept(node: Any) -> Iterator[Any]:
    """Within, a backward pass may keep its graph: saved tensors that it computes in are put back after it.

    Gives what the backward pass takes for the node.
    """
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    metadata, unpacked = node._forward_cls.metadata, node.saved_tensors
    saved, donated = [*unpacked, *node._tensors_no_vc_check], metadata.bw_donated_idxs
    # Counted from the symbolic integers on, which are the first of what a backward pass is given.
    buffers = [saved[index - node._forward_cls.num_symints_saved_for_bw] for index in donated or []]
    copies = [buffer.detach().clone() for buffer in buffers]
    metadata.bw_donated_idxs = []
    try:
        yield _UnpackedOnce(node, unpacked)
    finally:
        metadata.bw_donated_idxs = donated
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
            for buffer, copied in zip(buffers, copies, strict=True):
                buffer.copy_(copied)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that are behind it, those too that Dynamo and Inductor wrapped and hid."""
    seen: set[int] = set()
    open_: list[BaseException | None] = [error]
    while open_:
        found = open_.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        open_ += [found.__cause__, found.__context__, getattr(found, "inner_exception", None)]


# ---------------------------------------------------------------------------------------------- giving memory back


def forget_compiled(backend: Callable[..., Any]) -> None:
    """Take what was compiled with a backend out of Dynamo's caches; nobody else's code is touched.

    Compiled code stays alive for three reasons, and ``torch._dynamo.reset()`` would drop all code of the process:

    - Dynamo's cache hangs on code objects, which the garbage collector does not look into: what refers back to its own
      function from there is never collected. Behind a graph break it is the user's code objects, which may hold
      graphs of another ``torch.compile`` too.
    - Torch keeps every backend, for ``reset()`` to call.
    - The code that Dynamo writes around a graph break is never freed (Python 3.11; ``reset()`` does not help), and so
      the graphs that it calls stay among the globals of the user's file.

    Args:
        backend: What `compile_function` was given.
    """
    from torch._C._dynamo.eval_frame import (
        _debug_get_cache_entry_list,
        _debug_get_precompile_entries,
        reset_code,
    )
    from torch._dynamo import convert_frame, eval_frame
    from torch._dynamo.guards import DeletedGuardManagerWrapper
    from torch._dynamo.utils import CleanupManager

    def is_ours(other: Any) -> bool:
        return bool(getattr(other, "compiler_fn", other) == backend)  # torch wraps what torch.compile was given

    with convert_frame.compile_lock:
        for code in [code for reference in convert_frame.input_codes.seen if (code := reference()) is not None]:
            entries = _debug_get_cache_entry_list(code)
            ours = [entry for entry in entries if is_ours(entry.backend)]
            written = [entry.code for entry in ours]
            if ours and len(ours) == len(entries) and not _debug_get_precompile_entries(code):
                del entries, ours  # they point into what goes
                reset_code(code)
            else:  # as torch does where an object dies that a guard has seen
                for entry in ours:
                    if (state := entry.guard_manager.extra_state) is not None:
                        state.invalidate(entry, DeletedGuardManagerWrapper("compiled code was given back"))
            for compiled_code in written:
                if compiled_code in CleanupManager.instance:
                    CleanupManager.instance._remove_id(id(compiled_code))
        for key, kept in list(eval_frame.cached_backends.items()):
            if is_ours(kept):
                del eval_frame.cached_backends[key]


@contextlib.contextmanager
def generated_with_constants() -> Iterator[list[types.ModuleType]]:
    """The Python modules that Inductor generates meanwhile with constants of their own, frozen weights for example.

    Inductor keeps every module that it has loaded, for good. It shares those without constants between graphs.
    """
    from torch._inductor.codecache import PyCodeCache

    before, found = len(PyCodeCache.modules), list[types.ModuleType]()
    try:
        yield found
    finally:
        shared = set(map(id, PyCodeCache.modules_no_attr.values()))
        found += [module for module in PyCodeCache.modules[before:] if id(module) not in shared]


def forget_generated(modules: Sequence[types.ModuleType]) -> None:
    """Take modules of `generated_with_constants` out of Inductor's list, so that they go with the last use of them."""
    from torch._inductor.codecache import PyCodeCache

    gone = set(map(id, modules))
    PyCodeCache.modules[:] = [module for module in PyCodeCache.modules if id(module) not in gone]
    for module in modules:
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]


# ---------------------------------------------------------------------------------------------- folding

OpOverload = torch._ops.OpOverload


def output_code_class() -> Any:
    """The base of compiled graphs: what derives from it may stand in torch's cache, as its ``RegionalOutputCode``."""
    from torch._inductor.output_code import OutputCode

    return OutputCode


def compile_inner(module: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor alone, on a graph of ATen operators."""
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx_inner

    # Where AOTAutograd's cache holds whole graphs (`bundled_cache`), Inductor's own would be left out; but what is made
    # of an empty graph without that setting could not be held.
    empty = not any(node.op == "call_function" for node in module.graph.nodes)
    with functorch_config.patch(bundled_autograd_cache=empty and functorch_config.bundled_autograd_cache):
        return compile_fx_inner(module, example_inputs, **kwargs)


@contextlib.contextmanager
def bundled_cache(tag: str) -> Iterator[None]:
    """Have AOTAutograd's cache hold compiled graphs themselves, and not the keys of Inductor's cache.

    Else it gives back what Inductor compiled, without what was made around it.

    Args:
        tag: What the result depends on beside graph and settings, for the cache's key.
    """
    from torch._functorch import config as functorch_config

    with functorch_config.patch(bundled_autograd_cache=True), _tagged_cache(tag):
        yield


def _tagged_cache(tag: str) -> Any:
    """Have the keys of torch's caches cover something that torch does not know of."""
    before = torch.compiler.config.cache_key_tag
    return torch.compiler.config.patch(cache_key_tag=f"{before} {tag}".strip())  # type: ignore[attr-defined]


def _autocast_state() -> str:
    """The autocast that is on, by device: torch 2.11's AOTAutograd cache knows that there is one, not its dtype.

    There a graph that was compiled under bfloat16 would be given back under float16.
    """
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return " ".join(f"autocast_{device}={torch.get_autocast_dtype(device)}" for device in devices)


@contextlib.contextmanager
def aside_of_main_graph() -> Iterator[None]:
    """Compile something without a trace in what torch notes down of the graph that is being compiled.

    Torch keeps the strides of the last graph's outputs for the main one; and passes, tuning and CUDA graphs are the
    user's settings for the main one.
    """
    from torch._inductor import config

    outer = torch._guards.TracingContext.get()
    context = torch._guards.TracingContext(outer.fake_mode)
    plain = {option: None for option in config.get_config_copy() if option.endswith("_custom_pre_pass")}
    plain |= {option: None for option in config.get_config_copy() if option.endswith("_custom_post_pass")}
    with torch._guards.tracing(context), config.patch({**plain, "max_autotune": False, "triton.cudagraphs": False}):
        yield


def no_cudagraphs() -> Any:
    """The setting of one graph."""
    from torch._inductor.utils import BoxedBool

    return BoxedBool(False)


def end_failed_warmup(device_index: int) -> bool:
    """Repair the CUDA graphs of a device after a warm-up run has raised, with `torch.OutOfMemoryError` for example.

    Torch 2.11 and 2.15 keep the failed run as the current node of the device's tree, without its outputs. All later
    calls on the device then fail with an empty ``AssertionError`` (2.11), or skip the warm-up of that graph. There is
    no public function for it except ``torch.compiler.reset()``, which drops all compiled code of the process. To be
    deleted when ``CUDAGraphTreeManager.run_eager`` restores the current node after an exception.

    Returns:
        Whether the current node was such a run.
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


def wants_channels_last(module: torch.fx.GraphModule) -> bool:
    """Whether Inductor will lay out this graph's convolutions channels last."""
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(module, is_inference=True))


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
    """Whether Inductor knows an operator only as what it decomposes it into, while AOTAutograd traces."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    return target in decompositions and target not in lowerings


def fake_tensor(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without memory, of the compile that is under way."""
    with torch._guards.TracingContext.get().fake_mode:  # type: ignore[union-attr]
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


def after_optimizer_steps(hook: Callable[..., None]) -> Any:
    """Call ``hook(optimizer, args, kwargs)`` after each step of every optimizer; ``remove()`` of the result ends it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    return register_optimizer_step_post_hook(hook)


def has_tensor_subclasses(module: torch.nn.Module) -> bool:
    """Whether weights of a module are tensors around other tensors, as a ``DTensor`` is."""
    return any(is_tensor_subclass(tensor) for tensor in (*module.parameters(), *module.buffers()))


def is_tensor_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one around other tensors, which ``__tensor_flatten__`` names."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def serializable(code: Any) -> Any:
    """A copy of a compiled graph that can be pickled."""
    copied = copy.copy(code)
    copied.prepare_for_serialization()
    if (bundle := getattr(copied, "_triton_bundle", None)) is not None:
        # A graph that came from Inductor's cache holds kernels that were launched since, which cannot be pickled (torch
        # 2.11 to 2.15: "pickle should not be called after make_launchers()"). Their binaries are in the bundle too.
        fresh = [kernel for kernel in bundle.static_autotuners if not kernel.kernel.launchers]
        copied.set_triton_bundle(dataclasses.replace(bundle, static_autotuners=fresh))
    return copied


def restored(code: Any, example_inputs: Sequence[Any], kwargs: Any) -> Any:
    """A compiled graph that was pickled, made callable again."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants

    constants = CompiledFxGraphConstants()
    code, _ = FxGraphCache.cache_hit_post_compile(code, {}, constants)
    if code is None:
        raise RuntimeError("a compiled graph could not be loaded from torch's cache")
    code.post_compile(example_inputs, constants, kwargs)
    return code


def tree_leaves(value: Any) -> list[Any]:
    """The leaves of nested containers, those that others registered with torch among them."""
    from torch.utils._pytree import tree_leaves

    return tree_leaves(value)


def tree_map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Nested containers with each tensor changed."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, change, value)


def named_leaves(value: Any) -> list[tuple[str, Any]]:
    """The leaves of nested containers, as `tree_leaves` orders them, after the way that leads there: ``"[0]['a']"``."""
    from torch.utils._pytree import keystr, tree_flatten_with_path

    leaves, _ = tree_flatten_with_path(value)
    return [(keystr(path), leaf) for path, leaf in leaves]


def is_dynamo_wrapper(module: object) -> bool:
    """Whether this is what ``torch.compile(module)`` returns."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def is_compiled_call(code: types.CodeType) -> bool:
    """Whether this is the code that runs when a function is called that ``torch.compile`` returned."""
    return code.co_name == "compile_wrapper" and code.co_filename == torch._dynamo.eval_frame.__file__


def is_profiling() -> bool:
    """Whether torch's profiler is running, which may have a profile function of Python of its own."""
    return bool(torch._C._autograd._profiler_enabled())


def unwrap_dynamo(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside what ``torch.compile(module)`` returned."""
    while is_dynamo_wrapper(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


def compiled_in_place(wrapper: torch.nn.Module) -> torch.nn.Module:
    """Take the module out of what ``torch.compile(module)`` returned, and compile it in place with the same settings.

    ``module.compile()`` would need the settings as arguments, and the wrapper keeps only the context made of them.
    """
    module = unwrap_dynamo(wrapper)
    module._compiled_call_impl = wrapper.dynamo_ctx(module._call_impl)  # type: ignore[operator]
    return module


# ---------------------------------------------------------------------------------------------- packages


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Export without what torch says beside its error: the graph that it has so far, on stderr."""
    printed = io.StringIO()
    with _own_warnings_off(), contextlib.redirect_stderr(printed):
        yield
    sys.stderr.write(printed.getvalue())  # nothing failed: it is what the module itself printed


@contextlib.contextmanager
def _own_warnings_off() -> Iterator[None]:
    """Torch 2.11 warns of its own use of ``LeafSpec``, and of buffers that it reads and does not write."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
        yield


def export_program(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: Any,
    signature: inspect.Signature,
) -> Any:
    """``torch.export.export``, for a module whose ``forward`` takes ``**kwargs`` too.

    Torch 2.11 fails on dynamic shapes of such inputs with an assertion of its own; it goes by the signature.

    Args:
        module: The module.
        forward: What it computes.
        args: Inputs by position.
        kwargs: Inputs by name.
        shapes: What is dynamic.
        signature: A signature that names each of the inputs.
    """
    own = vars(module).get("forward")
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    hooks_before = set(hooks)

    @functools.wraps(module.forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    named.__signature__ = signature  # type: ignore[attr-defined]
    vars(module)["forward"] = named
    try:
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    finally:
        vars(module).pop("forward")
        if own is not None:
            vars(module)["forward"] = own
        # An export that fails leaves torch 2.11's hook on every module of the process, and Dynamo then breaks the
        # graph wherever a buffer is assigned. Torch 2.15 removes the hook itself; delete this when it is the oldest.
        for hook in set(hooks) - hooks_before:
            del hooks[hook]


def torch_folder() -> str:
    """Where torch's own source lies."""
    return f"{Path(torch.__file__).parent}{os.sep}"


def compile_package(program: Any, path: str, options: Mapping[str, Any]) -> None:
    """Compile what ``torch.export`` gave with AOTInductor, and write the package.

    ``torch._inductor.aoti_compile_and_package`` is what torch's documentation tells users to call; it has no name
    without an underscore. It writes into the mapping that it is given.

    Args:
        program: The exported program.
        path: The package; its name has to end in ``.pt2``.
        options: Inductor settings.
    """
    with _own_warnings_off():
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=dict(options))


def save_program(program: Any, path: str, extra_files: dict[str, Any]) -> None:
    """``torch.export.save``."""
    with _own_warnings_off():
        torch.export.save(program, path, extra_files=extra_files)


def load_program(path: str) -> torch.nn.Module:
    """What ``torch.export.save`` wrote, as a module."""
    with _own_warnings_off():
        return program_as_module(torch.export.load(path))


def program_as_module(program: Any) -> torch.nn.Module:
    """What an exported program computes, uncompiled."""
    with _own_warnings_off():
        module: torch.nn.Module = program.module()
        return module


def load_package(path: str) -> Callable[[list[torch.Tensor]], Any]:
    """What an AOTInductor package computes, as a function of its input tensors in the order of the export.

    ``torch._inductor.aoti_load_package`` is what torch's documentation tells users to call. What it returns reads its
    two tree specs anew in each call, which takes longer than a small model does; the outputs' is read once here, and
    the inputs' is not needed.
    """
    from torch.utils._pytree import tree_unflatten, treespec_loads

    loader = load_foreign_package(path).loader
    outputs = treespec_loads(loader.get_call_spec()[1])

    def run(tensors: list[torch.Tensor]) -> Any:
        return tree_unflatten(loader.boxed_run(tensors), outputs)

    return run


def load_foreign_package(path: str) -> Any:
    """An AOTInductor package as torch loads it, called with the arguments of the export."""
    with _own_warnings_off():
        return torch._inductor.aoti_load_package(path)


RUN_PACKAGE = """
import os
import sys

sys.path.append(os.getcwd())  # last: a file there must not take the place of a module
import torch

package, inputs = sys.argv[1:]
tensors = torch.load(inputs, weights_only=True)
if torch.accelerator.is_available():
    torch.accelerator.set_device_index(max(0, *(tensor.get_device() for tensor in tensors)))
torch._C._aoti.AOTIModelPackageLoader(package, "model", False, 1, -1).boxed_run(tensors)
if torch.accelerator.is_available():
    torch.accelerator.synchronize()
"""
"""A script that runs an AOTInductor package once, on input tensors in a file; for ``python -P``.

It imports torch alone, and what `torch._inductor.aoti_load_package` calls (torch 2.11 to 2.15) in place of that, which
imports Inductor for some seconds more.
"""


# ---------------------------------------------------------------------------------------------- caches


def cache_folder() -> Path:
    """The folder of Inductor's caches. ``TORCHINDUCTOR_CACHE_DIR`` names it only if it is set."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


# ---------------------------------------------------------------------------------------------- process groups


def collective_timeouts() -> list[tuple[Any, timedelta]]:
    """The backends of this rank's process groups, each with the timeout of its collectives.

    Neither the groups of a process nor their timeouts have a public getter (torch 2.11 to 2.15). A backend without
    options, as MPI's, has no timeout and is left out.
    """
    found: dict[Any, timedelta] = {}
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        for device in getattr(group, "_device_types", ()):
            backend = group._get_backend(device)
            timeout = getattr(getattr(backend, "options", None), "_timeout", None)
            if timeout is not None and hasattr(backend, "_set_default_timeout"):
                found[backend] = timeout
    return list(found.items())


def set_collective_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the timeout of a backend's future collectives.

    ``torch.distributed.set_timeout`` is missing in torch 2.11, and sets one timeout for all backends of a group. To be
    replaced when torch 2.15 is the oldest version and each backend can be set alone.
    """
    backend._set_default_timeout(timeout)


# ---------------------------------------------------------------------------------------------- graph passes

TORCH_PASSES_FLAG = hasattr(_custom_graph_pass, "CustomInferenceAwareGraphPass")
"""Whether torch itself hands ``is_inference`` to post-grad passes (2.13 and later; 2.11 does not)."""

GRAPH_PASS_BASE: Any = getattr(_custom_graph_pass, "CustomInferenceAwareGraphPass", _custom_graph_pass.CustomGraphPass)
OPERATOR_TYPES: tuple[type, ...] = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""What ``torch.ops.aten.mul.Tensor`` and ``torch.ops.aten.mul`` are."""

TORCH_PASS_TYPES: tuple[type, ...] = (_custom_graph_pass.CustomGraphPass,)


def pool_offsets_to_indices() -> Any:
    """Inductor's operator that makes indices into an image of a max pooling's 8-bit offsets into windows."""
    from torch._inductor import inductor_prims

    return inductor_prims._low_memory_max_pool_offsets_to_indices


def inference_flag_of_caller() -> bool:
    """The ``is_inference`` that ``post_grad_passes`` was called with, read from its frame on the stack.

    Torch 2.11 has the flag there and does not hand it on to custom passes; nothing else that a pass can reach
    holds it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "post_grad_passes" and "is_inference" in frame.f_locals:
            return bool(frame.f_locals["is_inference"])
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("is_inference is known only while torch runs its post-grad passes")


def run_pass(graph_pass: Any, graph: torch.fx.Graph, is_inference: bool) -> Any:
    """Call a pass of ours or of torch's with the arguments that its class takes."""
    if TORCH_PASSES_FLAG and isinstance(graph_pass, GRAPH_PASS_BASE):
        return graph_pass(graph, is_inference)
    return graph_pass(graph)


def pattern_matcher(
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    example_inputs: Sequence[torch.Tensor],
    admits: Callable[[torch.Tensor, dict[str, Any]], bool],
    name: str,
) -> Callable[[torch.fx.Graph], int]:
    """Torch's pattern matcher for one pattern: changes a graph, and tells how often.

    Args:
        pattern: What to look for.
        replacement: What to put there.
        example_inputs: What both are traced with.
        admits: Asked with the output and the inputs of each place, as fake tensors.
        name: What torch's log calls it.
    """
    from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def value(argument: Any) -> Any:
        return argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument

    def check(match: Any) -> bool:
        return admits(value(match.output_node()), {name: value(argument) for name, argument in match.kwargs.items()})

    matcher = PatternMatcherPass(pass_name=name)
    # As torch's own patterns are, which it traces in the midst of a compile, too.
    with torch._guards.tracing(None), unset_fake_temporarily(), torch.no_grad():
        inputs = [tensor.detach().clone() for tensor in example_inputs]
        register_replacement(pattern, replacement, inputs, fwd_only, matcher, extra_check=check)
    return lambda graph: int(matcher.apply(graph))


# ---------------------------------------------------------------------------------------------- signals

callback_handler = torch._dynamo.callback.callback_handler
"""Torch's list of functions to call when a compile starts and ends."""

DYNAMO_TRIGGER = torch._dynamo.callback.CallbackTrigger.DYNAMO
"""The trigger of a compile that begins with tracing, not with a backward pass or a CUDA-graph recording."""


class TraceSettings:
    """Global settings that hold while a compile of ours is traced, and for nobody else's.

    They are set when torch announces a compile and taken back at its end; set around each call they would cost
    10 µs a call.

    - ``torch._inductor.config.freezing``: Dynamo looks at the global alone to decide whether weights become
      constants; ``options={"freezing": True}`` does not reach it.
    - ``torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags``: torch 2.11 skips the guards on tensors in a
      dictionary, as a module's weights are, where nothing was put into it since they held. So it does not see
      ``requires_grad`` change (what thaws would get no gradient), nor another dtype that came through ``.data``, as
      ``module.double()`` has it, nor that an input is a buffer which the call changes. What guards on all of them cost
      is in docs/correctness.md; from torch 2.12 on the setting changes nothing of that.
    - ``torch._dynamo.config.use_recursive_dict_tags_for_guards``: with it, torch 2.11 does not see that a module which
      had no parameters is given one.
    - Dynamo looks at ``.grad`` of each input, and torch warns of that where the input is another target's output:
      a warning about code that is not the user's.

    Args:
        ours: Whether the compile that begins is ours.
        frozen: Whether weights are to be baked in.
    """

    def __init__(self, *, ours: Callable[[], bool], frozen: Callable[[], bool]) -> None:
        self._ours = ours
        self._frozen = frozen
        self._settings = contextlib.ExitStack()

    def install(self) -> None:
        """Begin to watch for compiles."""
        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    def remove(self) -> None:
        """Watch no more."""
        unregister(self._start, self._end)

    def _start(self, args: Any) -> None:
        from torch._inductor import config

        if not self._ours():
            return
        self._settings.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        if self._frozen():  # `WeightWatch` looks at weights that are baked in
            self._settings.enter_context(config.patch(freezing=True))
        elif torch.__version__.startswith("2.11."):
            shortcuts = "skip_tensor_guards_with_matching_dict_tags", "use_recursive_dict_tags_for_guards"
            self._settings.enter_context(torch._dynamo.config.patch(dict.fromkeys(shortcuts, False)))

    def _end(self, args: Any) -> None:
        self._settings.close()


def unregister(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Take two functions out of torch's lists; ``torch._dynamo.reset()`` may have done so already."""
    for callbacks, mine in (
        (callback_handler.start_callbacks, start),
        (callback_handler.end_callbacks, end),
    ):
        if mine in callbacks:
            callbacks.remove(mine)


class GraphBreak(NamedTuple):
    """Where and why Dynamo ended a graph early."""

    reason: str
    file: str | None
    line: int | None


def graph_breaks(after: int) -> tuple[list[GraphBreak], int]:
    """The graph breaks of this process since the ``after``-th, and how many there are now."""
    reasons = torch._dynamo.utils.graph_break_reasons
    if len(reasons) < after:  # torch._dynamo.reset() empties the list
        after = 0
    found = []
    for reason in reasons[after:]:
        if reason.reason.startswith("DDPOptimizer "):
            continue  # a graph that is split for DDP: torch counts it as a break, though nothing runs in between
        where = reason.user_stack[-1] if reason.user_stack else None
        found.append(GraphBreak(reason.reason, where.filename if where else None, where.lineno if where else None))
    return found, len(reasons)


class CompilationRecord(NamedTuple):
    """What torch's compilation metrics say of one compiled frame."""

    compile_id: str
    is_forward: bool
    recompile_reason: str | None
    hit_recompile_limit: bool
    cache_hits: int
    cache_misses: int
    cudagraph_skip_reason: str | None


def frame_of(compile_id: str) -> str:
    """The part of a compile's id that all compiles of one piece of code share: "3" of "3/1"."""
    return compile_id.partition("/")[0]


def compilation_records(seen: set[int]) -> Iterator[CompilationRecord]:
    """The metrics of compiles that ended since the last call; ``seen`` remembers which those were."""
    metrics = torch._dynamo.utils.get_compilation_metrics()
    for entry in metrics:
        key = entry.start_time_us or id(entry)
        if key in seen or entry.compile_id is None:
            continue
        seen.add(key)
        hits, misses = (
            entry.aotautograd_local_cache_hit_count or 0,
            entry.aotautograd_local_cache_miss_count or 0,
        )
        if not hits and not misses:
            hits = entry.inductor_fx_local_cache_hit_count or 0
            misses = entry.inductor_fx_local_cache_miss_count or 0
        yield CompilationRecord(
            entry.compile_id,
            entry.is_forward is not False,
            entry.recompile_reason,
            "recompile limit exceeded" in (entry.fail_reason or ""),
            hits,
            misses,
            entry.cudagraph_skip_reason,
        )
