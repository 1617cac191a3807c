"""Describes the inputs of a package. `export` writes the description, and each later call checks its inputs with it.

The check is necessary, because AOTInductor's code does not check its inputs. For another shape, dtype or memory layout,
the code returns wrong numbers or crashes the process.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from compile_callbacks._utils.errors import with_code

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


class Input(NamedTuple):
    """An input of a package: a tensor, or a value that is constant in the package."""

    text: str  # such as "float32 (batch, 1, 8, 8) on cpu", or the ``repr`` of a constant
    has_batch: bool = False  # whether dimension 0 is a batch whose size may change from call to call
    channels_last: bool | None = None  # whether the tensor has this memory layout; None for a constant


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """The inputs of a package."""

    signature: Signature  # the parameters of `forward` that the exported call passed
    inputs: Mapping[str, Input]  # by name, such as "x['mask']", in the order of the package

    @classmethod
    def of(
        cls, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], batch: int | None
    ) -> CallSpec:
        """Describe a call. A tensor whose dimension 0 has the size ``batch`` is a batch of any size."""
        bound = inspect.signature(call).bind(*args, **kwargs)
        by_position = [
            Parameter(name, kind)
            for name in bound.arguments
            if (kind := bound.signature.parameters[name].kind) is not Parameter.VAR_KEYWORD and name not in bound.kwargs
        ]
        # The call omitted a parameter with a default, so it passed each later parameter by name.
        signature = Signature([*by_position, *(Parameter(name, Parameter.KEYWORD_ONLY) for name in bound.kwargs)])
        inputs = {}
        for name, value in _leaves(signature.bind(*bound.args, **bound.kwargs)):
            is_tensor = isinstance(value, torch.Tensor)
            has_batch = is_tensor and is_batch(value, batch)
            inputs[name] = Input(_text(value, has_batch), has_batch, _is_channels_last(value) if is_tensor else None)
        return cls(signature=signature, inputs=inputs)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Bind the inputs of a call to the parameters of the exported call."""
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(self._mismatch(str(error))) from None

    def tensors(self, bound: inspect.BoundArguments) -> list[torch.Tensor]:
        """Check the inputs of a call, and return its tensors in the order and layout of the package."""
        leaves = dict(_leaves(bound))
        for name in sorted(leaves.keys() ^ self.inputs.keys()):
            raise TypeError(self._mismatch(f"input {name!r} {'was not exported' if name in leaves else 'is missing'}"))
        batches: dict[int, str] = {}
        tensors = []
        for name, (expected, has_batch, channels_last) in self.inputs.items():
            value = leaves[name]
            if _text(value, has_batch) != expected:
                raise ValueError(self._mismatch(f"input {name!r} is {_text(value)}"))
            if channels_last is not None:
                tensors.append(_in_layout(value, channels_last))
            if has_batch:
                batches.setdefault(value.shape[0], name)
        if len(batches) > 1:
            sizes = " and ".join(f"{size} in {name!r}" for size, name in batches.items())
            raise ValueError(self._mismatch(f"the inputs have different batch sizes, {sizes}"))
        return tensors

    def to_json(self) -> str:
        """Return the description as JSON, for a package."""
        kinds = {name: parameter.kind.name for name, parameter in self.signature.parameters.items()}
        return json.dumps({"parameters": kinds, "inputs": self.inputs})

    @classmethod
    def from_json(cls, text: str) -> CallSpec:
        """Read the description that `to_json` wrote. `read_package` handles the errors that other text raises."""
        data = json.loads(text)
        parameters = [Parameter(name, getattr(Parameter, kind)) for name, kind in data["parameters"].items()]
        inputs = {name: Input(*fields) for name, fields in data["inputs"].items()}
        return cls(signature=Signature(parameters), inputs=inputs)

    def __str__(self) -> str:
        """Describe the inputs in one line: ``images: float32 (batch, 1, 8, 8) on cpu, scale=2.0``."""
        inputs = self.inputs.items()
        return ", ".join(f"{name}{'=' if each.channels_last is None else ': '}{each.text}" for name, each in inputs)

    def _mismatch(self, problem: str) -> str:
        return with_code("CC605", f"{problem}; the package takes {self}")


def is_batch(tensor: torch.Tensor, size: int | None) -> bool:
    """Return whether dimension 0 of an example tensor is the batch of this size."""
    return tensor.dim() > 0 and tensor.shape[0] == size


def copy_in_package_layout(tensor: torch.Tensor) -> torch.Tensor:
    """Copy an example tensor to the memory layout that the package will expect."""
    return _in_layout(tensor.detach(), _is_channels_last(tensor)).clone()


def _is_channels_last(tensor: torch.Tensor) -> bool:
    layout = _CHANNELS_LAST.get(tensor.dim())
    return layout is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)


def _in_layout(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    return tensor.contiguous(memory_format=_CHANNELS_LAST[tensor.dim()] if channels_last else torch.contiguous_format)


def _text(value: Any, has_batch: bool = False) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    sizes = ["batch", *value.shape[1:]] if has_batch and value.dim() > 0 else value.shape
    return f"{str(value.dtype).removeprefix('torch.')} ({', '.join(map(str, sizes))}) on {value.device.type}"


def _leaves(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    for name, value in bound.arguments.items():
        if isinstance(value, torch.Tensor):  # the usual case does not need to flatten a tree
            yield name, value
        else:
            leaves, _ = tree_flatten_with_path(value)
            yield from ((name + keystr(path), leaf) for path, leaf in leaves)
