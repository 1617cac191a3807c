"""Ports: mechanisms that need private parts of torch. If a newer torch has changed a part, the run continues.

Nothing private is read at import. A part that is missing or fails in use costs what `LOST` says. *Observing* ports then
return ``None`` or the cautious answer, and *repairing* ports are skipped. Without an *essential* port, the target is
compiled as by hand, or its graphs run eagerly. If a function has no decorator, its callers handle errors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from packaging.version import Version

NEWEST_TESTED = (2, 15)
"""The newest version of torch with which the tests run."""

LOST = {
    # essential
    "frames": "targets are compiled as by hand, so a failure of Dynamo ends the run",
    "inductor": "captured graphs run eagerly",
    # observing
    "compile events": "the report has no compile times",
    "compile metrics": "the report has no graph breaks, reasons of recompiles, cache hits and memory of activations",
    "modes": "a call within a transform of torch.func or a TorchDispatchMode is not found",
    "backward": "calls are treated as parts of activation checkpoints, and graphs as kept for a second backward pass",
    # repairing
    "dynamo settings": "torch does not notice some changes of a module, or validates arguments of distributions",
    "constant draws": "random numbers of Python that torch draws only once are not found",
    "odd gradients": "Dynamo may fail on gradients of FSDP1",
    "versions": "an eager and a compiled call of one batch norm in one step may fail",
    "transform levels": "an error within a transform of torch.func may leave the transform active",
    "dynamic inputs": "the first graph has fixed sizes",
    "CUDA graphs": "a comparison or a later loop of the user records CUDA graphs, or a failed CUDA graph fails again",
    "generated code": "frozen weights of unused code stay in memory",
    "graph passes": "graph passes do not run",
    "compiled modules": "a module that the user compiled is not found",
    "comparison": "graphs are not compared with eager",
    "settings": "modes have no options",
}
"""The loss without each port."""

_failures: dict[str, str] = {}  # by port, in this process


class MissingPortError(RuntimeError):
    """Raised without an essential port. The message names the version of torch."""


def note(port: str, error: Exception) -> str:
    """Note that a port failed, and return the sentence for the report."""
    return _failures.setdefault(port, f"torch {torch.__version__}: {type(error).__name__}: {error}; {LOST[port]}")


@contextlib.contextmanager
def essential(port: str) -> Iterator[None]:
    """Raise a `MissingPortError` if the ``with`` block does not find a part of torch."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        raise MissingPortError(note(port, error)) from None  # warnings show the first cause


def optional(port: str, otherwise: Callable[[], Any] = lambda: None) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function, which returns ``otherwise()`` if it raises an error."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                note(port, error)
                return otherwise()

        return guarded

    return decorate


@contextlib.contextmanager
def optional_block(port: str, enter: Callable[[], Any], otherwise: Any = None) -> Iterator[Any]:
    """Run a ``with`` block within the context manager that ``enter()`` returns, or without it if it raises an error."""
    with contextlib.ExitStack() as stack:
        yield optional(port, lambda: otherwise)(lambda: stack.enter_context(enter()))()


def notes() -> list[str]:
    """Return a sentence for each port that failed in this process, and one for a torch that is newer than the tests."""
    untested = Version(torch.__version__).release[:2] > NEWEST_TESTED
    return [f"torch {torch.__version__} is newer than the tested versions"] * untested + [*_failures.values()]
