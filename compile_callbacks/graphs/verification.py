"""`Verification`: compares a compiled graph with the captured graph at its first call, for a `CompiledGraph`.

This never calls the user's code. Both graphs run on aliases of the call's inputs, and on clones of the inputs that the
graph writes.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.device import free_memory
from compile_callbacks._utils.errors import CompileError, with_code
from compile_callbacks._utils.messages import describe_failure
from compile_callbacks.graphs.accuracy import (
    COMPARISON_BYTES,
    GRADIENT,
    Comparison,
    Tensors,
    compare_results,
    not_compared,
    tolerance,
)
from compile_callbacks.graphs.failures import EagerFallback
from compile_callbacks.graphs.snapshot import RandomState, Snapshot

_GRAPH_RUNS_EAGERLY = "; the graph runs eagerly from here on, because rounding errors are never this large"
_TARGET_RUNS_EAGERLY = "; it runs eagerly from here on (verify='eager')"
_Reaction = tuple[Literal["use", "leave", "raise"], str]
_REACTIONS: Mapping[str, tuple[_Reaction, _Reaction]] = {
    "candidate": (("leave", ""), ("leave", "")),
    "warn": (("use", ""), ("leave", _GRAPH_RUNS_EAGERLY)),
    "eager": (("leave", _TARGET_RUNS_EAGERLY), ("leave", _TARGET_RUNS_EAGERLY)),
    "raise": (("raise", " (verify='raise')"), ("raise", " (verify='raise')")),
}
"""What happens to a graph that differs, and what the message says: if results are imprecise, and if they are wrong."""


@dataclass(eq=False)
class Verification:
    """Compares one compiled graph with the captured graph at its first call, and decides which of them runs.

    A graph with a collective is not compared, because processes compile at different times, and an additional
    collective would wait forever. In a group of processes, a custom operator may be one. Gradients of tensor subclasses
    and of frozen weights are not compared.
    """

    compiled: Callable[..., Any]
    eager: torch.fx.GraphModule
    options: Mapping[str, Any]
    modules: Iterable[Callable[[], torch.nn.Module | None]]  # weak references; torch never frees compiled code
    fallback: EagerFallback
    communicates: bool  # with other processes
    _lacked_memory: bool = False  # whether a comparison ran out of memory; a second one is the last

    def accepts(self, inputs: Sequence[Any]) -> bool | None:
        """Return whether the compiled graph can be used, or ``None`` if it is compared again at the next call."""
        if self.communicates:
            return self._react_to(not_compared("collective"))
        try:
            comparison = self._run_and_compare(inputs)
            if comparison.why_not == "no memory" and not self._lacked_memory:
                self._lacked_memory = True
                return None
            return self._react_to(comparison)
        except _CompiledGraphFailedError as failure:
            self.fallback.eventful_call().runs_target_eagerly = True
            self.fallback.compiled_code_failed(failure.args[0])
            return False

    def _react_to(self, comparison: Comparison) -> bool:
        """Report a comparison. Return whether the compiled graph is used."""
        settings, (target, phase) = self.fallback.settings, self.fallback.key[:2]
        recorder, reason, fix = self.fallback.recorder, comparison.reason, None
        recorder.compiles_seen += 1
        if comparison.why_not in ("dropout", "random numbers"):
            mode = recorder.mode_arguments[phase]
            fix = f'{mode}={{"options": {{"fallback_random": True}}}} makes it comparable, but slower'
        figures = {name: getattr(comparison, name) for name in ("why_not", "max_abs_error", "tensors", "noisy_tensors")}
        recorder.record("verify", self.fallback.key, reason=reason, fix=fix, verdict=comparison.verdict, **figures)
        if settings.verify == "raise" and comparison.why_not == "error":
            message = f"target {target!r} could not be compared with eager in the {phase} phase: {reason}"
            raise CompileError(with_code("CC302", f"{message} (verify='raise')"))
        if comparison.verdict != "differs":
            return True
        reaction, consequence = _REACTIONS["candidate" if settings.on_trial else settings.verify][comparison.is_wrong]
        message = f"target {target!r} differs from eager in the {phase} phase: {reason}"
        if reaction == "raise":
            raise CompileError(with_code("CC302", message + consequence))
        if reaction == "leave" and consequence != _GRAPH_RUNS_EAGERLY:
            self.fallback.eventful_call().runs_target_eagerly = True
        if not settings.on_trial:
            if reaction == "leave":
                recorder.record("fallback", self.fallback.key, reason=reason, code="CC302")
            self.fallback.warn("CC302", message + consequence)
        return reaction == "use"

    def _run_and_compare(self, inputs: Sequence[Any]) -> Comparison:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        random_state = RandomState(inputs)
        with _unnoticed(random_state, Snapshot(self.eager)):
            try:
                aliases = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
                facts = _torch.graphs.examine_graph(self.eager, aliases)
                frozen = any(True for _ in (*self.eager.parameters(), *self.eager.buffers()))
                with_gradients = trains and not facts.has_subclasses and not frozen
                device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
                needed = needed_bytes(facts, inputs, with_gradients=with_gradients)
                self._check_memory(needed, device)
                runs = _Runs(inputs, self._names(inputs), sorted(facts.written), with_gradients)
                expected = runs.run(self._eager_function())
                # Two sets of gradients may not fit into the memory of a GPU.
                expected |= {name: value.cpu() for name, value in expected.items() if name.startswith(GRADIENT)}
            except Exception as error:
                return _not_compared(error)
            drew = random_state.drawn()
            if drew and not _torch.inductor.draws_as_eager(self.options):
                named = any("dropout" in f"{node.target} {node.kwargs}" for node in self.eager.graph.nodes)
                return not_compared("dropout" if named else "random numbers")
            random_state.restore()
            try:
                with _torch.inductor.without_cuda_graphs():
                    actual = runs.run(self.compiled)
            except torch.OutOfMemoryError as error:
                return _not_compared(error)
            except Exception as error:
                raise _CompiledGraphFailedError(error) from error

            def run_in_double() -> dict[str, torch.Tensor]:
                if drew:
                    raise ValueError("it would draw other random numbers")
                self._check_memory(2 * needed, device)
                return runs.run(self._eager_function(double=True), double=True)

            try:
                comparison = compare_results(expected, actual, tolerance(tensors, facts.dtypes), run_in_double)
            except Exception as error:
                return _not_compared(error)
        outputs_only = comparison.verdict == "equal" and trains and not with_gradients
        return replace(comparison, verdict="outputs only") if outputs_only else comparison

    def _check_memory(self, needed: int, device: torch.device) -> None:
        """Raise an error if a run may need more than the free memory, because the user's process would run out."""
        free = free_memory(device)
        if free is not None and needed > free:
            self._lacked_memory = True
            mib, free_mib = needed / 2**20, free / 2**20
            raise torch.OutOfMemoryError(f"the comparison may need {mib:,.0f} MiB, and {free_mib:,.0f} MiB are free")

    def _names(self, inputs: Sequence[Any]) -> list[str]:
        """Return the names of a graph's inputs: the names of parameters and buffers, or positions."""
        names: dict[int, str] = {}
        for module in filter(None, (reference() for reference in self.modules)):
            names |= {id(buffer): f"buffer {name!r}" for name, buffer in module.named_buffers()}
            names |= {id(parameter): f"parameter {name!r}" for name, parameter in module.named_parameters()}
        return [names.get(id(value), f"input {position}") for position, value in enumerate(inputs)]

    def _eager_function(self, *, double: bool = False) -> Callable[..., Any]:
        """Return the captured graph. If its weights are frozen, copy the buffers, because the graph may write them."""
        if double:
            return copy.deepcopy(self.eager).double().forward
        buffers = {name: buffer.clone() for name, buffer in self.eager.named_buffers()}
        return lambda *inputs: torch.func.functional_call(self.eager, buffers, inputs)


