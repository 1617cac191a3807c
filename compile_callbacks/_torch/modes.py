"""Restores the modes of torch that operators of a captured graph enter and leave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

_DEVICES = ("cpu", "cuda")
_LEAVE = {
    _functorch.TransformType.Vmap: _functorch._vmap_decrement_nesting,
    _functorch.TransformType.Grad: _functorch._grad_decrement_nesting,
    _functorch.TransformType.Jvp: _functorch._jvp_decrement_nesting,
    _functorch.TransformType.Functionalize: _functorch._func_decrement_nesting,
}
"""Leaves the innermost transform of each kind."""


@contextlib.contextmanager
def restored_after_error() -> Iterator[None]:
    """Restore the current modes if the ``with`` block raises: levels of torch.func and forward AD, grad mode, autocast.

    Eager code enters and leaves such modes with context managers. A captured graph contains one operator that enters a
    mode and another one that leaves it. If an operator between them raises, the mode stays active: a later eager call
    then fails, for example with "Nested forward mode AD is not supported".

    Workaround (until torch has public functions for the levels of `torch.func` and forward-mode AD).
    """
    depth, has_level = _functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level >= 0
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    grad, nesting = torch.is_grad_enabled(), _autocast_nesting()
    try:
        yield
    except BaseException:
        while _functorch.get_dynamic_layer_stack_depth() > depth:
            _LEAVE[_functorch.peek_interpreter_stack().key()]()
        if not has_level:
            with contextlib.suppress(RuntimeError):  # torch raises if the level is not active; torch allows one level
                torch._C._exit_dual_level(level=0)
        torch.set_grad_enabled(grad)
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        for _ in range(_autocast_nesting() - nesting):
            torch.autocast_decrement_nesting()
        raise


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Within the ``with`` block, autocast caches no weights, because the user's next call would get them.

    If a graph runs on fake tensors within the user's autocast block, the cache would contain fake weights.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _autocast_nesting() -> int:
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting


def dispatch_mode() -> str:
    """Return the name of the innermost `TorchDispatchMode` of the user, or an empty string. Dynamo skips all frames."""
    # The flag of torch may remain set after two threads have compiled at the same time, so the mode decides.
    mode = _python_dispatch._get_current_dispatch_mode()
    active = mode is not None and _python_dispatch.is_in_any_mode_without_ignore_compile_internals()
    return type(mode).__name__.strip("_") if active else ""
