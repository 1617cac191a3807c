"""The inputs of an exported call: written into the package, and checked at each call of it.

AOTInductor's code checks nothing: for an input of another shape, dtype or memory layout it returns wrong numbers or
crashes the process.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from compile_callbacks.config.options import dtype_name
from compile_callbacks.profiling.spans import call_times_ms

_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_RANKS = {"channels_last": 4, "channels_last_3d": 5}


@dataclass(frozen=True, kw_only=True)
class TensorInput:
    """A tensor input of a package.

    Attributes:
        dtype: The dtype, ``"float32"``.
        shape: The sizes; ``None`` for the batch size, which may change from call to call.
        device: The type of the device.
        memory_format: The layout: ``"contiguous"``, ``"channels_last"`` or ``"channels_last_3d"``.
    """

    dtype: str
    shape: tuple[int | None, ...]
    device: str
    memory_format: str

    def __str__(self) -> str:
        """Describe the input: ``float32 (batch, 1, 8, 8)``."""
        return f"{self.dtype} ({', '.join('batch' if size is None else str(size) for size in self.shape)})"


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """The inputs of a package.

    Attributes:
        signature: The parameters of ``forward`` that the exported call passed, without those that it left out.
        inputs: The inputs by name (``"x"``, ``"x['mask']"``), in the order of the package: a tensor, or the ``repr``
            of any other value, which is constant in the package.
    """

    signature: Signature
    inputs: Mapping[str, TensorInput | str]

    @classmethod
    def of(
        cls, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], batch: int | None
    ) -> CallSpec:
        """Describe a call.

        Args:
            call: The callable.
            args: Inputs by position.
            kwargs: Inputs by name.
            batch: The batch size, if it may change from call to call.

        Raises:
            TypeError: The inputs do not fit the signature.
        """
        bound = inspect.signature(call).bind(*args, **kwargs)
        kinds = {name: bound.signature.parameters[name].kind for name in bound.arguments}
        by_position = [
            Parameter(name, kind)
            for name, kind in kinds.items()
            if name not in bound.kwargs and kind is not Parameter.VAR_KEYWORD
        ]
        # A parameter behind one that was left out can only be passed by name.
        signature = Signature([*by_position, *(Parameter(name, Parameter.KEYWORD_ONLY) for name in bound.kwargs)])
        leaves = _leaves(signature.bind(*bound.args, **bound.kwargs))
        return cls(signature=signature, inputs={name: _describe(leaf, batch) for name, leaf in leaves})

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Bind the inputs of a call to the parameters of the exported call.

        Raises:
            TypeError: Inputs are missing, or too many.
        """
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{error}; the package takes {self}") from None

    def tensors(self, bound: inspect.BoundArguments) -> list[torch.Tensor]:
        """Return the tensors of a call in the order and layout of the package.

        Raises:
            TypeError: An input of another dtype or kind, or of another structure.
            ValueError: An input of another shape, on another device, or with another value than it was exported with.
        """
        leaves = dict(_leaves(bound))
        if leaves.keys() != self.inputs.keys():
            odd = min(leaves.keys() ^ self.inputs.keys())
            what = "was not exported" if odd in leaves else "is missing"
            raise TypeError(f"input {odd!r} {what}; the package takes {self}")
        batches: dict[int, str] = {}
        found = []
        for name, expected in self.inputs.items():
            value = leaves[name]
            if isinstance(expected, str):
                if isinstance(value, torch.Tensor) or repr(value) != expected:
                    given = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                    raise ValueError(f"input {name!r} is {given}, and was exported as {expected}")
                continue
            _check(name, expected, value)
            if has_batch(expected):
                batches.setdefault(value.shape[0], name)
            found.append(value.contiguous(memory_format=_FORMATS[expected.memory_format]))
        if len(batches) > 1:
            each = " and ".join(f"{size} in {name!r}" for size, name in batches.items())
            raise ValueError(f"the inputs are batches of different sizes: {each}")
        return found

    def batches(self, bound: inspect.BoundArguments) -> list[torch.Tensor]:
        """Return the tensors of a call whose dimension 0 is the batch."""
        return [leaf for name, leaf in _leaves(bound) if has_batch(self.inputs[name])]

    def to_json(self) -> str:
        """Return the description as JSON, for a package."""
        inputs = {name: value if isinstance(value, str) else asdict(value) for name, value in self.inputs.items()}
        kinds = {name: parameter.kind.name for name, parameter in self.signature.parameters.items()}
        return json.dumps({"parameters": kinds, "inputs": inputs})

    @classmethod
    def from_json(cls, text: str) -> CallSpec:
        """Read the description that `to_json` wrote.

        Raises:
            ValueError: A value that `to_json` does not write. Other text raises a ``TypeError``, ``KeyError`` or
                ``AttributeError`` too.
        """
        data = json.loads(text)
        return cls(
            signature=Signature(
                [Parameter(name, getattr(Parameter, kind)) for name, kind in data["parameters"].items()]
            ),
            inputs={name: _input_from_data(value) for name, value in data["inputs"].items()},
        )

    def __str__(self) -> str:
        """Describe the inputs in one line: ``images: float32 (batch, 1, 8, 8), scale=2.0``."""
        return ", ".join(
            f"{name}={value}" if isinstance(value, str) else f"{name}: {value}" for name, value in self.inputs.items()
        )


