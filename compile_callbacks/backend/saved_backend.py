"""What an `InductorBackend` is written down as: its settings, its module's weights, and its samples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_callbacks.architecture import class_name, why_unfit
from compile_callbacks.backend.plain_data import as_plain
from compile_callbacks.backend.samples import Sample, as_samples, written_down
from compile_callbacks.compiling.region_settings import OnError
from compile_callbacks.compiling.shapes import NewShapes
from compile_callbacks.links import checks_settings
from compile_callbacks.settings.config import InductorConfig

FORMAT = "compile_callbacks.InductorBackend"
"""What the data calls itself."""

VERSION = 1
"""The version of the data; it grows where an older library would read it wrongly."""

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
    """A backend as it is saved and loaded.

    Attributes:
        name: The backend's name.
        config: Its settings.
        on_error: What a failure of the compiler does.
        new_shapes: What an unseen input shape does.
        device: The device that it was built for.
        samples: What it is compiled on.
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
        """All of it as plain containers, plain values and tensors.

        Raises:
            ValueError: Settings, weights or samples that cannot be written down so.
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
            # The versions by which modules read the state_dicts of older ones; torch has them beside the items.
            "state_dict_metadata": as_plain({name: dict(of) for name, of in metadata.items()}, "state_dict_metadata"),
            "samples": written_down(self.samples),
        }

    @classmethod
    @checks_settings
    def from_dict(cls, data: object) -> SavedBackend:
        """Read what `to_dict` wrote.

        Raises:
            TypeError: Data or a part of it is of another type.
            ValueError: Another format or version, or a part that is missing or refused.
        """
        checked = _checked(data)
        try:
            device = torch.device(checked["device"])
        except RuntimeError as error:
            raise ValueError(f"state['device']={checked['device']!r} is no device of torch's") from error
        state_dict = OrderedDict(checked["state_dict"])
        state_dict._metadata = OrderedDict(checked["state_dict_metadata"])  # type: ignore[attr-defined]
        return cls(
            name=checked["name"],
            config=InductorConfig.from_dict(checked["config"]),
            on_error=checked["on_error"],
            new_shapes=checked["new_shapes"],
            device=device,
            samples=as_samples(checked["samples"]),
            module=checked["module"],
            state_dict=state_dict,
        )

    @checks_settings
    def load_into(self, module: nn.Module) -> None:
        """Load the weights into a module.

        Raises:
            ValueError: It is of another class, or has other weights by names, shapes or dtypes; it is as it was then.
        """
        if self.module != class_name(module):
            raise ValueError(f"state is of a module of class {self.module!r}, and module is a {class_name(module)!r}")
        if why := why_unfit(module, self.state_dict):
            raise ValueError(f"state['state_dict'] does not fit module: {why}")
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
            raise TypeError(f"state[{name!r}] is a {type(data[name]).__name__}, which to_dict() does not put there")
    return data
