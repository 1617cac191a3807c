"""The module that is measured, by name, and what it is called with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.bench.settings import BenchSettings
from compile_callbacks.choices import unknown
from compile_callbacks.failures import describe_failure, in_one_line

_DEFAULT_BATCH_SIZE = {"cpu": 4, "cuda": 32}
_DEFAULT_IMAGE_SIZE = 224  # what most of ImageNet's models are trained with


@dataclass(frozen=True)
class Subject:
    """A module on its device and its inputs.

    Attributes:
        module: The module; each row has a copy of it.
        args: Positional inputs.
        kwargs: Inputs by name.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def shapes(self) -> str:
        """The shapes of the inputs, for a person to read."""
        tensors = [x for x in _torch.tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]
        return ", ".join("x".join(map(str, x.shape)) or "scalar" for x in tensors) or "no tensor"


def load(settings: BenchSettings) -> Subject:
    """Make the module that settings name, with weights as they are initialized, and a batch of random images.

    Raises:
        ValueError: No such module, a package that is not installed, a factory that fails or returns something else,
            or a setting that has no effect on its inputs.
    """
    torch.manual_seed(0)
    name = settings.module
    image_size = None
    if ":" in name:
        module, inputs = _from_factory(name)
    elif name.startswith("timm/"):
        (module, image_size), inputs = _from_timm(name), None
    else:
        (module, image_size), inputs = _from_torchvision(name), None
    if inputs is None:
        inputs = (_images(settings, image_size or _DEFAULT_IMAGE_SIZE),)
    else:
        for option, value in (("--batch-size", settings.batch_size), ("--image-size", settings.image_size)):
            if value is not None:
                raise ValueError(f"{option}={value} has no effect: {name} comes with inputs of its own")
    layout = torch.channels_last if settings.channels_last else torch.preserve_format
    tensors = [x for x in _torch.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    if settings.channels_last and not any(x.dim() == 4 for x in tensors):
        raise ValueError(f"--channels-last has no effect: no input of {name} has four dimensions")

    def placed(x: torch.Tensor) -> torch.Tensor:
        return x.to(settings.device, memory_format=layout if x.dim() == 4 else torch.preserve_format)

    inputs = _torch.tree_map_tensors(placed, inputs)
    module = module.to(settings.device)
    if settings.channels_last:
        module = module.to(memory_format=torch.channels_last)
    if isinstance(inputs, Mapping):
        return Subject(module, (), inputs)
    return Subject(module, tuple(inputs))


def _images(settings: BenchSettings, image_size: int) -> torch.Tensor:
    size = settings.image_size or image_size
    return torch.randn(settings.batch_size or _DEFAULT_BATCH_SIZE[settings.device.type], 3, size, size)


def _from_torchvision(name: str) -> tuple[nn.Module, int | None]:
    try:
        from torchvision import models
    except Exception as error:  # a build for another torch raises more than ImportError
        raise ValueError(
            f"{name!r} is looked up in torchvision, which cannot be imported: {_said(error)}; "
            "`compile-callbacks doctor` says more"
        ) from error
    if name not in models.list_models():
        others = " A model of yours is package:factory, one of timm's is timm/NAME."
        raise ValueError(unknown("MODULE", name, models.list_models()) + others)
    weights = getattr(models.get_model_weights(name), "DEFAULT", None)
    crop_size = getattr(weights and weights.transforms(), "crop_size", None)
    return _made(name, models.get_model, name), max(crop_size) if crop_size else None


def _from_timm(name: str) -> tuple[nn.Module, int | None]:
    try:
        import timm
    except Exception as error:
        raise ValueError(f"{name!r} needs timm, which cannot be imported ({_said(error)}): pip install timm") from error
    short = name.removeprefix("timm/")
    if not timm.is_model(short):
        raise ValueError(unknown("MODULE", name, [f"timm/{known}" for known in timm.list_models()]))
    module: Any = _made(name, timm.create_model, short)
    input_size = getattr(module, "default_cfg", {}).get("input_size")
    return module, max(input_size[1:]) if input_size else None


def _from_factory(reference: str) -> tuple[nn.Module, Any]:
    """What a factory returns, inputs made a sequence or a dict; ``None`` for them where it returns a module alone."""
    package, _, attribute = reference.partition(":")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as with `python -m`: an installed command has its own folder there
    try:
        found = importlib.import_module(package)
    except Exception as error:
        raise ValueError(f"{reference!r} cannot be imported: {_said(error)}") from error
    factory = getattr(found, attribute, None)
    if not callable(factory):
        names = [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]
        raise ValueError(unknown("MODULE", reference, [f"{package}:{name}" for name in names]))
    made: Any = _made(reference, factory)
    inputs = None
    if isinstance(made, tuple) and len(made) == 2:
        made, inputs = made
        if isinstance(inputs, Mapping):
            inputs = dict(inputs)
        elif not isinstance(inputs, (tuple, list)):
            inputs = (inputs,)
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"{reference!r} must return a torch.nn.Module, or a tuple of it and its inputs, not {type(made).__name__}"
        )
    return made, inputs


def _made(name: str, make: Any, *args: Any) -> Any:
    try:
        return make(*args)
    except Exception as error:
        raise ValueError(f"{name!r} cannot be made: {_said(error)}") from error


def _said(error: BaseException) -> str:
    return in_one_line(describe_failure(error))
