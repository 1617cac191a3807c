"""Makes CUDA graphs work with a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.graphs.failures import EagerFallback


class CudaGraph:
    """Calls compiled code that records CUDA graphs.

    Users keep predictions, validation outputs and logged values for longer than a step. Without a copy, torch raises
    ``accessing tensor output of CUDAGraphs that has been overwritten`` when they read such a tensor later. An output
    that is an input or a view of an input is not copied.
    """

    def __init__(self, compiled: Callable[..., Any], device: torch.device, fallback: EagerFallback) -> None:
        self._compiled = compiled
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._fallback = fallback
        self._owned: list[int] | None = None  # positions of outputs in CUDA graph memory, the same in each call

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the compiled code. The next step does not overwrite the outputs."""
        if _torch.inductor.end_failed_warmup(self._index):  # takes less than 1 µs
            self._report_repair()
        outputs = list(self._compiled(*inputs))
        if self._owned is None:
            of_inputs = {_storage(value) for value in inputs if _is_cuda(value)}
            self._owned = [i for i, value in enumerate(outputs) if _is_cuda(value) and _storage(value) not in of_inputs]
        for position in self._owned:
            outputs[position] = outputs[position].clone()
        return outputs

    def _report_repair(self) -> None:
        """Warn that the first run of a CUDA graph raised. The user may have caught the exception to skip a batch."""
        target, phase = self._fallback.key[:2]
        message = (
            f"target {target!r} ({phase} phase): the first run of a CUDA graph raised an exception "
            "before this call, such as OutOfMemoryError; torch runs and records that graph again at its next call"
        )
        self._fallback.warn("CC305", message)


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
