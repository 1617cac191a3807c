"""Steps on a GPU: copies of what outlives a step, because CUDA graphs reuse their memory; backward in one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from compile_callbacks import _torch


def with_warmup_repair(
    compiled: Callable[..., Any], device: torch.device, on_repair: Callable[[], None]
) -> Callable[..., Any]:
    """Wrap the compiled function of a graph so that it runs after an earlier CUDA graph has raised in its warm-up.

    The earlier call may have been of another graph, or a backward pass, and the user may have caught the exception to
    skip a batch. Asking before each call takes less than 1 µs.

    Args:
        compiled: Called with the graph's inputs.
        device: The device that the graph runs on.
        on_repair: Called after a repair.
    """
    index = torch.cuda.current_device() if device.index is None else device.index

    def call(*inputs: Any) -> Any:
        if _torch.inductor.end_failed_warmup(index):
            on_repair()
        return compiled(*inputs)

    return call


def with_cloned_outputs(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the compiled function of a graph so that the next step does not overwrite its outputs.

    Users keep predictions, validation outputs and logged values for longer than a step. Without a copy, torch raises
    ``accessing tensor output of CUDAGraphs that has been overwritten`` when they read one later. An output that is an
    input, or a view of one, is not copied.
    """
    owned: list[int] | None = None  # positions of outputs in graph memory: the same in every call of one graph

    def call(*inputs: Any) -> Any:
        nonlocal owned
        outputs = list(compiled(*inputs))
        if owned is None:
            of_inputs = {_storage(value) for value in inputs if _is_cuda(value)}
            owned = [i for i, value in enumerate(outputs) if _is_cuda(value) and _storage(value) not in of_inputs]
        for position in owned:
            outputs[position] = outputs[position].clone()
        return outputs

    return call


class GradientCopies:
    """Copies gradients out of CUDA-graph memory if they outlive the step that computed them.

    The first backward of an accumulation leaves graph memory in ``.grad``, and the next step would overwrite it. Later
    backwards add to the copy in place, so there is one copy for each optimizer step.
    """

    def __init__(self) -> None:
        self._own: dict[int, int] = {}

    def keep(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Copy each gradient that is not a copy yet."""
        fresh = [
            p for p in parameters if p.grad is not None and p.grad.is_cuda and self._own.get(id(p)) != p.grad.data_ptr()
        ]
        if not fresh:
            return
        gradients = [p.grad for p in fresh if p.grad is not None]
        copies = [torch.empty_like(gradient) for gradient in gradients]
        torch._foreach_copy_(copies, gradients)
        for parameter, copy in zip(fresh, copies, strict=True):
            parameter.grad = copy
            self._own[id(parameter)] = copy.data_ptr()


def drop_overwritten_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Delete the gradients of an earlier step that a later step has overwritten.

    They remain if an exception ends a run within a step. When Lightning moves the module off the GPU, torch would then
    raise another error, which hides the exception.
    """
    for parameter in parameters:
        try:
            _ = parameter.grad is not None and parameter.grad.data_ptr()
        except RuntimeError as error:
            if "CUDAGraphs" in str(error):  # other gradients without an address, such as sparse ones, stay
                parameter.grad = None


class BackwardInCallingThread:
    """Between `begin` and `end`, backward passes that this thread starts run in this thread.

    Autograd runs the backward pass of each GPU in a thread of its own, while the calling thread waits. Each step then
    switches threads twice, to a core without the step's data in its caches. In CPU-bound steps that is a fifth of the
    time (``benchmarks/overhead.py``). Results are the same (``torch.autograd.set_multithreading_enabled``).
    """

    def __init__(self) -> None:
        self._off: torch.autograd.set_multithreading_enabled | None = None

    def begin(self) -> None:
        """Start, unless this or another callback of the trainer has started."""
        if torch.autograd.is_multithreading_enabled():
            self._off = torch.autograd.set_multithreading_enabled(False)  # takes effect when constructed

    def end(self) -> None:
        """Restore what was set before `begin`."""
        if self._off is not None:
            self._off.__exit__(None, None, None)
            self._off = None


class StepsOnGpu:
    """The steps of a session: what they need if the module is on a GPU. On other devices, all methods do nothing.

    Args:
        module: The root module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.active = False
        """Whether the module is on a GPU."""
        self._module = module
        self._several_devices = False
        self._gradients = GradientCopies()
        self._backward_thread = BackwardInCallingThread()

    def begin(self, device: torch.device) -> None:
        """Begin a Trainer run on a device."""
        self.active = device.type == "cuda"
        self._several_devices = len({weight.device for weight in self._module.parameters()}) > 1

    def step_begins(self, *, trains_compiled: bool) -> None:
        """Begin a step.

        Args:
            trains_compiled: Whether it is a training step that runs compiled.
        """
        if self.active:
            torch.compiler.cudagraph_mark_step_begin()
            if trains_compiled and not self._several_devices:
                self._backward_thread.begin()

    def step_ends(self) -> None:
        """End a step."""
        if self.active:
            self._backward_thread.end()

    def keep_gradients(self) -> None:
        """Copy the gradients that are in the memory of CUDA graphs."""
        self._gradients.keep(self._module.parameters())

    def end(self) -> None:
        """End the run, also after an exception within a step."""
        self._backward_thread.end()
        if self.active:
            drop_overwritten_gradients(self._module.parameters())


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
