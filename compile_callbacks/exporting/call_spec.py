"""What a package takes: the inputs of the call that was exported, written into it and checked at each call.

What AOTInductor compiles checks nothing: an image of another size, another dtype or another memory layout gives
numbers without a meaning, or ends the process.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from inspect import Parameter, Signature
from typing import Any

import torch

from compile_callbacks import _torch

_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_RANKS = {"channels_last": 4, "channels_last_3d": 5}


@dataclass(frozen=True, kw_only=True)
class TensorInput:
    """A tensor that a package takes.

    Attributes:
        dtype: Its dtype, ``"float32"``.
        shape: Its sizes; ``None`` for the batch size, which may change from call to call.
        device: The type of its device.
        memory_format: Its layout: ``"contiguous"``, ``"channels_last"`` or ``"channels_last_3d"``.
    """

    dtype: str
    shape: tuple[int | None, ...]
    device: str
    memory_format: str

    def __str__(self) -> str:
        """The input in a few words: ``float32 (batch, 1, 8, 8)``."""
        return f"{self.dtype} ({', '.join('batch' if size is None else str(size) for size in self.shape)})"


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """The inputs of a package.

    Attributes:
        signature: The parameters of ``forward`` that the exported call gave, and none of those that it left out.
        inputs: By name (``"x"``, ``"x['mask']"``), in the order in which a package takes them: a tensor, or the
            ``repr`` of what is no tensor, whose value is part of the package.
    """

    signature: Signature
    inputs: Mapping[str, TensorInput | str]

    @classmethod
    def of(
        cls, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], batch: int | None
    ) -> CallSpec:
        """Describe a call.

        Args:
            call: What is called.
            args: Inputs by position.
            kwargs: Inputs by name.
            batch: The batch size that may change; ``None`` where none may.

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
        # Behind a parameter that was left out, one can be given by name alone.
        signature = Signature([*by_position, *(Parameter(name, Parameter.KEYWORD_ONLY) for name in bound.kwargs)])
        leaves = _leaves(signature.bind(*bound.args, **bound.kwargs))
        return cls(signature=signature, inputs={name: _describe(leaf, batch) for name, leaf in leaves})

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The inputs of a call, by position and by name as they were exported.

        Raises:
            TypeError: Inputs are missing, or too many.
        """
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{error}; the package takes {self}") from None

    def tensors(self, bound: inspect.BoundArguments) -> list[torch.Tensor]:
        """The tensors of a call, in the order and layout in which a package takes them.

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
        """The tensors of a call whose dimension 0 is the batch."""
        return [leaf for name, leaf in _leaves(bound) if has_batch(self.inputs[name])]

    def to_json(self) -> str:
        """The description as text, for a package."""
        inputs = {name: value if isinstance(value, str) else asdict(value) for name, value in self.inputs.items()}
        kinds = {name: parameter.kind.name for name, parameter in self.signature.parameters.items()}
        return json.dumps({"parameters": kinds, "inputs": inputs})

    @classmethod
    def from_json(cls, text: str) -> CallSpec:
        """The description that `to_json` wrote."""
        data = json.loads(text)
        return cls(
            signature=Signature(
                [Parameter(name, getattr(Parameter, kind)) for name, kind in data["parameters"].items()]
            ),
            inputs={
                name: value if isinstance(value, str) else TensorInput(**{**value, "shape": tuple(value["shape"])})
                for name, value in data["inputs"].items()
            },
        )

    def __str__(self) -> str:
        """The inputs in a line: ``images: float32 (batch, 1, 8, 8), scale=2.0``."""
        return ", ".join(
            f"{name}={value}" if isinstance(value, str) else f"{name}: {value}" for name, value in self.inputs.items()
        )


def has_batch(described: TensorInput | str) -> bool:
    """Whether an input is a tensor whose size may change from call to call."""
    return isinstance(described, TensorInput) and None in described.shape


def in_own_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an example, in the layout that a package is to take it in."""
    return tensor.detach().clone(memory_format=_FORMATS[_memory_format_of(tensor)])


def _memory_format_of(tensor: torch.Tensor) -> str:
    """The layout of an example, where it has one of the three."""
    if not tensor.is_contiguous():
        for name, rank in _RANKS.items():
            if tensor.dim() == rank and tensor.is_contiguous(memory_format=_FORMATS[name]):
                return name
    return "contiguous"


def _leaves(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    for name, value in bound.arguments.items():
        if isinstance(value, torch.Tensor):  # by far the most frequent, and not worth a walk
            yield name, value
        else:
            yield from ((name + path, leaf) for path, leaf in _torch.named_leaves(value))


def _describe(leaf: Any, batch: int | None) -> TensorInput | str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    sizes: list[int | None] = list(leaf.shape)
    if sizes and sizes[0] == batch:
        sizes[0] = None
    return TensorInput(
        dtype=_dtype_name(leaf.dtype),
        shape=tuple(sizes),
        device=leaf.device.type,
        memory_format=_memory_format_of(leaf),
    )


def _check(name: str, expected: TensorInput, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"input {name!r} must be a tensor, not {type(value).__name__}; the package takes {expected}")
    if _dtype_name(value.dtype) != expected.dtype:
        raise TypeError(f"input {name!r} is of dtype {_dtype_name(value.dtype)}; the package takes {expected}")
    if value.device.type != expected.device:
        raise ValueError(f"input {name!r} is on {value.device.type}, and the package runs on {expected.device}")
    if len(value.shape) != len(expected.shape) or any(
        size not in (None, own) for size, own in zip(expected.shape, value.shape, strict=True)
    ):
        raise ValueError(f"input {name!r} has the shape {tuple(value.shape)}; the package takes {expected}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
