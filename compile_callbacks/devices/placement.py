"""Where a module stands, on which device and in which mode, and how to put it back there."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from compile_callbacks.links import checks_settings


@checks_settings
def as_device(device: object) -> torch.device:
    """The device of a ``device`` argument, one that can be used.

    Args:
        device: A name as ``"cuda"`` or ``"cuda:1"``, or a `torch.device`.

    Returns:
        The device with its index, where its kind has one.

    Raises:
        TypeError: Neither a string nor a device.
        ValueError: No device of that name, one that is not there, or ``"meta"``, which holds no values.
    """
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device={device!r} must be a string or a torch.device, not {type(device).__name__}")
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # Torch tells an unknown name, a missing GPU and a build without CUDA apart in its message alone.
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={str(device)!r} cannot be used: {reason}") from error
    if found.type == "meta":
        raise ValueError("device='meta' cannot be used: it holds no values")
    return found


def device_of(module: nn.Module) -> torch.device:
    """Where the first weight of a module is; without any, where tensors are made."""
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.get_default_device() if tensor is None else tensor.device


class Placement:
    """The device and the training flags of a module, as they are now.

    Args:
        module: The module; it has its weights on one device.

    Raises:
        ValueError: Weights are on several devices, or on ``"meta"``.
    """

    @checks_settings
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._training = [(part, part.training) for part in module.modules()]
        found = sorted({str(tensor.device) for tensor in (*module.parameters(), *module.buffers())})
        if len(found) > 1:
            raise ValueError(f"module has weights on several devices, {', '.join(found)}; move it to one of them first")
        if found == ["meta"]:
            raise ValueError("module has weights on the device 'meta', without values; load them first")
        self.device = torch.device(found[0]) if found else None
        """The device, ``None`` for a module without weights."""

    @property
    def training(self) -> bool:
        """Whether any part of the module is in training mode by now."""
        return any(part.training for part, _ in self._training)

    def restore(self) -> None:
        """Put the module back."""
        if self.device is not None:
            self._module.to(self.device)
        for part, training in self._training:
            part.training = training
