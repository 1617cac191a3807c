"""What a package takes: the inputs that it was exported with, written into it and checked at each call.

What AOTInductor compiles checks nothing: an image of another size, another dtype or another memory layout gives
numbers without a meaning, or ends the process.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from compile_callbacks import _torch

_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_RANKS = {"channels_last": 4, "channels_last_3d": 5}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, kw_only=True)
class TensorInput:
    """A tensor that a package takes.

    Attributes:
        name: The parameter of ``forward``, and the indices that lead to the tensor in it: ``"x"``, ``"x['mask']"``.
        dtype: Its dtype, ``"float32"``.
        shape: Its sizes; ``None`` for the batch size, which may change from call to call.
        device: The type of its device.
        memory_format: Its layout: ``"contiguous"``, ``"channels_last"`` or ``"channels_last_3d"``.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    device: str
    memory_format: str


@dataclass(frozen=True, kw_only=True)
class ConstantInput:
    """An input that is no tensor: a package holds the value that it was exported with.

    Attributes:
        name: As in `TensorInput`.
        value: Its ``repr``.
        optional: Whether it is a default of ``forward``, which a call may leave out.
    """

    name: str
    value: str
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """The inputs of a package.

    Attributes:
        parameters: Names of ``forward``'s parameters that are given by position.
        variadic: The name of its ``*args``, if it has them.
        positional: How many inputs were given by position at the export.
        keywords: Names of those that were given by name.
        inputs: The inputs, in the order in which a package takes them.
        smallest_batch: The smallest batch size that the program is right for.
        largest_batch: The largest one; ``None`` for no limit.
    """

    parameters: tuple[str, ...]
    variadic: str | None
    positional: int
    keywords: tuple[str, ...]
    inputs: tuple[TensorInput | ConstantInput, ...]
    smallest_batch: int = 0
    largest_batch: int | None = None

    @classmethod
    def of(
        cls, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], batch: int | None = None
    ) -> CallSpec:
        """Describe a call.

        Args:
            call: What is called; its signature tells the names of the inputs.
            args: Inputs by position.
            kwargs: Inputs by name.
            batch: The batch size that may change; ``None`` where none may.

        Raises:
            TypeError: The inputs do not fit the signature.
        """
        signature = inspect.signature(call)
        bound = signature.bind(*args, **kwargs)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        parameters = tuple(name for name, kind in kinds.items() if kind in _POSITIONAL)
        variadic = next((name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL), None)
        given = {**_by_name(parameters, variadic, args), **kwargs}
        defaults = {
            name: p.default
            for name, p in signature.parameters.items()
            if name not in bound.arguments and p.default is not inspect.Parameter.empty
        }
        return cls(
            parameters=parameters,
            variadic=variadic,
            positional=len(args),
            keywords=tuple(kwargs),
            inputs=(
                *(_describe(name, leaf, batch) for name, leaf in _leaves(given)),
                *(ConstantInput(name=name, value=repr(leaf), optional=True) for name, leaf in _leaves(defaults)),
            ),
        )

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, in the order and layout in which a package takes them.

        Raises:
            TypeError: Inputs are missing, or too many, or of another dtype or kind.
            ValueError: An input of another shape, on another device, or with another value than it was exported with.
        """
        leaves = dict(_leaves(self._arguments(args, kwargs)))
        found: list[torch.Tensor] = []
        batch: tuple[str, int] | None = None
        for expected in self.inputs:
            if expected.name not in leaves:
                if isinstance(expected, ConstantInput) and expected.optional:
                    continue
                raise TypeError(f"input {expected.name!r} is missing; the package takes {self}")
            value = leaves.pop(expected.name)
            if isinstance(expected, ConstantInput):
                if repr(value) != expected.value:
                    given = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                    raise ValueError(f"input {expected.name!r} is {given}, and was exported as {expected.value}")
                continue
            batch = self._check(expected, value, batch)
            found.append(value.contiguous(memory_format=_FORMATS[expected.memory_format]))
        if leaves:
            raise TypeError(f"input {next(iter(leaves))!r} was not exported; the package takes {self}")
        return found

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The inputs of a call, those by position and those by name that were so at the export."""
        given = self._arguments(args, kwargs)
        first = list(_by_name(self.parameters, self.variadic, [None] * self.positional))
        return [given[name] for name in first], {name: given[name] for name in self.keywords}

    def with_batches(self, smallest: int, largest: int | None) -> CallSpec:
        """The same inputs, for batches of these sizes alone."""
        return replace(self, smallest_batch=smallest, largest_batch=largest)

    def to_json(self) -> str:
        """The description as text, for a package."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CallSpec:
        """The description that `to_json` wrote."""
        data = json.loads(text)
        inputs = tuple(
            TensorInput(**{**entry, "shape": tuple(entry["shape"])}) if "shape" in entry else ConstantInput(**entry)
            for entry in data["inputs"]
        )
        names = {name: tuple(data[name]) for name in ("parameters", "keywords")}
        return cls(**{**data, **names, "inputs": inputs})

    def __str__(self) -> str:
        """The inputs in a line: ``images: float32 (batch, 1, 8, 8)``."""
        return ", ".join(_shown(entry) for entry in self.inputs if not getattr(entry, "optional", False))

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self.parameters) and self.variadic is None:
            raise TypeError(f"{len(args)} inputs by position are too many; the package takes {self}")
        by_position = _by_name(self.parameters, self.variadic, args)
        if twice := by_position.keys() & kwargs.keys():
            raise TypeError(f"input {min(twice)!r} is given twice, by position and by name")
        return {**by_position, **kwargs}

    def _check(self, expected: TensorInput, value: Any, batch: tuple[str, int] | None) -> tuple[str, int] | None:
        """Refuse a tensor that a package is not for; returns the batch size and whose it is."""
        name = f"input {expected.name!r}"
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} must be a tensor, not {type(value).__name__}; the package takes {_shown(expected)}"
            )
        if _dtype_name(value.dtype) != expected.dtype:
            raise TypeError(f"{name} is of dtype {_dtype_name(value.dtype)}; the package takes {_shown(expected)}")
        if value.device.type != expected.device:
            raise ValueError(f"{name} is on {value.device.type}, and the package runs on {expected.device}")
        fits = len(value.shape) == len(expected.shape) and all(
            size in (None, own) for size, own in zip(expected.shape, value.shape, strict=True)
        )
        if not fits:
            raise ValueError(f"{name} has the shape {tuple(value.shape)}; the package takes {_shown(expected)}")
        if None not in expected.shape:
            return batch
        size = value.shape[0]
        if batch is not None and batch[1] != size:
            raise ValueError(f"{name} has a batch of {size}, and input {batch[0]!r} one of {batch[1]}")
        if size < self.smallest_batch or (self.largest_batch is not None and size > self.largest_batch):
            most = "" if self.largest_batch is None else f" to {self.largest_batch}"
            raise ValueError(
                f"{name} has a batch of {size}; the package is for batches from {self.smallest_batch}{most}"
            )
        return expected.name, size


def memory_format_of(tensor: torch.Tensor) -> str:
    """The layout that a package is to take a tensor in: that of the example, where it has one of the three."""
    if tensor.is_contiguous():
        return "contiguous"
    for name, rank in _RANKS.items():
        if tensor.dim() == rank and tensor.is_contiguous(memory_format=_FORMATS[name]):
            return name
    return "contiguous"


def in_own_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an example, in the layout that a package is to take it in."""
    return tensor.detach().clone(memory_format=_FORMATS[memory_format_of(tensor)])


