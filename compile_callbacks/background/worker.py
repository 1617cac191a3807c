"""The helper process: compiles one graph after another. `Helper` starts it with ``python -m``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path


def main() -> None:
    """Receive requests, and send answers, until the process that trains closes the connection or ends."""
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(Exception):  # a request then reports it
        _prepare()
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send_bytes(_answer(connection.recv_bytes()))
    os.killpg(0, signal.SIGKILL)  # also ends the compilers


def _prepare() -> None:
    """Import the compiler before the first request, which takes about ten seconds, and start its processes."""
    from compile_callbacks import _torch
    from compile_callbacks.graphs import requests  # noqa: F401

    _torch.inductor.import_inductor(starts_processes=True)


def _answer(request: bytes) -> bytes:
    """Compile a graph. Of several processes with one cache and the same graph, one compiles, and the others load."""
    from filelock import FileLock

    from compile_callbacks._utils.messages import describe_failure, in_one_line
    from compile_callbacks.graphs.requests import CompileAnswer

    try:
        folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir(), f"locks_{os.getuid()}")
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"compile_callbacks_{hashlib.sha256(request).hexdigest()}.lock"):
            # Only the process that started this one can write to the connection.
            answer = pickle.loads(request).compile()
    except (Exception, SystemExit) as error:  # a module of the user's may exit when it is imported
        answer = CompileAnswer(problem=in_one_line(describe_failure(error)))
    return pickle.dumps(answer)


if __name__ == "__main__":
    main()