class _CompiledGraphFailedError(Exception):
    """A compiled graph raised the error in ``args``, but its eager run did not raise."""


@dataclass(eq=False)
class _Runs:
    """Runs a graph several times on the same inputs."""

    inputs: Sequence[Any]
    names: Sequence[str]
    written: Sequence[int]  # the positions of the inputs that the graph writes
    with_gradients: bool
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the outputs of the first run

    def run(self, function: Callable[..., Any], *, double: bool = False) -> dict[str, torch.Tensor]:
        """Run a function on aliases of the inputs. Return outputs, changed inputs and gradients by name."""
        arguments, leaves = self._arguments(double)
        # In the grad mode of the call: without gradients, no argument requires grad, but the graph may need the mode.
        with _torch.modes.restored_after_error(), _torch.graphs.computing_in_double(double):
            outputs = function(*arguments)
            tensors = {f"output {i}": output for i, output in enumerate(outputs) if isinstance(output, torch.Tensor)}
            changed = {self.names[position]: arguments[position] for position in self.written}
            # Copied before the backward pass, because an activation checkpoint writes to them again.
            copies = {name: tensor.detach().clone() for name, tensor in changed.items()}
            gradients = self._gradients(tensors | changed, leaves)
        return {name: tensor.detach() for name, tensor in tensors.items()} | copies | gradients

    def _gradients(self, tensors: Tensors, leaves: Tensors) -> dict[str, torch.Tensor]:
        """Return the gradients of leaves for random gradients of the outputs, which are the same in each run."""
        outputs, cotangents = [], []
        for seed, (name, tensor) in enumerate(tensors.items()):
            if leaves and tensor.requires_grad:
                outputs.append(tensor)
                # Random, because ones have no gradient through a softmax. The float64 run gets the same rounded values.
                generator = torch.Generator(tensor.device).manual_seed(seed)
                random = torch.randn(tensor.shape, device=tensor.device, generator=generator)
                cotangents.append(random.to(self.dtypes.setdefault(name, tensor.dtype)).to(tensor.dtype))
        if not outputs:
            return {}
        gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True))

    def _arguments(self, double: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """Return aliases of the inputs, with clones of written inputs, and the leaves of autograd's graph by name."""
        arguments, leaves = list(self.inputs), dict[str, torch.Tensor]()
        clones: dict[Any, torch.UntypedStorage] = {}
        bases: dict[int, torch.Tensor] = {}
        for position, value in enumerate(self.inputs):
            if not isinstance(value, torch.Tensor):
                continue
            dtype = _torch.graphs.DOUBLE_OF.get(value.dtype, value.dtype) if double else value.dtype
            if position not in self.written:
                argument = value.detach().to(dtype)
            else:
                storage = value.untyped_storage()
                memory = storage.data_ptr(), value.dtype if double else None
                if memory not in clones:
                    clones[memory] = storage.clone()
                    if double:
                        clones[memory] = value.detach().new_empty(0).set_(clones[memory]).to(dtype).untyped_storage()
                # AOTAutograd reads the base of inputs that share memory, so clone a view as a view of the cloned base.
                base = value if value._base is None else value._base
                if id(base) not in bases:
                    bases[id(base)] = _tensor_over(clones[memory], base, dtype)
                argument = bases[id(base)]
                if value is not base:
                    argument = argument.as_strided(value.size(), value.stride(), value.storage_offset())
            if self.with_gradients and value.requires_grad:
                leaves[GRADIENT + self.names[position]] = argument.requires_grad_()
                # Autograd does not allow in-place changes of leaves.
                argument = argument.clone() if position in self.written else argument
            arguments[position] = argument
        return arguments, leaves


@contextlib.contextmanager
def _unnoticed(random_state: RandomState, frozen: Snapshot) -> Iterator[None]:
    """Hide the code of a ``with`` block from the user's program. Restore generators, and buffers that are constants."""
    try:
        with (
            warnings.catch_warnings(),
            _torch.autograd.outside_activation_checkpoints(),
            _torch.modes.without_autocast_cache(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        frozen.restore()
        random_state.restore()


def _tensor_over(storage: torch.UntypedStorage, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor in the given storage, with the layout of another tensor."""
    if type(like) not in (torch.Tensor, torch.nn.Parameter) or like.layout is not torch.strided or like.is_conj():
        raise TypeError(f"the graph writes to a {type(like).__name__}")
    empty = torch.empty(0, dtype=dtype or like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def needed_bytes(facts: _torch.graphs.GraphFacts, inputs: Sequence[Any], *, with_gradients: bool) -> int:
    """Return the memory that a comparison may need: the values of the graph, gradients, and copies of written inputs.

    With gradients, this is an upper bound, because eager execution does not save all values for the backward pass.
    """
    needed: int = COMPARISON_BYTES + 2 * sum(inputs[position].nbytes for position in facts.written)
    if not with_gradients:
        return needed + facts.peak_bytes
    gradients: int = sum(value.nbytes for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad)
    # The outputs of the eager run are kept for the comparison, and each output gets a random gradient. An operator of
    # the backward pass may need two more values, the gradient of its input and a temporary one.
    others = 3 * facts.output_bytes + 2 * max(facts.value_bytes, default=0)
    return needed + gradients + sum(facts.value_bytes) + others


def _not_compared(error: Exception) -> Comparison:
    # torch's allocator for the CPU raises a RuntimeError.
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return not_compared("no memory", describe_failure(error))
    return not_compared("error", describe_failure(error))  # not the error itself, whose traceback keeps tensors alive
