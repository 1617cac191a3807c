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
from typing import Any

from compile_callbacks import _torch
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks.background import IS_HELPER
from compile_callbacks.graphs.requested_graph import RequestedGraph
from compile_callbacks.graphs.requests import CompileAnswer, RequestQueue
from compile_callbacks.profiling.events import CompileKey

IDLE_SECONDS = 300.0
"""The time without a request after which the process ends. The next request starts it again."""

LIMIT_SECONDS = 3600.0
"""The time after which a process that has not answered counts as hanging."""


class Helper:
    """The helper process of a session.

    The process starts with the first stage that compiles, and imports torch before the first request. It ends with the
    run, with this process, and after `IDLE_SECONDS`. If it dies or hangs, the graphs stay eager, and it does not start
    again in this run.
    """

    def __init__(self, requests: RequestQueue, fails: Callable[[str, Collection[CompileKey]], None]) -> None:
        self._queue = requests
        self._fails = fails
        self._conversation: _Conversation | None = None
        self._trains_on_cpu = False
        self._compilers = 1

    def start(self, *, trains_on_cpu: bool, ranks: int) -> None:
        """Start the process before its first request. Do nothing if it runs, or failed in this run.

        It has a low priority, unless the threads of training on the CPU occupy all processors and wait for each other
        by spinning. With a low priority, the process would get almost no processor time.
        """
        if self._conversation is not None or self._queue.failure is not None:
            return
        self._trains_on_cpu = trains_on_cpu
        self._compilers = max(1, min(_torch.inductor.settings().compile_threads or 1, (_processors() - 2) // ranks))
        with contextlib.suppress(Exception):  # `poll` tries again, and reports a failure
            self._conversation = _Conversation(self._trains_on_cpu, self._compilers)

    def poll(self) -> None:
        """Send new requests, and load the code of at most one graph. The caller calls this between two steps."""
        if not self._queue.active:
            return
        try:
            problem = self._load_next()
        except Exception as error:
            problem = in_one_line(describe_failure(error))
        if problem:
            self.stop()
            self._queue.failure = problem
            self._fails(problem, {graph.key for graph in self._queue.waiting})

    def _load_next(self) -> str:
        """Load the code of at most one graph. Return the reason why the process ended, or an empty string."""
        answered = self._conversation.answer() if self._conversation is not None else None
        if answered is None and (self._conversation is None or self._conversation.has_ended):
            self.stop()
            self._conversation = _Conversation(self._trains_on_cpu, self._compilers)
        if isinstance(answered, str):
            return answered
        self._conversation.send(self._queue.waiting)  # type: ignore[union-attr]
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
        """End the process. Graphs that still wait are requested again by the next `poll`."""
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            conversation.stop()


_Answer = tuple[RequestedGraph, CompileAnswer] | str
"""The compiled code of a graph, or the reason why the process ended or hangs."""


def _processors() -> int:
    """Return the number of processors that this process may use, such as those of a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Conversation:
    """One helper process, and the thread that waits for its answers."""

    def __init__(self, trains_on_cpu: bool, compilers: int) -> None:
        if IS_HELPER in os.environ:
            raise RuntimeError("this process was started by a helper process, and starts none itself")
        if getattr(sys, "frozen", False) or not Path(sys.executable).name.startswith(("python", "pypy")):
            raise RuntimeError(f"sys.executable is {sys.executable!r}, which is not a Python interpreter")
        self._trains_on_cpu = trains_on_cpu
        self._requests: queue.SimpleQueue[RequestedGraph | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        ours, theirs = Pipe()
        worker = "compile_callbacks.background.worker", str(theirs.fileno()), "0" if trains_on_cpu else "5"
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)  # imports what this process imports
        with theirs, contextlib.ExitStack() as after_failure:
            after_failure.callback(ours.close)
            self._errors = after_failure.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *worker],
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    IS_HELPER: "1",
                    "PYTHONPATH": path,
                    "TORCHINDUCTOR_COMPILE_THREADS": str(compilers),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                process_group=0,  # so that one signal also ends its compilers, and Ctrl-C does not reach it
            )
            after_failure.pop_all()  # `stop` closes the file, and the thread closes the connection
        self._thread = threading.Thread(target=self._converse, args=(ours,), daemon=True, name="compile_callbacks")
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, because it had no request for a long time."""
        return not self._thread.is_alive() and self._answers.empty()

    def send(self, graphs: list[RequestedGraph]) -> None:
        """Send the requests that the process did not get yet."""
        for graph in graphs:
            if graph.sent_to is not self:
                graph.sent_to = self
                self._requests.put(graph)

    def answer(self) -> _Answer | None:
        """Return an answer, or ``None`` if there is none yet."""
        return None if self._answers.empty() else self._answers.get()

    def stop(self) -> None:
        """End the process, and wait until it has ended."""
        self._requests.put(None)
        if self._process.poll() is None:  # otherwise, another process may have its number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()

    def _converse(self, connection: Connection[Any, Any]) -> None:
        with connection:
            try:
                while (graph := self._requests.get(timeout=IDLE_SECONDS)) is not None:
                    connection.send_bytes(graph.pickled)
                    if self._trains_on_cpu:
                        with contextlib.suppress(Exception):  # as without a C++ compiler; `load` then raises it again
                            _torch.portable_graphs.prepare_loading()
                    if not connection.poll(LIMIT_SECONDS):
                        raise TimeoutError(f"it did not answer for {LIMIT_SECONDS:.0f} s")
                    self._answers.put((graph, pickle.loads(connection.recv_bytes())))
                    del graph
            except queue.Empty:
                pass
            except Exception as error:
                self._answers.put(self._why_it_ended(error))

    def _why_it_ended(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return str(error)
        try:
            code = self._process.wait(timeout=5)
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return in_one_line(describe_failure(error))
        return f"it ended with status {code}" + (f": {lines[-1]}" if lines else "")
