"""Makes CUDA graphs work with a Trainer. The backend and the session call these functions and objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.profiling.compile_events import CompileKey
from compile_callbacks.runtime.fallback import EagerFallback


def with_warmup_repair(
    compiled: Callable[..., Any], device: torch.device, key: CompileKey, fallback: EagerFallback
) -> Callable[..., Any]:
    """Wrap a compiled graph so that it still runs after the first run of a CUDA graph raised an exception.

    Another graph or a backward pass may have raised the exception, and the user may have caught it to skip a batch.
    The check before each call takes less than 1 µs.
    """
    index = torch.cuda.current_device() if device.index is None else device.index

    def call(*inputs: Any) -> Any:
        if _torch.inductor.end_failed_warmup(index):
            message = (
                f"target {key.target!r} ({key.phase} phase): the first run of a CUDA graph raised an exception before "
                "this call, such as OutOfMemoryError; torch runs and records that graph again at its next call"
            )
            fallback.warn_after_call("CC305", message)
        return compiled(*inputs)

    return call


def with_cloned_outputs(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled graph so that the next step does not overwrite its outputs.

    Users keep predictions, validation outputs and logged values for longer than a step. Without a copy, torch raises
    ``accessing tensor output of CUDAGraphs that has been overwritten`` when they read such a tensor later. The wrapper
    does not copy an output that is an input or a view of an input.
    """
    owned: list[int] | None = None  # positions of outputs in CUDA graph memory, which are the same in each call

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


class StepsOnGpu:
    """Prepares the steps of a session for CUDA graphs. If the module is not on a GPU, all methods do nothing.

    Backward passes of compiled training steps run in the thread that starts them. By default, autograd runs the
    backward pass of each GPU in a separate thread, while the calling thread waits. Each step then switches twice to a
    core whose caches do not have the step's data. In CPU-bound steps on an H200, the switches took a fifth of the time.
    ``torch.autograd.set_multithreading_enabled`` does not change results.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.on_gpu = False
        """Whether the module is on a GPU."""
        self._module = module
        self._several_devices = False
        self._copies: dict[int, int] = {}  # the addresses of copied gradients, by the id of the parameter
        self._one_thread: torch.autograd.set_multithreading_enabled | None = None

    def begin(self, device: torch.device) -> None:
        """Begin a Trainer run on a device."""
        self.on_gpu = device.type == "cuda"
        self._several_devices = len({weight.device for weight in self._module.parameters()}) > 1

    def step_begins(self, *, trains_compiled: bool) -> None:
        """Begin a step."""
        if self.on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
            # Another callback of the trainer may have changed the setting already.
            if trains_compiled and not self._several_devices and torch.autograd.is_multithreading_enabled():
                self._one_thread = torch.autograd.set_multithreading_enabled(False)  # the constructor changes it

    def step_ends(self) -> None:
        """End a step, also after an exception within the step."""
        if self._one_thread is not None:
            self._one_thread.__exit__(None, None, None)
            self._one_thread = None

    def keep_gradients(self) -> None:
        """Copy gradients out of the memory of CUDA graphs, because they outlive the step that computed them.

        After the first backward pass of an accumulation, ``.grad`` is in CUDA graph memory, which the next step would
        overwrite. Later backward passes add to the copy in place, so each optimizer step needs one copy.
        """
        on_gpu = [(p, p.grad) for p in self._module.parameters() if p.grad is not None and p.grad.is_cuda]
        new = [(p, gradient) for p, gradient in on_gpu if self._copies.get(id(p)) != gradient.data_ptr()]
        if not new:
            return
        copies = [torch.empty_like(gradient) for _, gradient in new]
        torch._foreach_copy_(copies, [gradient for _, gradient in new])
        for (parameter, _), copy in zip(new, copies, strict=True):
            parameter.grad = copy
            self._copies[id(parameter)] = copy.data_ptr()

    def end(self) -> None:
        """End the run, also after an exception within a step."""
        self.step_ends()
        if not self.on_gpu:
            return
        # After an exception within a step, gradients may be in memory that a later graph has overwritten. If Lightning
        # moved the module off the GPU now, torch would raise another error, which would hide the exception.
        for parameter in self._module.parameters():
            try:
                _ = parameter.grad is not None and parameter.grad.data_ptr()
            except RuntimeError as error:
                if "CUDAGraphs" in str(error):  # sparse gradients have no address either
                    parameter.grad = None


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
