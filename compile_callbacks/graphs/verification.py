"""`Verification`: compares a compiled graph with the captured graph at its first call, for a `CompiledGraph`.

This never calls the user's code. The captured graph runs on aliases of the call's inputs, and on clones of the inputs
that it writes.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.device import free_memory
from compile_callbacks._utils.errors import CompileError, with_code
from compile_callbacks._utils.messages import describe_failure
from compile_callbacks.graphs.accuracy import (
    COMPARISON_BYTES,
    Comparison,
    Results,
    compare_results,
    gradients_of,
    not_compared,
    sketches,
    tolerance,
)
from compile_callbacks.graphs.failures import EagerFallback
from compile_callbacks.graphs.snapshot import RandomState


@dataclass(eq=False)
class Verification:
    """Compares one compiled graph with the captured graph at its first call, and decides which of them runs.

    To compare gradients, `Verification` runs the compiled graph once more, on aliases of the inputs. Otherwise, it runs
    the compiled graph once, for the user's call, and compares these outputs with eager's. A graph with a collective is
    not compared, because processes compile at different times, and an additional collective would wait forever.
    Gradients are not compared with CUDA graphs: torch records them in the order of calls, so an additional backward
    pass would become a part of each step.
    """

    compiled: Callable[..., Any]
    eager: torch.fx.GraphModule
    options: Mapping[str, Any]
    modules: Iterable[Callable[[], torch.nn.Module | None]]  # weak references; torch never frees compiled code
    fallback: EagerFallback
    has_collective: bool
    uses_cudagraphs: bool
    rejected: bool = False  # whether the captured graph runs from now on
    _outputs: Any = None  # of the user's own call, if this object made it
    _undo: Sequence[Callable[[], None]] = ()  # undoes the changes by the user's call

    def call(self, inputs: Sequence[Any]) -> Any:
        """Make the first call. If it rejects the compiled graph, the outputs are those of the captured graph."""
        if self.has_collective:
            self._react_to(not_compared("collective"))
            return self.compiled(*inputs)
        try:
            comparison = self._run_and_compare(inputs, self._names(inputs))
            self.rejected = not self._react_to(comparison)
        except torch.OutOfMemoryError as error:  # from the user's own call
            self._react_to(_not_compared(error))
            raise
        except _CompiledGraphFailedError as failure:
            self._report_failure(failure.args[0])
            self.rejected = True
        if not self.rejected:
            return self.compiled(*inputs) if self._outputs is None else self._outputs
        for step in self._undo:
            step()
        with _torch.modes.restored_after_error():
            return self.eager.forward(*inputs)

    def _report_failure(self, error: Exception) -> None:
        if self.fallback.settings.on_error == "raise":
            raise self.fallback.as_compile_error(error) from error
        self.fallback.eventful_call().runs_target_eagerly = True
        self.fallback.compiler_failed(error, what="its compiled code raised an error that eager does not")

    def _react_to(self, comparison: Comparison) -> bool:
        """Report a comparison. Return whether the compiled graph is used."""
        settings, (target, phase) = self.fallback.settings, self.fallback.key[:2]
        self.fallback.recorder.compiles_seen += 1
        fix = None
        if comparison.why_not in ("dropout", "random numbers"):
            mode = self.fallback.recorder.mode_arguments[phase]
            fix = f'{mode}={{"options": {{"fallback_random": True}}}} makes it comparable, but slower'
        verdict, reason = comparison.verdict, comparison.reason
        self.fallback.recorder.record(
            "verify",
            self.fallback.key,
            fix=fix,
            verdict=verdict,
            why_not=comparison.why_not,
            reason=reason,
            max_abs_error=comparison.max_abs_error,
        )
        if settings.verify == "raise" and comparison.why_not == "error":
            message = f"target {target!r} could not be compared with eager in the {phase} phase: {reason}"
            raise CompileError(with_code("CC302", f"{message} (verify='raise')"))
        if verdict != "differs":
            return True
        if settings.on_trial:
            self.fallback.eventful_call().runs_target_eagerly = True
            return False
        message = f"target {target!r} differs from eager in the {phase} phase: {reason}"
        rounds = comparison.may_be_rounding and not self.options.get("fallback_by_default")  # else runs eager's kernels
        known = "numerics" in _torch.inductor.option_names()
        if rounds and known and self.options.get("numerics", "default") == "default":
            message += "; options={'numerics': 'strict'} is closer to eager, but slower"
        if settings.verify == "raise":
            raise CompileError(with_code("CC302", f"{message} (verify='raise')"))
        if settings.verify == "eager":
            self.fallback.eventful_call().runs_target_eagerly = True
            message += "; it runs eagerly from here on (verify='eager')"
        elif comparison.is_wrong:
            message += "; the graph runs eagerly from here on, because rounding errors are never this large"
        rejects = settings.verify == "eager" or comparison.is_wrong
        if rejects:
            self.fallback.recorder.record("fallback", self.fallback.key, reason=reason, code="CC302")
        self.fallback.warn("CC302", message)
        return not rejects

    def _names(self, inputs: Sequence[Any]) -> list[str]:
        """Return the names of a graph's inputs: the names of parameters and buffers, or positions."""
        names: dict[int, str] = {}
        for module in filter(None, (reference() for reference in self.modules)):
            names |= {id(buffer): f"buffer {name!r}" for name, buffer in module.named_buffers()}
            names |= {id(parameter): f"parameter {name!r}" for name, parameter in module.named_parameters()}
        return [names.get(id(value), f"input {position}") for position, value in enumerate(inputs)]

    def _run_and_compare(self, inputs: Sequence[Any], names: Sequence[str]) -> Comparison:
        """Run the graph eagerly and compiled, and compare the runs. The compiled run may be the user's own call."""
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        random_state = RandomState(inputs)
        try:
            with _unnoticed(random_state):
                aliases = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
                facts = _torch.graphs.examine_graph(self.eager, aliases)
                in_users_call = self.uses_cudagraphs or facts.has_subclasses or self._has_constants()
                with_gradients = trains and not in_users_call
                device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
                check_memory(needed_bytes(facts, inputs, with_gradients=with_gradients), free_memory(device))
                written = sorted(facts.written)
                runs = _Runs(inputs=inputs, names=names, written=written, with_gradients=with_gradients)
                expected = runs.run(self._eager_function())
                drew = random_state.drawn()
        except Exception as error:
            return _not_compared(error)
        if drew and not _torch.inductor.draws_as_eager(self.options):
            named = any("dropout" in f"{node.target} {node.kwargs}" for node in self.eager.graph.nodes)
            return not_compared("dropout" if named else "random numbers")
        try:
            if with_gradients:
                with _unnoticed(random_state):
                    actual = runs.run(self.compiled, expected)
            else:
                self._undo = [random_state.restore, runs.restore]
                self._outputs = self.compiled(*inputs)
                actual = runs.results(self._outputs, inputs)
        except torch.OutOfMemoryError as error:
            if not with_gradients:
                raise  # from the user's own call
            return _not_compared(error)
        except Exception as error:
            raise _CompiledGraphFailedError(error) from error

        def rerun(which: str, keep: Collection[str]) -> Results:
            if drew:
                raise ValueError("it would draw other random numbers")
            double = which == "float64"
            function = self.compiled if which == "compiled" else self._eager_function(double=double)
            return runs.run(function, expected, keep=keep, double=double)

        try:
            with _unnoticed(None):
                comparison = compare_results(expected, actual, tolerance(tensors, facts.dtypes), rerun)
        except Exception as error:
            return _not_compared(error)
        outputs_only = comparison.verdict == "equal" and trains and not with_gradients
        return Comparison("outputs only", max_abs_error=comparison.max_abs_error) if outputs_only else comparison

    def _has_constants(self) -> bool:
        return next(itertools.chain(self.eager.parameters(), self.eager.buffers()), None) is not None

    def _eager_function(self, *, double: bool = False) -> Callable[..., Any]:
        """Return the captured graph. If its weights are frozen, copy the buffers, because the graph may write them."""
        if not self._has_constants():
            return self.eager.forward
        if double:
            return copy.deepcopy(self.eager).double().forward
        buffers = {name: buffer.clone() for name, buffer in self.eager.named_buffers()}
        return lambda *inputs: torch.func.functional_call(self.eager, buffers, inputs)


