"""Runs a target under the autocast of its settings, whose dtype does not leave it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.config import InductorConfig
from compile_callbacks.targets import Target


class ConfiguredAutocast:
    """The autocast that a config sets, around calls of a target.

    It is the innermost one, and wins over that of a Trainer's precision. Where it is enabled, outputs come back in the
    dtype that the target gives without it: whoever calls the target sees no difference. To know that dtype, the target
    is run once for each combination of input dtypes on tensors without data; where that cannot be done, and for a
    target that is not to be called more often than the user calls it, it is the dtype of the weights.

    Args:
        target: What is called.
        config: The settings; ``autocast_enabled`` must not be ``None``.
        uncompiled: A context in which targets inside the target run uncompiled.
    """

    def __init__(
        self, target: Target, config: InductorConfig, uncompiled: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._target = target
        self._enabled = bool(config.autocast_enabled)
        self._dtype = config.autocast_dtype
        self._uncompiled = uncompiled
        self._output_dtypes: dict[Any, list[torch.dtype] | None] = {}

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call under autocast."""
        return functools.partial(self._call, call)

    def _call(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        weights = self._target.module.parameters()
        first = next((t for t in (*weights, *tensors) if t.is_floating_point()), None)
        device = (tensors[0] if tensors else first if first is not None else torch.empty(())).device.type
        under = torch.autocast(device, self._dtype or torch.get_autocast_dtype(device), enabled=self._enabled)
        if not self._enabled:
            with under:
                return call(*args, **kwargs)
        weight_dtype = torch.float32 if first is None else first.dtype
        dtypes = self._dtypes_without_it(device, weight_dtype, tensors, args, kwargs)
        with under:
            outputs = call(*args, **kwargs)
        return _cast(outputs, dtypes, weight_dtype)

    def _dtypes_without_it(
        self, device: str, weight_dtype: torch.dtype, tensors: list[torch.Tensor], args: Any, kwargs: Any
    ) -> list[torch.dtype] | None:
        """The dtypes of the tensors among the outputs; ``None`` where they are not known."""
        outer = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = weight_dtype, outer, self._target.module.training, tuple(tensor.dtype for tensor in tensors)
        if key not in self._output_dtypes:
            found = None
            if self._target.why_not_twice() is None:
                with self._uncompiled():
                    found = _torch.output_dtypes(self._target.module, self._target.eager, args, kwargs)
            self._output_dtypes[key] = found
        return self._output_dtypes[key]


def _cast(outputs: Any, dtypes: list[torch.dtype] | None, otherwise: torch.dtype) -> Any:
    count = sum(isinstance(leaf, torch.Tensor) for leaf in _torch.tree_leaves(outputs))
    remaining = iter(dtypes if dtypes is not None and len(dtypes) == count else [otherwise] * count)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        dtype = next(remaining)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _torch.tree_map_tensors(cast, outputs)
