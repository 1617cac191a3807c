"""Whether weights are still what they were, for code that has them baked in."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

_CHUNK = 2**22  # elements hashed at once, to bound the memory that hashing takes
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightWatch:
    """Tells whether a module's weights changed, or moved, since it was last asked.

    Args:
        module: The module whose parameters and buffers are watched.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors: list[torch.Tensor] = []
        self._versions: list[tuple[int, int]] = []
        self._addresses: list[int] = []
        self._contents: tuple[int, ...] | None = None

    def changed(self, *, thorough: bool) -> bool:
        """Whether any weight is another than at the last call; true at the first.

        Args:
            thorough: Look at the contents, which sees every edit and reads all of the memory. Else at addresses
                and version counters, which costs a tenth of a microsecond a tensor and is blind to edits in place
                through ``.data`` and to parameters that were replaced by new objects.
        """
        if self._contents is None or thorough:
            self._tensors = list(_tensors(self._module))
        elif self._read_versions() == self._versions:
            return False
        before = self._contents, self._addresses
        self._versions = self._read_versions()
        self._contents = contents(self._module)
        # What was not folded is baked in by its address, which moves with the module, as from a GPU and back.
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        return (self._contents, self._addresses) != before

    def _read_versions(self) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor._version) for tensor in self._tensors]


def contents(module: nn.Module) -> tuple[int, ...]:
    """A 64-bit hash of each weight's bits in their order."""
    hashes = [_hash(tensor).cpu() for tensor in (*module.parameters(), *module.buffers())]
    return tuple(torch.stack(hashes).tolist()) if hashes else ()


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_inference():  # those have no version counter, and torch lets nobody change them in place
            yield tensor


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach()
    if data.is_complex():
        data = torch.view_as_real(data)
    bits = data.reshape(-1).view(_INTEGERS[data.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].long()
        # Odd factors, each its own: a change of one element or an exchange of two shows; sums wrap around.
        factors = torch.arange(start, start + len(chunk), device=chunk.device) * 2654435769 * 2 + 1
        total += (chunk * factors).sum()
    return total
