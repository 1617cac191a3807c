"""What a forward pass leaves behind in a module, and how to take it back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Snapshot:
    """The buffers of a module and the states of the random number generators, as they are now.

    Args:
        module: The module; its submodules' buffers are taken too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        # A forward pass may also put another tensor in a buffer's place: self.count = self.count + 1.
        self._places = [
            (part._buffers, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()
        ]
        self._generators = _generator_states()
        made = (weight for weight in module.parameters() if not nn.parameter.is_lazy(weight))
        self._weights = [(weight, version(weight)) for weight in made]

    def wrote_weights(self) -> bool:
        """Whether a weight was written to since; there are no copies of weights to put back."""
        return any(version(weight) != before for weight, before in self._weights)

    def drew(self) -> bool:
        """Whether random numbers were drawn since."""
        return any(not torch.equal(a, b) for a, b in zip(self._generators, _generator_states(), strict=True))

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what has changed since."""
        torch.set_rng_state(self._generators[0])
        if len(self._generators) > 1:
            torch.cuda.set_rng_state(self._generators[1])
        for buffers, name, buffer in self._places:
            buffers[name] = buffer
        for buffer, value in self._buffers:
            # A write, even of the same value, makes weights look changed. Only dense tensors can be compared.
            if buffer.layout is not torch.strided or not torch.equal(buffer, value):
                buffer.copy_(value)


def version(value: Any) -> int | None:
    """Changes with each change of a tensor in place; tensors of inference mode have none."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def _generator_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
