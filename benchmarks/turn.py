"""A device that several processes share while they prepare: one at a time computes on it, and compiles need no turn.

What is tried out on a device while others use it (Triton's configurations, the candidates of "auto") is tried out
wrongly. So each process computes in its turn, and gives it up while it compiles, which is work for the CPU.
"""

from __future__ import annotations

import fcntl
import functools
import time
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime import benchmarking

from compile_callbacks import _torch

STRETCH_SECONDS = 0.5
"""How long a turn is before others may have theirs: so many steps follow each other without a wait."""


class Turn:
    """This process's turns on a device.

    A lock of the operating system, which the end of a process gives back, and any thread may: backward compiles in
    autograd's own.

    Args:
        file: The same for all processes.
        cuda: Whether the device is a GPU.
    """

    def __init__(self, file: Path, *, cuda: bool) -> None:
        self.compiles = 0
        """Compiles and recordings of CUDA graphs so far."""
        self.compile_seconds = 0.0
        """Time that went into compiling, recordings of CUDA graphs left out."""
        self.waited_seconds = 0.0
        """Time spent waiting for a turn."""
        self._file = file.open("w")
        self._cuda = cuda
        self._held = self._held_before_compile = False
        self._since = self._compile_started = self._waited_before = 0.0

    def take(self) -> None:
        """Wait for a turn, or go on with the one that this process has."""
        if self._held and time.perf_counter() - self._since < STRETCH_SECONDS:
            return
        if self._held:
            self.give()
            time.sleep(0.002)  # else this process would have it again before those who wait wake up
        self._lock()

    def give(self) -> None:
        """Let others have a turn, and the memory that is not in use."""
        if not self._held:
            return
        self.synchronize()
        if self._cuda:
            torch.cuda.empty_cache()
        self._unlock()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._cuda:
            torch.cuda.synchronize()

    def listen(self) -> None:
        """Give the turn up while anything compiles, but take it for what is measured meanwhile."""
        _torch.callback_handler.register_start_callback(self._compile_starts)
        _torch.callback_handler.register_end_callback(self._compile_ends)
        measure = benchmarking.benchmarker.benchmark_gpu

        @functools.wraps(measure)
        def in_turn(*args: Any, **kwargs: Any) -> Any:
            if self._held or not self._held_before_compile:
                return measure(*args, **kwargs)
            self._lock()
            try:
                return measure(*args, **kwargs)
            finally:
                self.synchronize()
                self._unlock()

        benchmarking.benchmarker.benchmark_gpu = in_turn

    def _compile_starts(self, args: Any) -> None:
        self.compiles += 1
        if args.callback_trigger.name == "CUDAGRAPH_RECORDING":
            return
        self._held_before_compile = self._held
        self.give()
        self._compile_started = time.perf_counter()
        self._waited_before = self.waited_seconds

    def _compile_ends(self, args: Any) -> None:
        if args.callback_trigger.name == "CUDAGRAPH_RECORDING":
            return
        waited = self.waited_seconds - self._waited_before
        self.compile_seconds += time.perf_counter() - self._compile_started - waited
        if self._held_before_compile:
            self._held_before_compile = False
            self._lock()

    def _lock(self) -> None:
        started = time.perf_counter()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._since = time.perf_counter()
        self.waited_seconds += self._since - started
        self._held = True

    def _unlock(self) -> None:
        self._held = False
        fcntl.flock(self._file, fcntl.LOCK_UN)
