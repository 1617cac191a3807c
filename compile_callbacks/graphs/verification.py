"""`Verification`: compares a compiled graph with the captured graph at its first call, for a `CompiledGraph`.

Both graphs run on aliases of the call's inputs, and on clones of inputs that they write. The user's code never runs.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.device import free_memory
from compile_callbacks._utils.errors import CompileError, with_code
from compile_callbacks._utils.messages import describe_failure
from compile_callbacks.graphs import accuracy
from compile_callbacks.graphs.accuracy import GRADIENT, GraphComparison, Tensors, not_compared
from compile_callbacks.graphs.captured_graph import uninitialized_outputs
from compile_callbacks.graphs.snapshot import Snapshot
from compile_callbacks.graphs.target_log import CODE_RAISED, TargetLog

_REACTIONS = {
    ("warn", "differs"): ("nothing", ""),
    ("warn", "wrong"): ("graph", "; the graph runs eagerly from here on, because rounding errors are never this large"),
    **{("eager", each): ("target", "; it runs eagerly from here on (verify='eager')") for each in ("differs", "wrong")},
    **{("raise", each): ("raise", " (verify='raise')") for each in ("differs", "wrong", "error")},
}
"""The reaction to a setting and an outcome: the part that runs eagerly, and the end of the message."""


@dataclass(eq=False)
class Verification:
    """Compares one compiled graph with the captured graph at its first call, and decides which of them runs.

    A graph with a collective is not compared, because processes compile at different times, and an additional
    collective would wait forever. In a group of processes, a custom operator may be one. Gradients of tensor subclasses
    are not compared.
    """

    compiled: Callable[..., Any]
    eager: torch.fx.GraphModule
    options: Mapping[str, Any]
    log: TargetLog
    communicates: bool  # with other processes
    facts: _torch.graphs.GraphFacts | None = None  # about the captured graph, after a comparison

    def accepts(self, inputs: Sequence[Any]) -> bool:
        """Return whether the compiled graph can be used."""
        try:
            comparison = not_compared("collective") if self.communicates else self._compare(inputs)
        except Exception as error:
            # The description and not the error, whose traceback keeps tensors alive. The CPU has a RuntimeError.
            lacks_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            comparison = not_compared("no memory" if lacks_memory else "error", describe_failure(error))
        if isinstance(comparison, GraphComparison):
            return self._react_to(comparison)
        self.log.runs_eagerly = True
        self.log.compiler_failed(comparison, what=CODE_RAISED)
        return False

    def _react_to(self, comparison: GraphComparison) -> bool:
        """Report a comparison. Return whether the compiled graph is used."""
        settings, recorder, (target, phase) = self.log.settings, self.log.recorder, self.log.key[:2]
        mode, is_random = recorder.mode_arguments[phase], comparison.why_not in ("dropout", "random numbers")
        fix = f'{mode}={{"options": {{"fallback_random": True}}}} makes it comparable, but slower'
        figures = {name: value for name, value in vars(comparison).items() if name not in ("result", "is_wrong")}
        figures |= {"verdict": comparison.result, "fix": fix if is_random else None}
        recorder.record("verify", self.log.key, **figures)
        outcome = comparison.why_not or ("wrong" if comparison.is_wrong else comparison.result)
        if (settings.verify, outcome) not in _REACTIONS:
            return True
        reaction, consequence = _REACTIONS[settings.verify, outcome]
        what = "could not be compared with" if outcome == "error" else "differs from"
        message = f"target {target!r} {what} eager in the {phase} phase: {comparison.reason}{consequence}"
        if reaction == "raise":
            raise CompileError(with_code("CC302", message))
        if reaction == "target":
            self.log.runs_eagerly = True
        if not settings.on_trial:
            if reaction != "nothing":
                recorder.record("fallback", self.log.key, reason=comparison.reason, code="CC302")
            self.log.warn_later("CC302", message)
        return reaction == "nothing"

    def _compare(self, inputs: Sequence[Any]) -> GraphComparison | Exception:
        """Compare the graphs, or return the error of the compiled graph if the captured graph raises none."""
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
        before = Snapshot(self.eager, inputs)
        with contextlib.ExitStack() as unnoticed:
            unnoticed.callback(before.restore)
            unnoticed.enter_context(warnings.catch_warnings(action="ignore"))
            unnoticed.enter_context(_torch.autograd.outside_activation_checkpoints())
            unnoticed.callback(torch.clear_autocast_cache)  # it has weights of the comparison
            unnoticed.enter_context(_torch.inductor.without_cuda_graphs())
            facts = self.facts = _torch.graphs.examine_graph(self.eager, inputs)
            with_gradients = trains and not facts.has_subclasses
            names = [node.name for node in self.eager.graph.find_nodes(op="placeholder")]
            runs = _Runs(inputs, names, facts, with_gradients, before, uninitialized_outputs(self.eager))
            runs.check_memory(device)
            expected = runs.run(self.eager.forward)
            # Two sets of gradients may not fit into the memory of a GPU.
            expected |= {name: value.cpu() for name, value in expected.items() if name.startswith(GRADIENT)}
            drew = before.drawn()
            if drew and not self.options.get("fallback_random", _torch.inductor.settings().fallback_random):
                named = any("dropout" in f"{node.target} {node.kwargs}" for node in self.eager.graph.nodes)
                return not_compared("dropout" if named else "random numbers")
            try:
                actual = runs.run(self.compiled)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                return error

            def in_double() -> dict[str, torch.Tensor]:
                if drew:
                    raise ValueError("it would draw other random numbers")
                runs.check_memory(device, factor=2)
                return runs.run(copy.deepcopy(self.eager).double().forward, double=True)

            comparison = accuracy.compare_results(expected, actual, accuracy.tolerance(facts.dtypes, device), in_double)
        outputs_only = comparison.result == "equal" and trains and not with_gradients
        return replace(comparison, result="outputs only") if outputs_only else comparison


@dataclass(eq=False)
class _Runs:
    """Runs a graph several times on the same inputs."""

    inputs: Sequence[Any]
    names: Sequence[str]
    facts: _torch.graphs.GraphFacts
    with_gradients: bool
    before: Snapshot
    uninitialized: Collection[int]  # positions of outputs
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the outputs of the first run

    def check_memory(self, device: torch.device, factor: int = 1) -> None:
        """Raise an error if a run may need more than the free memory, because the user's process would run out."""
        facts, needed = self.facts, self.facts.peak_bytes
        if self.with_gradients:  # an upper bound, because eager execution does not save all values
            # Outputs have copies and random gradients. A backward operator may need two more values.
            needed = sum(facts.value_bytes) + 2 * max(facts.value_bytes, default=0) + 3 * facts.output_bytes
            needed += sum(x.nbytes for x in self.inputs if isinstance(x, torch.Tensor) and x.requires_grad)
        needed += 2 * sum(self.inputs[position].nbytes for position in facts.written)
        mib, free = (factor * needed + accuracy.COMPARISON_BYTES) / 2**20, free_memory(device)
        if free is not None and mib > free / 2**20:
            raise torch.OutOfMemoryError(f"the comparison may need {mib:,.0f} of {free / 2**20:,.0f} free MiB")

    def run(self, function: Callable[..., Any], *, double: bool = False) -> dict[str, torch.Tensor]:
        """Run a function on aliases of the inputs. Return outputs, changed inputs and gradients by name."""
        self.before.restore()
        arguments, leaves = self._arguments(double)
        # In the grad mode of the call: without gradients, no argument requires grad, but the graph may need the mode.
        with _torch.autograd.restored_after_error(), _torch.graphs.computing_in_double(double):
            outputs = function(*arguments)
            initialized = [(i, output) for i, output in enumerate(outputs) if i not in self.uninitialized]
            tensors = {f"output {i}": output for i, output in initialized if isinstance(output, torch.Tensor)}
            changed = {self.names[position]: arguments[position] for position in sorted(self.facts.written)}
            # Copied before the backward pass, because an activation checkpoint writes to them again.
            copies = {name: tensor.detach().clone() for name, tensor in changed.items()}
            gradients = self._gradients(tensors | changed, leaves)
        return {name: tensor.detach() for name, tensor in tensors.items()} | copies | gradients

    def _gradients(self, tensors: Tensors, leaves: Tensors) -> dict[str, torch.Tensor]:
        """Return the gradients of leaves for random gradients of the outputs, which are the same in each run."""
        outputs = {name: tensor for name, tensor in tensors.items() if leaves and tensor.requires_grad}
        cotangents = []
        for seed, (name, tensor) in enumerate(outputs.items()):
            # Random, because ones have no gradient through a softmax. The float64 run gets the same rounded values.
            generator = torch.Generator(tensor.device).manual_seed(seed)
            random = torch.randn(tensor.shape, device=tensor.device, generator=generator)
            cotangents.append(random.to(self.dtypes.setdefault(name, tensor.dtype)).to(tensor.dtype))
        if not outputs:
            return {}
        gradients = torch.autograd.grad(
            list(outputs.values()), list(leaves.values()), cotangents, materialize_grads=True
        )
        return dict(zip(leaves, gradients, strict=True))

    def _arguments(self, double: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """Return aliases of the inputs, with clones of written inputs, and the leaves of autograd's graph by name."""
        arguments, leaves = list(self.inputs), dict[str, torch.Tensor]()
        copies, bases = dict[int, Any](), dict[int, torch.Tensor]()  # copies of what shares memory share memory
        for position, value in enumerate(self.inputs):
            if not isinstance(value, torch.Tensor):
                continue
            dtype = _torch.graphs.DOUBLE_OF.get(value.dtype, value.dtype) if double else value.dtype
            argument = value.detach().to(dtype)
            if written := position in self.facts.written:
                # AOTAutograd reads the base of inputs that share memory, so clone a view as a view of the cloned base.
                base = value if value._base is None else value._base
                argument = bases.setdefault(id(base), copy.deepcopy(base.detach(), copies).to(dtype))
                if value is not base:
                    offset = argument.storage_offset() + value.storage_offset() - base.storage_offset()
                    argument = argument.as_strided(value.size(), value.stride(), offset)
            if self.with_gradients and value.requires_grad:
                leaves[GRADIENT + self.names[position]] = argument.requires_grad_()
                argument = argument.clone() if written else argument  # autograd forbids in-place changes of leaves
            arguments[position] = argument
        return arguments, leaves
