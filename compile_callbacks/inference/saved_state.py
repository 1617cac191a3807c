"""The saved form of an `InductorBackend`: its settings, its module's weights, and its samples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.runtime.target_settings import NewShapes, OnError

Sample = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments and keyword arguments of one call."""

FORMAT = "compile_callbacks.InductorBackend"
"""The name of the format, in the data."""

VERSION = 1
"""The version of the data; it grows when an older library would misread them."""

_FIELDS: dict[str, type] = {
    "name": str,
    "config": Mapping,
    "on_error": str,
    "new_shapes": str,
    "device": str,
    "module": str,
    "state_dict": Mapping,
    "state_dict_metadata": Mapping,
    "samples": list,
}


@dataclass(frozen=True, kw_only=True)
class SavedBackend:
    """The data of a saved backend.

    Attributes:
        name: The backend's name.
        config: Its settings.
        on_error: What a failure of the compiler does.
        new_shapes: What an unseen input shape does.
        device: The device that it was built for.
        samples: The samples to compile on.
        module: The name of its module's class.
        state_dict: Its module's state_dict, with torch's metadata.
    """

    name: str
    config: InductorConfig
    on_error: OnError
    new_shapes: NewShapes
    device: torch.device
    samples: Sequence[Sample]
    module: str
    state_dict: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The data as plain containers, plain values and tensors.

        Raises:
            ValueError: Settings, weights or samples that are no plain data.
        """
        metadata: Mapping[str, Any] = getattr(self.state_dict, "_metadata", {})
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "config": self.config.to_dict(),
            "on_error": self.on_error,
            "new_shapes": self.new_shapes,
            "device": str(self.device),
            "module": self.module,
            "state_dict": as_plain(dict(self.state_dict), "state_dict"),
            # Modules use these versions to load older state_dicts; torch keeps them in an attribute.
            "state_dict_metadata": as_plain({name: dict(of) for name, of in metadata.items()}, "state_dict_metadata"),
            "samples": written_down(self.samples),
        }

    @classmethod
    def from_dict(
        cls, data: object, *, allow_passes: Sequence[str] = (), samples: object | None = None
    ) -> SavedBackend:
        """Read what `to_dict` wrote.

        Args:
            data: The data.
            allow_passes: As for `InductorConfig.from_dict`.
            samples: Samples in place of synthetic ones.

        Raises:
            TypeError: Data or a part of it is of another type.
            ValueError: Another format or version, or a part that is missing or refused.
        """
        checked = _checked(data)
        try:
            device = torch.device(checked["device"])
        except RuntimeError as error:
            raise ValueError(f"state['device']={checked['device']!r} is not a torch device") from error
        state_dict = OrderedDict(checked["state_dict"])
        state_dict._metadata = OrderedDict(checked["state_dict_metadata"])  # type: ignore[attr-defined]
        return cls(
            name=checked["name"],
            config=InductorConfig.from_dict(checked["config"], allow_passes=allow_passes),
            on_error=checked["on_error"],
            new_shapes=checked["new_shapes"],
            device=device,
            samples=as_samples(
                tree_map_only(torch.Tensor, synthetic, checked["samples"]) if samples is None else samples
            ),
            module=checked["module"],
            state_dict=state_dict,
        )

    def load_into(self, module: nn.Module) -> None:
        """Load the weights into a module.

        Raises:
            ValueError: The module has another class, or weights of other names, shapes or dtypes; it is then unchanged.
        """
        if self.module != (name := type(module).__qualname__):
            raise ValueError(f"state is of a module of class {self.module!r}, and module is a {name!r}")
        here, saved = ({key: _kind_of(v) for key, v in of.items()} for of in (module.state_dict(), self.state_dict))
        if odd := next((key for key in here | saved if here.get(key) != saved.get(key)), None):
            raise ValueError(
                f"state['state_dict'] does not fit module: {odd!r} is {saved.get(odd, 'missing')} in state, and "
                f"{here.get(odd, 'missing')} in module"
            )
        module.load_state_dict(self.state_dict)


def _checked(data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise TypeError(f"state must be a mapping that InductorBackend.to_dict() made, not {type(data).__name__}")
    if data.get("format") != FORMAT:
        raise ValueError(f"state is of the format {data.get('format')!r}, where InductorBackend reads {FORMAT!r}")
    if data.get("version") != VERSION:
        raise ValueError(f"state is of the version {data.get('version')!r}, where this library reads {VERSION}")
    for name, kind in _FIELDS.items():
        if name not in data:
            raise ValueError(f"state lacks {name!r}")
        if not isinstance(data[name], kind):
            raise TypeError(f"state[{name!r}] is a {type(data[name]).__name__}, which to_dict() does not write")
    return data


def _kind_of(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "not a tensor"
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"


# ------------------------------------------------------------------------------------------ samples


def as_samples(samples: object) -> list[Sample]:
    """Check samples, and copy their tensors to the CPU, so that the module cannot change them.

    Args:
        samples: A list of pairs ``(args, kwargs)``.

    Raises:
        TypeError: The samples are not a list, or an item is not such a pair.
        ValueError: The list is empty, or an item does not have two parts.
    """
    if not isinstance(samples, Sequence) or isinstance(samples, str):
        raise TypeError(f"samples must be a list of pairs (args, kwargs), not {type(samples).__name__}")
    if not samples:
        raise ValueError("samples is empty; a module is compiled on at least one pair (args, kwargs)")
    return [_as_sample(index, sample) for index, sample in enumerate(samples)]


def on_device(sample: Sample, device: torch.device) -> Sample:
    """Copy a sample to a device."""
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), sample)
    return args, kwargs


def written_down(samples: Sequence[Sample]) -> list[Any]:
    """Convert samples to lists, dicts, plain values, and tensors on the meta device, without the user's data.

    Raises:
        ValueError: A sample holds an object of another type.
    """
    plain = [
        [as_plain(list(args), f"samples[{index}] args"), as_plain(kwargs, f"samples[{index}] kwargs")]
        for index, (args, kwargs) in enumerate(samples)
    ]
    described: list[Any] = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), plain)
    return described


def synthetic(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, dtype and strides for one on the meta device: random numbers, or integers of 0."""
    if not tensor.is_meta:
        return tensor
    made = torch.empty_like(tensor, device="cpu")
    if not (made.is_floating_point() or made.is_complex()):
        return made.zero_()
    return made.copy_(torch.rand(made.shape, generator=torch.Generator().manual_seed(0)))


