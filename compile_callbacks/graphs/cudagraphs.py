"""Makes CUDA graphs work with a Trainer. The backend and the session call these functions and objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.graphs.failures import EagerFallback
from compile_callbacks.profiling.compile_events import CompileKey


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


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
