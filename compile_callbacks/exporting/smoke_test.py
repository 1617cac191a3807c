"""The smoke test of a new package: another process runs the package once, before this process loads it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks.exporting.loaded_package import (
    ExportedModule,
    ExportError,
    load_exported,
    read_package,
    read_spec,
)

_TIMEOUT_SECONDS = 300
_CRASHES = {-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)}


def load_after_smoke_test(
    path: Path, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> ExportedModule:
    """Load a new package; run a package for a GPU in another process first.

    The smoke test takes seconds, because the process imports torch. On a GPU, a crash is more likely, because
    AOTInductor generates more C++ code to launch kernels. It is also worse: after an invalid memory access, the process
    cannot use the GPU any more.
    """
    if device.type != "cpu":
        run_in_new_process(path, args, kwargs)
    return load_exported(path)


def run_in_new_process(path: Path, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Run a package once in a new process, and return whether it succeeded.

    A crash or a timeout raises an `ExportError`. Another error does not, because the process that loads the package
    raises the same error with more details.
    """
    _, metadata = read_package(path)
    spec = read_spec(path, metadata)
    with tempfile.TemporaryDirectory() as folder:
        tensors = Path(folder, "inputs.pt")
        torch.save(spec.tensors(spec.bind(args, kwargs)), tensors)
        command = [sys.executable, "-P", "-W", "ignore", "-c", _torch.export.RUN_PACKAGE, str(path), str(tensors)]
        try:
            subprocess.run(command, capture_output=True, timeout=_TIMEOUT_SECONDS, check=True)
        except OSError:  # a Python that is embedded in another program cannot start a process
            return False
        except subprocess.TimeoutExpired:
            text = f"the package did not end within {_TIMEOUT_SECONDS} s"
            raise ExportError(with_code("CC601", text)) from None
        except subprocess.CalledProcessError as error:
            if error.returncode in _CRASHES:
                text = f"the package crashes: {in_one_line(describe_failure(error))}"
                raise ExportError(with_code("CC601", text)) from None
            return False
    return True
