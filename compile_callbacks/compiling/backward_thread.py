"""Backward passes on a GPU run in a thread of autograd's own; this has them run in the one that asks for them."""

from __future__ import annotations

import torch


class BackwardInCallingThread:
    """While it is on, backward passes that this thread asks for run in it.

    Autograd computes on each GPU from a thread of its own, while the one that asked waits. That is two changes from one
    thread to the other in each step, onto a core whose caches know nothing of the step: of the steps that wait for the
    host, a fifth (`benchmarks/overhead.py`). Nothing is lost where one thread can keep the GPU busy; results are the
    same (`torch.autograd.set_multithreading_enabled`).
    """

    def __init__(self) -> None:
        self._off: torch.autograd.set_multithreading_enabled | None = None

    def begin(self) -> None:
        """On from here, if it is not yet."""
        if self._off is None:
            self._off = torch.autograd.set_multithreading_enabled(False)  # acts at once, and knows what was before

    def end(self) -> None:
        """As it was before `begin`."""
        if self._off is not None:
            self._off.__exit__(None, None, None)
            self._off = None
