"""Whether weights are still what they were, for code that has them baked in."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from compile_callbacks import _torch

_CHUNK = 2**22  # elements hashed at once, to bound the memory that hashing takes
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightWatch:
    """Tells whether a module's weights changed, or moved, since it was last asked.

    Args:
        module: The module whose parameters and buffers are watched.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[torch.Tensor] = []
        self._wrappers: list[torch.Tensor] = []
        self._some_lazy = False
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
        if self._contents is None or thorough or self._some_lazy:
            weights = list(_weights(self._module))
            made = [weight for weight in weights if not is_lazy(weight)]
            self._some_lazy = len(made) < len(weights)  # the call that follows makes them
            self._parts = [part for weight in made for part in _parts(weight) if not part.is_inference()]
            # A change of a sparse tensor does not count for its values.
            self._wrappers = [weight for weight in made if not _is_plain(weight) and not weight.is_inference()]
        elif self._read_versions() == self._versions:
            return False
        before = self._contents, self._addresses
        self._versions = self._read_versions()
        self._contents = contents(self._module)
        # What was not folded is baked in by its address, which moves with the module, as from a GPU and back.
        self._addresses = [part.data_ptr() for part in self._parts]
        return (self._contents, self._addresses) != before

    def _read_versions(self) -> list[tuple[int, int]]:
        versions = [(part.data_ptr(), part._version) for part in self._parts]
        return versions + [(0, wrapper._version) for wrapper in self._wrappers] if self._wrappers else versions


def contents(module: nn.Module) -> tuple[int, ...]:
    """A 64-bit hash of each weight's bits in their order, without lazy weights that are not made yet."""
    made = (weight for weight in _weights(module) if not is_lazy(weight))
    hashes = [_hash(part).cpu() for weight in made for part in _parts(weight)]
    return tuple(torch.stack(hashes).tolist()) if hashes else ()


def unwatchable_reason(module: nn.Module) -> str | None:
    """Why changes of a module's weights cannot be seen; ``None`` if they can."""
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        try:
            if not is_lazy(weight):
                for part in _parts(weight):
                    part.data_ptr()
        except (RuntimeError, NotImplementedError) as error:
            return f"{name!r} is a tensor whose memory cannot be read: {error}"
    return None


def _weights(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not _torch.graphs.is_tensor_subclass(tensor)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors that hold a tensor's values: those of a sparse one, and those inside of a subclass."""
    if _torch.graphs.is_tensor_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _parts(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor.int_repr() if tensor.is_quantized else tensor


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().resolve_conj().resolve_neg()
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