class ExampleCall(NamedTuple):
    """The inputs of one call of a module.

    Attributes:
        args: Inputs by position.
        kwargs: Inputs by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> ExampleCall:
        """Take a tuple of positional inputs, a mapping of inputs by name, or a single input."""
        if isinstance(inputs, tuple):
            return cls(inputs, {})
        return cls((), dict(inputs)) if isinstance(inputs, Mapping) else cls((inputs,), {})

    @classmethod
    def of_batch(cls, batch: Any, module: nn.Module) -> ExampleCall:
        """Take the inputs from a batch.

        A tensor is the input. A tuple or list: its first element. A mapping: the entries that are parameters of
        ``forward``, by name, or the mapping itself if none is.
        """
        if isinstance(batch, Mapping):
            parameters = inspect.signature(module.forward).parameters
            takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
            named = {name: value for name, value in batch.items() if takes_all or name in parameters}
            return cls((), named) if named else cls((batch,), {})
        first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        return cls((first,), {})

    def on(self, device: torch.device) -> ExampleCall:
        """Copy the inputs to a device."""
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tuple(self))
        return ExampleCall(args, kwargs)

    def times_ms(self, callee: Callable[..., Any], device: torch.device) -> tuple[float, ...]:
        """Measure repeated calls, in milliseconds each."""
        return call_times_ms(lambda: callee(*self.args, **self.kwargs), device=device)


def has_batch(described: TensorInput | str) -> bool:
    """Whether an input is a tensor with a batch dimension that may change from call to call."""
    return isinstance(described, TensorInput) and None in described.shape


def _input_from_data(data: Any) -> TensorInput | str:
    if isinstance(data, str):
        return data
    found = TensorInput(**{**data, "shape": tuple(data["shape"])})
    sizes = all(size is None or type(size) is int for size in found.shape)
    if not (sizes and isinstance(found.dtype, str) and isinstance(found.device, str)):
        raise ValueError(f"an input is described by {data!r}")
    if found.memory_format not in _FORMATS:
        raise ValueError(f"an input has the memory format {found.memory_format!r}")
    return found


def in_own_layout(tensor: torch.Tensor) -> torch.Tensor:
    """Copy an example, with the layout that the package will expect."""
    return tensor.detach().clone(memory_format=_FORMATS[_memory_format_of(tensor)])


def _memory_format_of(tensor: torch.Tensor) -> str:
    """Return the layout of an example; ``"contiguous"`` if it is another one."""
    if not tensor.is_contiguous():
        for name, rank in _RANKS.items():
            if tensor.dim() == rank and tensor.is_contiguous(memory_format=_FORMATS[name]):
                return name
    return "contiguous"


def _leaves(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    for name, value in bound.arguments.items():
        if isinstance(value, torch.Tensor):  # the usual case, without the overhead of a tree
            yield name, value
        else:
            leaves, _ = tree_flatten_with_path(value)
            yield from ((name + keystr(path), leaf) for path, leaf in leaves)


def _describe(leaf: Any, batch: int | None) -> TensorInput | str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    sizes: list[int | None] = list(leaf.shape)
    if sizes and sizes[0] == batch:
        sizes[0] = None
    return TensorInput(
        dtype=dtype_name(leaf.dtype),
        shape=tuple(sizes),
        device=leaf.device.type,
        memory_format=_memory_format_of(leaf),
    )


def _check(name: str, expected: TensorInput, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"input {name!r} must be a tensor, not {type(value).__name__}; the package takes {expected}")
    if dtype_name(value.dtype) != expected.dtype:
        raise TypeError(f"input {name!r} is of dtype {dtype_name(value.dtype)}; the package takes {expected}")
    if value.device.type != expected.device:
        raise ValueError(f"input {name!r} is on {value.device.type}, and the package runs on {expected.device}")
    if len(value.shape) != len(expected.shape) or any(
        size not in (None, own) for size, own in zip(expected.shape, value.shape, strict=True)
    ):
        raise ValueError(f"input {name!r} has the shape {tuple(value.shape)}; the package takes {expected}")
