"""A new package runs in another process first: what reads where nothing is ends the process that runs it."""

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
from compile_callbacks.exporting.call_spec import CallSpec
from compile_callbacks.exporting.exported import ExportedModule, ExportError, load_exported, read_package
from compile_callbacks.failures import describe_failure, in_one_line

_PATIENCE_SECONDS = 300
_CRASHES = {-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)}


def load_after_trial(
    path: Path, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> ExportedModule:
    """Load a package that was just made; one for a GPU is first run by another process.

    Seconds go into that: torch is imported anew. On a GPU a crash is likelier, as the C++ code that launches kernels is
    more, and costs more: an access to memory that is not there takes the GPU from the process for good.

    Args:
        path: The package.
        args: Inputs by position.
        kwargs: Inputs by name.
        device: Where it runs.

    Raises:
        ExportError: It ended the process that ran it, or cannot be loaded.
    """
    if device.type != "cpu":
        try_in_new_process(path, args, kwargs)
    return load_exported(path)


def try_in_new_process(path: Path, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Run a package once in a process of its own.

    Args:
        path: The package.
        args: Inputs by position.
        kwargs: Inputs by name.

    Returns:
        Whether the process came to its end. What else stopped it, an error or somebody's signal, is no fault of the
        package that is known: whoever loads it meets the error too, and knows more of it.

    Raises:
        ExportError: The package crashed, or did not come to its end in time.
    """
    _, metadata = read_package(path)
    spec = CallSpec.from_json(metadata["inputs"])
    with tempfile.TemporaryDirectory() as folder:
        tensors = Path(folder, "inputs.pt")
        torch.save(spec.tensors(spec.bind(args, kwargs)), tensors)
        command = [sys.executable, "-W", "ignore", "-c", _torch.RUN_PACKAGE, str(path), str(tensors)]
        try:
            subprocess.run(command, capture_output=True, timeout=_PATIENCE_SECONDS, check=True)
        except OSError:  # no process can be started, as by a Python that is part of another program
            return False
        except subprocess.TimeoutExpired:
            raise ExportError(f"the package came to no end within {_PATIENCE_SECONDS} s") from None
        except subprocess.CalledProcessError as error:
            if error.returncode in _CRASHES:
                reason = in_one_line(describe_failure(error))
                raise ExportError(
                    f"the package crashes: {reason} (compile-callbacks doctor knows compilers that make such packages)"
                ) from None
            return False
    return True
