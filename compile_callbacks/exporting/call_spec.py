"""Describes the inputs of a package. `export` writes the description, and each later call checks its inputs with it.

The check is necessary, because AOTInductor's code does not check its inputs. For another shape, dtype or memory layout,
the code returns wrong numbers or crashes the process.
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

from compile_callbacks._utils.errors import with_code
from compile_callbacks.profiling.spans import call_times_ms

_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_CHANNELS_LAST_OF_RANK = {4: "channels_last", 5: "channels_last_3d"}


@dataclass(frozen=True, kw_only=True)
class TensorInput:
    """A tensor input of a package."""

    dtype: str  # such as "float32"
    shape: tuple[int | None, ...]  # None: the batch size, if it may change from call to call
    device: str  # the type of the device
    memory_format: str  # a key of _FORMATS

    @classmethod
    def of(cls, tensor: torch.Tensor, batch: int | None) -> TensorInput:
        """Describe a tensor. Dimension 0 is the batch if its size is ``batch``."""
        sizes: list[int | None] = list(tensor.shape)
        if sizes and sizes[0] == batch:
            sizes[0] = None
        layout = _memory_format_of(tensor)
        return cls(dtype=_dtype_name(tensor), shape=tuple(sizes), device=tensor.device.type, memory_format=layout)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> TensorInput:
        """Read data that `CallSpec.to_json` wrote. Other data raise a ``ValueError``, ``KeyError`` or ``TypeError``."""
        found = cls(**{**data, "shape": tuple(data["shape"])})
        sizes = all(size is None or type(size) is int for size in found.shape)
        if not (sizes and isinstance(found.dtype, str) and isinstance(found.device, str)):
            raise ValueError(f"an input is described by {data!r}")
        if found.memory_format not in _FORMATS:
            raise ValueError(f"an input has the memory format {found.memory_format!r}")
        return found

    @property
    def has_batch(self) -> bool:
        """Whether dimension 0 is a batch whose size may change from call to call."""
        return None in self.shape

    def check(self, name: str, value: Any) -> torch.Tensor:
        """Check an input of a call, and return it in the package's memory layout."""
        if not isinstance(value, torch.Tensor):
            raise TypeError(_misfit(f"input {name!r} must be a tensor, not {type(value).__name__}", self))
        if _dtype_name(value) != self.dtype:
            raise TypeError(_misfit(f"input {name!r} is of dtype {_dtype_name(value)}", self))
        if value.device.type != self.device:
            raise ValueError(_misfit(f"input {name!r} is on {value.device.type}, not on {self.device}", self))
        shape = tuple(value.shape)
        if len(shape) != len(self.shape) or any(a not in (None, b) for a, b in zip(self.shape, shape, strict=True)):
            raise ValueError(_misfit(f"input {name!r} has the shape {shape}", self))
        return value.contiguous(memory_format=_FORMATS[self.memory_format])

    def __str__(self) -> str:
        """Describe the input: ``float32 (batch, 1, 8, 8)``."""
        return f"{self.dtype} ({', '.join('batch' if size is None else str(size) for size in self.shape)})"


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """The inputs of a package."""

    signature: Signature  # the parameters of `forward` that the exported call passed
    inputs: Mapping[str, TensorInput | str]
    """The inputs by name, such as ``"x['mask']"``, in the order of the package. Each is a tensor, or the ``repr`` of a
    value that is constant in the package."""

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
        leaves = _leaves(signature.bind(*bound.args, **bound.kwargs))
        inputs = {n: TensorInput.of(x, batch) if isinstance(x, torch.Tensor) else repr(x) for n, x in leaves}
        return cls(signature=signature, inputs=inputs)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Bind the inputs of a call to the parameters of the exported call."""
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(_misfit(str(error), self)) from None

    def tensors(self, bound: inspect.BoundArguments) -> list[torch.Tensor]:
        """Check the inputs of a call, and return its tensors in the order and layout of the package."""
        leaves = dict(_leaves(bound))
        if leaves.keys() != self.inputs.keys():
            odd = min(leaves.keys() ^ self.inputs.keys())
            what = "was not exported" if odd in leaves else "is missing"
            raise TypeError(_misfit(f"input {odd!r} {what}", self))
        batches: dict[int, str] = {}
        found = []
        for name, expected in self.inputs.items():
            value = leaves[name]
            if isinstance(expected, TensorInput):
                found.append(expected.check(name, value))
                if expected.has_batch:
                    batches.setdefault(value.shape[0], name)
            elif isinstance(value, torch.Tensor) or repr(value) != expected:
                given = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                raise ValueError(_misfit(f"input {name!r} is {given}, and was exported as {expected}", self))
        if len(batches) > 1:
            each = " and ".join(f"{size} in {name!r}" for size, name in batches.items())
            raise ValueError(_misfit(f"the inputs have different batch sizes, {each}", self))
        return found

    def batches(self, bound: inspect.BoundArguments) -> dict[str, torch.Tensor]:
        """Return the tensors of a call whose dimension 0 is the batch, by name."""
        inputs = self.inputs
        return {n: leaf for n, leaf in _leaves(bound) if isinstance(spec := inputs[n], TensorInput) and spec.has_batch}

    def to_json(self) -> str:
        """Return the description as JSON, for a package."""
        inputs = {name: value if isinstance(value, str) else asdict(value) for name, value in self.inputs.items()}
        kinds = {name: parameter.kind.name for name, parameter in self.signature.parameters.items()}
        return json.dumps({"parameters": kinds, "inputs": inputs})

    @classmethod
    def from_json(cls, text: str) -> CallSpec:
        """Read the description that `to_json` wrote. `read_package` handles the errors that other text raises."""
        data = json.loads(text)
        parameters = [Parameter(name, getattr(Parameter, kind)) for name, kind in data["parameters"].items()]
        inputs = {n: x if isinstance(x, str) else TensorInput.from_data(x) for n, x in data["inputs"].items()}
        return cls(signature=Signature(parameters), inputs=inputs)

    def __str__(self) -> str:
        """Describe the inputs in one line: ``images: float32 (batch, 1, 8, 8), scale=2.0``."""
        return ", ".join(f"{name}{'=' if isinstance(x, str) else ': '}{x}" for name, x in self.inputs.items())


class ExampleCall(NamedTuple):
    """The inputs of one call of a module."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> ExampleCall:
        """Convert a tuple of positional inputs, a mapping of inputs by name, or a single input."""
        if isinstance(inputs, tuple):
            return cls(inputs, {})
        return cls((), dict(inputs)) if isinstance(inputs, Mapping) else cls((inputs,), {})

    @classmethod
    def of_batch(cls, batch: Any, module: nn.Module) -> ExampleCall:
        """Take a module's inputs from a batch: of a tuple or list, the first element.

        The entries of a mapping whose keys are parameters of ``forward`` are the inputs, by name. If no key is a
        parameter, the mapping itself is the input.
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
        """Return the times of repeated calls, in milliseconds."""
        return call_times_ms(lambda: callee(*self.args, **self.kwargs), device=device)


def copy_in_package_layout(tensor: torch.Tensor) -> torch.Tensor:
    """Copy an example tensor to the memory layout that the package will expect."""
    return tensor.detach().clone(memory_format=_FORMATS[_memory_format_of(tensor)])


def _memory_format_of(tensor: torch.Tensor) -> str:
    name = _CHANNELS_LAST_OF_RANK.get(tensor.dim())
    is_channels_last = name and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=_FORMATS[name])
    return name if name and is_channels_last else "contiguous"


def _misfit(problem: str, accepted: TensorInput | CallSpec) -> str:
    return with_code("CC605", f"{problem}; the package takes {accepted}")


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _leaves(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    for name, value in bound.arguments.items():
        if isinstance(value, torch.Tensor):  # the usual case does not need to flatten a tree
            yield name, value
        else:
            leaves, _ = tree_flatten_with_path(value)
            yield from ((name + keystr(path), leaf) for path, leaf in leaves)
