"""Works around slow calls at the end of a chunk of CPython's stack.

CPython 3.11 and newer keep Python frames in chunks of 16 KiB. If a chunk ends between a loop and the functions that the
loop calls, each call allocates a new chunk and frees it afterwards. Such a call takes about 7 us instead of 0.04 us. A
training step makes hundreds of such calls or none, depending on the stack depth at which ``Trainer.fit`` was called.

See https://github.com/python/cpython/issues/142183. Delete this file when the oldest supported Python has the fix.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

HAS_BUG = sys.implementation.name == "cpython" and (
    sys.version_info < (3, 13, 13) or (3, 14) <= sys.version_info < (3, 14, 4)
)
"""Whether this Python has the bug. Python 3.13.13 and 3.14.4 fixed the bug, and 3.11 and 3.12 did not."""

_FRAME_WORDS = 2**16 - 500
"""The size of a frame that is slightly too large for a chunk of 2**16 words, because CPython needs 1,000 free words.

CPython allocates a chunk of 2**17 words (1 MiB) for such a frame. The functions that the frame calls use the second
half of the chunk, which is large enough for about a thousand frames. Unwritten pages take no memory.
"""


def _call(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


_call.__code__ = _call.__code__.replace(co_stacksize=_FRAME_WORDS)


def install_on(trainer: Trainer) -> None:
    """Run the loops of a trainer in one large chunk until `remove_from`, if this Python has the bug."""
    remove_from(trainer)
    if HAS_BUG:
        for loop in _loops(trainer):
            loop.run = functools.partial(_call, loop.run)


def remove_from(trainer: Trainer) -> None:
    """Undo `install_on`."""
    for loop in _loops(trainer):
        installed = vars(loop).get("run")
        if isinstance(installed, functools.partial) and installed.func is _call:
            del loop.run
            if installed.args[0] != loop.run:  # restore `run` if the instance had its own
                loop.run = installed.args[0]


def _loops(trainer: Trainer) -> tuple[Any, ...]:
    return trainer.fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop
