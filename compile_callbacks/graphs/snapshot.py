"""Saves and restores buffers and random number generators around a run that the user has not asked for."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch


class Snapshot:
    """The current buffers of a module, and the states of the random number generators of Python, NumPy and torch.

    A graph with frozen weights has buffers of the user's module.
    """

    def __init__(self, module: nn.Module, inputs: Iterable[Any] = ()) -> None:
        # A forward pass may also replace a buffer by another tensor: self.count = self.count + 1.
        places = [(part._buffers, name, value) for part in module.modules() for name, value in part._buffers.items()]
        self._buffers = [(*place, place[2] if place[2] is None else place[2].detach().clone()) for place in places]
        devices = {value.device for value in (*module.parameters(), *inputs) if isinstance(value, torch.Tensor)}
        if torch.cuda.is_initialized():
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self._torch = self._torch_states()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state(legacy=False)

    def drawn(self) -> bool:
        """Return whether one of torch's generators has drawn a number since the snapshot."""
        return any(not torch.equal(*both) for both in zip(self._torch, self._torch_states(), strict=True))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything that has changed since the snapshot."""
        torch.set_rng_state(self._torch[0])
        for device, state in zip(self._devices, self._torch[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for buffers, name, buffer, value in self._buffers:
            buffers[name] = buffer
            # Skip equal buffers, because any write makes weights look changed. Only dense tensors can be compared.
            if buffer is None or value is None:
                continue
            if buffer.layout is not torch.strided or not torch.equal(buffer, value):
                versioned = () if buffer.is_inference() else (buffer,)
                # An earlier eager call may have saved it.
                with torch.inference_mode(buffer.is_inference()), _torch.autograd.preserve_versions()(versioned):
                    buffer.copy_(value)

    def _torch_states(self) -> list[torch.Tensor]:
        others = [torch.get_device_module(device).get_rng_state(device) for device in self._devices]
        return [torch.get_rng_state(), *others]
