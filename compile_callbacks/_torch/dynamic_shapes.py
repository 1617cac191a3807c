"""Dynamic shapes: marks the dimensions and numbers that a compile must not treat as constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._dynamo import maybe_mark_dynamic

_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")  # the second one since 2.15


def mark_dimensions(tensor: torch.Tensor, dimensions: Sequence[int]) -> Callable[[], None]:
    """Have the compile that traces a tensor treat dimensions as dynamic. Torch specializes one if the code needs it.

    Returns:
        Removes the marks. A mark that stays would make torch recompile where the same tensor is an input again.
    """
    marked = [part for part in (tensor, *_inner_tensors(tensor)) if not any(hasattr(part, name) for name in _MARKS)]
    maybe_mark_dynamic(tensor, list(dimensions))

    def unmark() -> None:
        for part in marked:
            for name in _MARKS:
                vars(part).pop(name, None)

    return unmark


def _inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors within a traceable wrapper subclass, which torch marks too."""
    if not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return []
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for one in inner for part in (one, *_inner_tensors(one))]


def numbers_as_dynamic(inputs: Iterable[str]) -> Any:
    """A context in which compiles treat integer inputs as dynamic.

    Args:
        inputs: The inputs as expressions of the compiled function's local variables, such as ``"args[1]"``.
    """
    parts = (name.partition("[") for name in inputs)
    sources = [f"L['{local}'][{index}" for local, _, index in parts]
    of_user = torch.compiler.config.dynamic_sources
    return torch.compiler.config.patch(  # type: ignore[attr-defined]  # torch adds it when the module is imported
        dynamic_sources=",".join([of_user, *sources] if of_user else sources)
    )