def _by_name(parameters: Sequence[str], variadic: str | None, args: Sequence[Any]) -> dict[str, Any]:
    rest = (f"{variadic}[{index}]" for index in range(len(args)))
    names = [*parameters[: len(args)], *(next(rest) for _ in args[len(parameters) :])]
    return dict(zip(names, args, strict=True))


def _leaves(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if isinstance(value, torch.Tensor):  # by far the most frequent, and not worth a walk
            yield name, value
        else:
            yield from ((name + path, leaf) for path, leaf in _torch.named_leaves(value))


def _describe(name: str, leaf: Any, batch: int | None) -> TensorInput | ConstantInput:
    if not isinstance(leaf, torch.Tensor):
        return ConstantInput(name=name, value=repr(leaf))
    sizes: list[int | None] = list(leaf.shape)
    if sizes and batch is not None and sizes[0] == batch:
        sizes[0] = None
    return TensorInput(
        name=name,
        dtype=_dtype_name(leaf.dtype),
        shape=tuple(sizes),
        device=leaf.device.type,
        memory_format=memory_format_of(leaf),
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(entry: TensorInput | ConstantInput) -> str:
    if isinstance(entry, ConstantInput):
        return f"{entry.name}={entry.value}"
    sizes = ", ".join("batch" if size is None else str(size) for size in entry.shape)
    return f"{entry.name}: {entry.dtype} ({sizes})"
