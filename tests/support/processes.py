"""New processes that are forked from one that has imported torch and Lightning: importing them takes seconds of CPU.

They know nothing else of the process that asks for them, and have another hash seed than it has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ROOT = Path(__file__).parents[2]

_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["lightning.pytorch", "torch._inductor.compile_fx", "compile_callbacks._torch"])
# A forked process cannot use CUDA if torch has asked the driver for its devices before.
_spawned = multiprocessing.get_context("spawn")


def run_in_new_process(
    source: str, *arguments: object, environment: Mapping[str, str] | None = None, seconds: float = 200
) -> str:
    """Run a script as ``python script.py *arguments`` would, without warnings, and return what it printed.

    ``environment`` has more variables, but not those that torch reads when it is imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, printed = Path(folder, "script.py"), Path(folder, "printed")
        script.write_text(textwrap.dedent(source))
        process = start_new_process(script, arguments, environment=environment, printed=printed)
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
        said = printed.read_text() if printed.exists() else ""
        assert process.exitcode == 0, f"exit status {process.exitcode}: {said[-3000:]}"
        return said


def start_new_process(
    script: Path,
    arguments: Iterable[object],
    *,
    environment: Mapping[str, str] | None = None,
    printed: Path,
    uses_gpu: bool = False,
) -> multiprocessing.process.BaseProcess:
    """Start a script as `run_in_new_process` does, and write its output to the file ``printed``."""
    variables = {**os.environ, **(environment or {})}
    context = _spawned if uses_gpu else _forked
    process = context.Process(target=_run, args=(script, [str(a) for a in arguments], variables, printed))
    process.start()
    return process


def _run(script: Path, arguments: list[str], variables: dict[str, str], printed: Path) -> None:
    os.environ.clear()
    os.environ.update(variables)
    sys.path.insert(0, str(_ROOT))
    sys.argv = [str(script), *arguments]
    warnings.simplefilter("ignore")
    with printed.open("w") as file:
        for stream in (1, 2):  # what C++ prints, too
            os.dup2(file.fileno(), stream)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            runpy.run_path(str(script), run_name="__main__")


class ForkedHelper:
    """Stands in for `subprocess.Popen` of the helper process, which it forks from the process that has torch."""

    def __init__(self, command: list[str], *, pass_fds: list[int], env: Mapping[str, str], stderr: Any, **_: Any):
        connections = Connection(os.dup(pass_fds[0])), Connection(os.dup(stderr.fileno()), readable=False)
        self._process = _forked.Process(target=_help, args=(command[-1], dict(env), *connections))
        self._process.start()
        self.pid = self._process.pid
        for connection in connections:
            connection.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("helper", timeout or 0)
        return self._process.exitcode


def subprocess_with_forked_helper() -> SimpleNamespace:
    return SimpleNamespace(**{**vars(subprocess), "Popen": ForkedHelper})


def _help(niceness: str, environment: Mapping[str, str], connection: Connection, errors: Connection) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    os.dup2(errors.fileno(), 2)
    import torch._inductor.config

    torch._inductor.config.compile_threads = int(environment["TORCHINDUCTOR_COMPILE_THREADS"])
    sys.argv = ["worker", str(connection.fileno()), niceness]
    runpy.run_module("compile_callbacks.background.worker", run_name="__main__")
