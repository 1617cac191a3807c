"""What a module is called with, taken out of a batch: `ExampleCall`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.measuring.timing import call_times_ms


class ExampleCall(NamedTuple):
    """What a module is called with.

    Attributes:
        args: Inputs by position.
        kwargs: Inputs by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> ExampleCall:
        """A tuple of positional inputs, a mapping of inputs by name, or a single one."""
        if isinstance(inputs, tuple):
            return cls(inputs, {})
        return cls((), dict(inputs)) if isinstance(inputs, Mapping) else cls((inputs,), {})

    @classmethod
    def of_batch(cls, batch: Any, module: nn.Module) -> ExampleCall:
        """The inputs that are in a batch.

        A tensor is one; of a tuple or list it is the first element; of a mapping it is the entries that ``forward``
        names as parameters, by name, or the mapping itself where it names none.
        """
        if isinstance(batch, Mapping):
            parameters = inspect.signature(module.forward).parameters
            takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
            named = {name: value for name, value in batch.items() if takes_all or name in parameters}
            return cls((), named) if named else cls((batch,), {})
        first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        return cls((first,), {})

    def on(self, device: torch.device) -> ExampleCall:
        """The same on a device."""
        args, kwargs = _torch.tree_map_tensors(lambda tensor: tensor.to(device), tuple(self))
        return ExampleCall(args, kwargs)

    def times_ms(self, callee: Callable[..., Any], device: torch.device) -> tuple[float, ...]:
        """How long it takes, time by time, in milliseconds."""
        return call_times_ms(lambda: callee(*self.args, **self.kwargs), cuda=device.type == "cuda")