def _as_sample(index: int, sample: object) -> Sample:
    where = f"samples[{index}]"
    if not isinstance(sample, (tuple, list)):
        raise TypeError(
            f"{where} must be a pair (args, kwargs), not {type(sample).__name__}: ((x,), {{}}) for a call f(x)"
        )
    if len(sample) != 2:
        raise ValueError(f"{where} must be a pair (args, kwargs), and has {len(sample)} parts")
    args, kwargs = sample
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"{where} must begin with a tuple of positional arguments, not {type(args).__name__}")
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"{where} must end with a mapping of keyword arguments, not {type(kwargs).__name__}")
    for name in kwargs:
        if not isinstance(name, str):
            raise TypeError(f"{where} has the keyword argument {name!r}, which is not a string")
    args, kwargs = tree_map_only(torch.Tensor, _on_host, (tuple(args), dict(kwargs)))
    return args, kwargs


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):  # to the compiler, an inference tensor is another kind of input
        return tensor.detach().to("cpu", copy=True)


def as_plain(value: Any, where: str) -> Any:
    """Convert a value to what ``torch.load(weights_only=True)`` can read: containers copied, tensors on the CPU.

    Tensors that are on the CPU already share their memory with the result.

    Args:
        value: Nested lists, tuples and dicts of numbers, strings, booleans, ``None`` and tensors.
        where: The name of the value in messages.

    Raises:
        ValueError: A part is of another type; a subclass of these types counts as another type.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (torch.Tensor, nn.Parameter):
        return value.detach().cpu()
    if kind in (list, tuple):
        return kind(as_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind is dict:
        return {_key(key, where): as_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise ValueError(f"{where} is of type {kind.__name__}, which cannot be saved as plain data and tensors")


def _key(key: Any, where: str) -> Any:
    if type(key) not in (str, int):
        raise ValueError(f"{where} has the key {key!r} of type {type(key).__name__}; plain data has string keys")
    return key
