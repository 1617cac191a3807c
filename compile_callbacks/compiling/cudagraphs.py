"""CUDA graphs reuse their memory at the next step: what outlives a step is copied out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def with_lasting_outputs(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, a graph's compiled function, with outputs that the next step does not overwrite.

    Predictions, validation outputs and logged values are kept for longer than a step; torch raises
    ``accessing tensor output of CUDAGraphs that has been overwritten`` where one is looked at later. An output
    that is an input, or a view of one, is handed out as it is.
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


class LastingGradients:
    """Copies gradients out of CUDA-graph memory, for where they outlive the step that made them.

    The first backward of an accumulation leaves graph memory in ``.grad``, and the next step would overwrite
    it. Later backwards add to the copy in place, so there is one copy an optimizer step.
    """

    def __init__(self) -> None:
        self._own: dict[int, int] = {}

    def keep(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Copy the gradients that are not copies already."""
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
    """Drop the gradients of an earlier step that a later one has overwritten.

    Where an exception ends a run within a step, they are still there, and torch raises an error of its own when the
    module is moved off the GPU, in the place of the exception.
    """
    for parameter in parameters:
        try:
            _ = parameter.grad is not None and parameter.grad.data_ptr()
        except RuntimeError as error:
            if "CUDAGraphs" in str(error):  # others have no address, such as sparse ones
                parameter.grad = None


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