class _CompiledGraphFailedError(Exception):
    """A compiled graph raised the error in ``args``, but its eager run did not raise."""


@dataclass(eq=False, kw_only=True)
class _Runs:
    """Runs a graph several times on the same inputs."""

    inputs: Sequence[Any]
    names: Sequence[str]
    written: Sequence[int]  # the positions of the inputs that the graph writes
    with_gradients: bool

    def __post_init__(self) -> None:
        written = [self.inputs[position] for position in self.written]
        self._saved = {_address(value): value.untyped_storage().clone() for value in written}

    def run(
        self,
        function: Callable[..., Any],
        like: Results | None = None,
        *,
        keep: Collection[str] = (),
        double: bool = False,
    ) -> Results:
        """Run a function on aliases of the inputs."""
        arguments, leaves = self._arguments(double)
        # In the grad mode of the call: without gradients, no argument requires grad, but the graph may need the mode.
        with _torch.graphs.computing_in_double(double):
            results = self.results(function(*arguments), arguments)
            # Copied before the backward pass, because an activation checkpoint writes to them again.
            names = [self.names[position] for position in self.written]
            written = {name: results.tensors[name].detach().clone() for name in names}
            gradients = gradients_of(results.tensors, (like or results).tensors, leaves)
        results.tensors = {name: tensor.detach() for name, tensor in results.tensors.items()} | written
        if keep:
            results.gradients = {name: gradients.get(name, torch.zeros_like(leaves[name])).cpu() for name in keep}
        else:
            results.sketches = dict.fromkeys(leaves, [0.0] * 3) | sketches(gradients)
        return results

    def results(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Results:
        """Return the outputs of a call, and the inputs that the call wrote."""
        tensors = {f"output {i}": output for i, output in enumerate(outputs) if isinstance(output, torch.Tensor)}
        return Results(tensors | {self.names[position]: inputs[position] for position in self.written})

    def restore(self) -> None:
        """Restore the user's inputs that a call has written."""
        for value in (self.inputs[position] for position in self.written):
            versioned = () if value.is_inference() else (value,)
            with torch.inference_mode(value.is_inference()), _torch.autograd.preserve_versions(versioned):
                value.detach().copy_(_tensor_over(self._saved[_address(value)], value))

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
                memory = _address(value), value.dtype if double else None
                if memory not in clones:
                    clones[memory] = self._saved[memory[0]].clone()
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
                leaves[f"the gradient of {self.names[position]}"] = argument.requires_grad_()
                argument = _NoLeaf.apply(argument) if position in self.written else argument
            arguments[position] = argument
        return arguments, leaves


class _NoLeaf(torch.autograd.Function):
    """Makes an input a non-leaf of autograd's graph, because autograd does not allow in-place changes of leaves."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _tensor_over(tensor.untyped_storage(), tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@contextlib.contextmanager
def _unnoticed(random_state: RandomState | None) -> Iterator[None]:
    """Hide the code of a ``with`` block from the user's program, and restore the random generators afterwards."""
    try:
        with (
            warnings.catch_warnings(),
            _torch.autograd.outside_activation_checkpoints(),
            _torch.modes.restored_after_error(),
            _torch.modes.without_autocast_cache(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        if random_state is not None:
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


def check_memory(needed: int, free: int | None) -> None:
    """Raise an error if a comparison may need more than the free bytes, because the user's process would run out."""
    if free is not None and needed > free:
        mib, free_mib = needed / 2**20, free / 2**20
        raise torch.OutOfMemoryError(f"the comparison may need {mib:,.0f} MiB, and {free_mib:,.0f} MiB are free")


def _address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _not_compared(error: Exception) -> Comparison:
    # torch's allocator for the CPU raises a RuntimeError.
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return not_compared("no memory", describe_failure(error))
    return not_compared("error", describe_failure(error))  # not the error itself, whose traceback keeps tensors alive
