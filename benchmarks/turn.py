"""Lets several processes prepare on one device: one at a time computes on it, while others compile on the CPU.

Measurements while compiling (Triton's configurations, the candidates of "auto") are wrong if another process uses the
device. So each process computes only in its turn, and ends its turn while it compiles.
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

STRETCH_SECONDS = 0.5  # a turn lasts at least that long, so that most steps run without waiting


class Turn:
    """The turns of this process on a device.

    The lock of the file is released when the process ends, and any thread may release it: autograd compiles backward
    graphs in its own thread.
    """

    def __init__(self, file: Path, *, cuda: bool) -> None:
        self.compiles = 0  # compiles and recordings of CUDA graphs
        self.compile_seconds = 0.0  # without the recordings
        self.waited_seconds = 0.0
        self._file = file.open("w")
        self._cuda = cuda
        self._held = self._held_before_compile = False
        self._since = self._compile_started = self._waited_before = 0.0

    def take(self) -> None:
        """Wait for a turn, or continue the current one."""
        if self._held and time.perf_counter() - self._since < STRETCH_SECONDS:
            return
        if self._held:
            self.give()
            time.sleep(0.002)  # else this process takes the lock before the waiting ones wake up
        self._lock()

    def give(self) -> None:
        """End the turn, and free the memory that is not in use."""
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
        """End the turn while anything compiles, and take one for each measurement during a compile."""
        _torch.events.callback_handler.register_start_callback(self._compile_starts)
        _torch.events.callback_handler.register_end_callback(self._compile_ends)
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
