"""`Helper`: compiles the graphs of a `RequestQueue` in another process while this process trains."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from compile_callbacks import _torch
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks.background import IS_HELPER
from compile_callbacks.graphs.requests import RequestQueue
from compile_callbacks.profiling.events import CompileKey

LIMIT_SECONDS = 3600.0
"""The time after which a process that has not answered counts as hanging."""


class Helper:
    """The helper process of a session.

    The process starts before the first step that captures, and imports torch during the capture. It ends when no graph
    waits, because it occupies memory of the GPU, and with the run. A later request starts another one. If the process
    dies or hangs, the graphs stay eager, and none starts in this run.
    """

    def __init__(self, requests: RequestQueue, fails: Callable[[str, Collection[CompileKey]], None]) -> None:
        self._queue, self._fails = requests, fails
        self._compilers = 0  # the number of processes that compile kernels; 0 before the first start
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes]  # the file with its stderr
        self._outbox: queue.SimpleQueue[Any]  # the graphs to send; None ends the thread
        self._answers: queue.SimpleQueue[Any]  # graphs with their code, or the reason why the process ended or hangs

    def start(self, *, ranks: int) -> None:
        """Start the process before its first request, because the import of the compiler takes about ten seconds."""
        if self._compilers:
            return
        affinity = getattr(os, "sched_getaffinity", None)  # of a container, for example
        processors = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        self._compilers = max(1, min(_torch.inductor.settings().compile_threads or 1, (processors - 2) // ranks))
        with contextlib.suppress(Exception):  # `poll` tries again, and reports a failure
            self._start_process()

    def poll(self, *, captures: bool, ranks: int) -> float:
        """Send new requests, and load the code of at most one graph. The caller calls this between two steps.

        If the next step ``captures`` graphs, start the process. Return the seconds of an import of the compiler.
        """
        seconds = 0.0
        if captures:
            self.start(ranks=ranks)
        if not self._queue.active:
            return seconds
        try:
            problem = self._load_next()
            # Before there is code to load, which needs the compiler too, and while the helper process compiles.
            seconds = _torch.inductor.import_inductor()
        except Exception as error:
            problem = in_one_line(describe_failure(error))
        if problem:
            self._queue.failure = problem
            self._fails(problem, {graph.key for graph in self._queue.waiting})
        if not self._queue.active:
            self.stop()
        return seconds

    def _load_next(self) -> str:
        """Load the code of at most one graph. Return the reason why the process ended, or an empty string."""
        if self._process is None:
            self._start_process()
        for graph in self._queue.waiting:
            if graph.sent_to is not self._process:
                graph.sent_to = self._process
                self._outbox.put(graph)
        answered = None if self._answers.empty() else self._answers.get()
        if isinstance(answered, str):
            return answered
        if answered is None or answered[0] not in self._queue.waiting:  # its code was freed
            return ""
        graph, answer = answered
        self._queue.waiting.remove(graph)
        if answer.problem:
            graph.compile_here(answer.problem)
            return ""
        try:
            graph.load(answer)
        except Exception as error:
            reason = f"its code cannot be loaded: {in_one_line(describe_failure(error))}"
            self._fails(reason, {graph.key})
        return ""

    def stop(self) -> None:
        """End the process, and wait until it has ended. The next `poll` requests graphs that still wait again."""
        process, self._process = self._process, None
        if process is None:
            return
        self._outbox.put(None)
        if process.poll() is None:  # otherwise, another process may have its number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._errors.close()

    # ------------------------------------------------------------------------------------------ the process

    def _start_process(self) -> None:
        if IS_HELPER in os.environ:
            raise RuntimeError("this process was started by a helper process, and starts none itself")
        if getattr(sys, "frozen", False) or not Path(sys.executable).name.startswith(("python", "pypy")):
            raise RuntimeError(f"sys.executable is {sys.executable!r}, which is not a Python interpreter")
        self._outbox, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
        ours, theirs = Pipe()
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)  # imports what this process imports
        own = {IS_HELPER: "1", "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": str(self._compilers)}
        with theirs, contextlib.ExitStack() as after_failure:
            after_failure.callback(ours.close)
            self._errors = after_failure.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "compile_callbacks.background.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                process_group=0,  # so that one signal also ends its compilers, and Ctrl-C does not reach it
            )
            after_failure.pop_all()  # `stop` closes the file, and the thread closes the connection
        arguments = ours, self._process, self._errors, self._outbox, self._answers
        threading.Thread(target=self._converse, args=arguments, daemon=True, name="compile_callbacks").start()

    def _converse(self, connection: Connection[Any, Any], process: Any, errors: Any, outbox: Any, answers: Any) -> None:
        """Exchange requests and answers with a process, in a separate thread."""
        with connection:
            try:
                while (graph := outbox.get()) is not None:
                    connection.send_bytes(graph.pickled)
                    if not connection.poll(LIMIT_SECONDS):
                        answers.put(f"it did not answer for {LIMIT_SECONDS:.0f} s")
                        return
                    answers.put((graph, pickle.loads(connection.recv_bytes())))
                    del graph
            except Exception as error:
                answers.put(_why_it_ended(process, errors, error))


def _why_it_ended(process: subprocess.Popen[bytes], errors: IO[bytes], error: Exception) -> str:
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        code = process.wait(timeout=5)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        return f"it ended with status {code}" + (f": {lines[-1]}" if lines else "")
    return in_one_line(describe_failure(error))
