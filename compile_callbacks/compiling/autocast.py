"""Runs a target under the autocast of its settings, whose dtype does not leave it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.compiling.targets import Target
from compile_callbacks.settings.config import InductorConfig


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
        self._config = config
        self._uncompiled = uncompiled
        self._output_dtypes: dict[Any, OutputDtypes] = {}

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call under autocast."""
        return functools.partial(self._call, call)

    def _call(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = device_type(self._target.module, tensors)
        dtypes = self._dtypes_without_it(device, tensors, args, kwargs) if self._config.autocast_enabled else None
        with autocast_of(self._config, device):
            outputs = call(*args, **kwargs)
        return outputs if dtypes is None else in_dtypes(outputs, dtypes)

    def _dtypes_without_it(self, device: str, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> OutputDtypes:
        module = self._target.module
        outer = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = weight_dtype(module), outer, module.training, tuple(tensor.dtype for tensor in tensors)
        if key not in self._output_dtypes:
            with self._uncompiled():
                self._output_dtypes[key] = output_dtypes(self._target, args, kwargs)
        return self._output_dtypes[key]


@dataclass(frozen=True)
class OutputDtypes:
    """The dtypes of what a target returns.

    Attributes:
        each: Those of the tensors, in order; ``None`` where they are not known.
        otherwise: The dtype of the weights.
    """

    each: list[torch.dtype] | None
    otherwise: torch.dtype


def output_dtypes(target: Target, args: Any, kwargs: Any) -> OutputDtypes:
    """The dtypes of what a target returns under the autocast that is in effect, without running it on data."""
    each = None
    if target.why_not_twice() is None:
        each = _torch.output_dtypes(target.module, target.eager, args, kwargs)
    return OutputDtypes(each, weight_dtype(target.module))


def in_dtypes(outputs: Any, dtypes: OutputDtypes) -> Any:
    """Nested outputs with each tensor of floating point in its dtype."""
    count = sum(isinstance(leaf, torch.Tensor) for leaf in _torch.tree_leaves(outputs))
    known = dtypes.each is not None and len(dtypes.each) == count
    remaining = iter(dtypes.each if known else [dtypes.otherwise] * count)  # type: ignore[arg-type]

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        dtype = next(remaining)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _torch.tree_map_tensors(cast, outputs)


class CurrentAutocast:
    """The autocast that is in effect where this is made, for later."""

    def __init__(self) -> None:
        devices = ("cpu", "cuda")
        self._states = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same autocast, whatever is in effect there."""
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in self._states:
                if enabled != torch.is_autocast_enabled(device) or enabled:
                    stack.enter_context(torch.autocast(device, dtype, enabled=enabled))
            yield


def autocast_of(config: InductorConfig, device: str) -> AbstractContextManager[None]:
    """The autocast that a config sets, for a device type; the one that is in effect where it sets none."""
    if config.autocast_enabled is None:
        return contextlib.nullcontext()
    dtype = config.autocast_dtype or torch.get_autocast_dtype(device)
    context: AbstractContextManager[None] = torch.autocast(device, dtype, enabled=config.autocast_enabled)
    return context


def weight_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of a module's first weight of floating point; float32 where it has none."""
    return next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), torch.float32)


def device_type(module: nn.Module, tensors: Sequence[torch.Tensor]) -> str:
    """The type of the device that a call with these inputs computes on."""
    first = next(iter(tensors), None)
    if first is None:
        first = next(module.parameters(), None)
    return "cpu" if first is None else first.device.type
