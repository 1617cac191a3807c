"""`WeightWatch`: detects whether the weights of a module changed since compiled code froze them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from compile_callbacks import _torch
from compile_callbacks.targets.target import Target

_version = operator.attrgetter("_version")  # in C, because each step reads hundreds of versions

_CHUNK = 2**22  # elements to hash at once, which bounds the memory of the hash
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightWatch:
    """Tells whether a module's weights changed since the last call.

    If ``are_suspect``, because a callback may have swapped weights, a call compares hashes of the contents, and the
    addresses. Other calls compare the versions, which takes 0.04 µs per tensor, and the addresses of the first weight
    and of one other weight in turn, because an assignment to ``.data`` changes no version. They do not notice edits in
    place through ``.data`` and parameters that were replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self.are_suspect = True
        self._module = module
        self._weights: list[torch.Tensor] = []
        self._versioned: list[torch.Tensor] = []  # the weights without inference tensors, which have no version
        self._seen: tuple[Any, ...] = ()  # hashes and addresses
        self._version_sum = self._calls = 0  # a version never decreases

    def changed(self) -> bool:
        """Return whether a weight changed since the last call. The first call returns ``True``."""
        if self.are_suspect:
            self._weights = [*self._module.parameters(), *self._module.buffers()]
            self._versioned = [weight for weight in self._weights if not weight.is_inference()]
        elif sum(map(_version, self._versioned)) == self._version_sum and not self._has_moved():
            return False
        self.are_suspect, self._version_sum, before = False, sum(map(_version, self._versioned)), self._seen
        hashes = [_hash(weight).cpu() for weight in self._weights]
        self._seen = torch.stack(hashes).tolist() if hashes else [], [weight.data_ptr() for weight in self._weights]
        # Compiled code contains the addresses of weights that it does not fold. Moving the module changes them.
        return self._seen != before

    def _has_moved(self) -> bool:
        """Return whether the first weight, or one other weight in turn, has another address."""
        self._calls += 1
        checked = {0, self._calls % len(self._weights)} if self._weights else ()
        return any(self._weights[i].data_ptr() != self._seen[1][i] for i in checked)


def unwatchable_reason(target: Target) -> str | None:
    """Return the reason why changes of a target's weights cannot be detected, or ``None`` if they can."""
    if target.shares_code:
        return "repeated blocks share a graph, but not their weights"
    module = target.members[0].module
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        is_dense = not is_lazy(weight) and weight.layout is torch.strided and not weight.is_quantized
        if not is_dense or _torch.graphs.is_wrapper_subclass(weight):
            kind = f"{type(weight).__name__} ({weight.dtype}, {weight.layout})"
            return f"{name!r} is a {kind}, whose contents cannot be watched"
    return None


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash of a tensor's contents."""
    data = tensor.detach().resolve_conj().resolve_neg()
    if data.is_complex():
        data = torch.view_as_real(data)
    bits = data.reshape(-1).view(_INTEGERS[data.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].long()
        # Each element gets a different odd factor, so that changing one element or exchanging two changes the sum.
        factors = torch.arange(start, start + len(chunk), device=chunk.device) * 2654435769 * 2 + 1
        total += (chunk * factors).sum()
    return total
