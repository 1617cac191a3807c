"""Restores the modes of torch that operators of a captured graph enter and leave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.autograd import forward_ad

from compile_callbacks._torch.ports import optional

_DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def restored_after_error() -> Iterator[None]:
    """Restore the current modes if the ``with`` block raises: levels of torch.func and forward AD, grad mode, autocast.

    Eager code enters and leaves such modes with context managers. A captured graph contains one operator that enters a
    mode and another one that leaves it. If an operator between them raises, the mode stays active: a later eager call
    then fails, for example with "Nested forward mode AD is not supported".

    Workaround (until torch has public functions for the levels of `torch.func` and forward-mode AD).
    """
    leave_transforms = _transforms_left()
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    grad, nesting = torch.is_grad_enabled(), _autocast_nesting()
    try:
        yield
    except BaseException:
        leave_transforms()
        torch.set_grad_enabled(grad)
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        for _ in range(_autocast_nesting() - nesting):
            torch.autocast_decrement_nesting()
        raise


@optional("transform levels", lambda: lambda: None)
def _transforms_left() -> Callable[[], None]:
    """Return a function that leaves the transforms and the level of forward AD that are entered from now on."""
    functorch, exit_level = torch._C._functorch, torch._C._exit_dual_level
    depth, has_level = functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level >= 0
    leave = functorch.pop_dynamic_layer_stack

    def leave_transforms() -> None:
        while functorch.get_dynamic_layer_stack_depth() > depth:
            leave()
        if not has_level:
            with contextlib.suppress(RuntimeError):  # torch raises if the level is not active; torch allows one level
                exit_level(level=0)

    return leave_transforms


def _autocast_nesting() -> int:
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Within the ``with`` block, autocast caches no weights: they may be fake, and the user's next call gets them."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@optional("modes", str)
def dispatch_mode() -> str:
    """Return the name of the innermost `TorchDispatchMode` of the user, or an empty string. Dynamo skips all frames."""
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    return "" if mode is None or mode.ignore_compile_internals() else type(mode).__name__.strip("_")
