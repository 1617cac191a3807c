"""Loops run where Python's stack has room for all that they call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_FRAME_WORDS = 2**16 - 500
"""With the 1,000 words that CPython wants free beyond a frame, this is just too much for a chunk of 2**16 words: it
takes one of 2**17, a megabyte, of which half is left for calls, a thousand deep. Memory that nobody writes to is not
taken."""


def _call(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


_call.__code__ = _call.__code__.replace(co_stacksize=_FRAME_WORDS)


class StackRoom:
    """While it is there, no call that some loops make crosses from one chunk of Python's stack to the next.

    CPython has its stack in chunks of 16 KiB. Where a chunk ends between a loop and what it calls, each call maps a new
    one and gives it back: some 7 us instead of 0.04. A step that makes hundreds of such calls just there pays
    milliseconds, in one script and not in the next, by how deep `fit` was called (https://github.com/python/cpython/
    issues/142183, mended in Python 3.13 and 3.14 in 2026). A frame that says it needs much gets a chunk of its own,
    and what it calls is in the rest of that.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any]] = []  # loops, and the ``run`` that somebody had set on them

    def install(self, *loops: Any) -> None:
        """From here on, each loop's ``run`` has room."""
        self.remove()
        for loop in loops:
            self._before.append((loop, vars(loop).get("run")))
            loop.run = functools.partial(_call, loop.run)

    def remove(self) -> None:
        """The loops are as they were."""
        for loop, run in self._before:
            if run is not None:
                loop.run = run
            else:
                vars(loop).pop("run", None)
        self._before = []
