"""All checks, one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

from compile_callbacks.checks import compiling, machine, packages, toolchain
from compile_callbacks.checks.check import Check, said

_CHECKS: dict[str, Callable[[], Check | None]] = {
    "python": packages.check_python,
    "torch": packages.check_torch,
    "torchvision": packages.check_torchvision,
    "triton": packages.check_triton,
    "lightning": packages.check_lightning,
    "tensorboard": packages.check_tensorboard,
    "GPU": machine.check_gpu,
    "C++ compiler": toolchain.check_cpp_compiler,
    "Python headers": toolchain.check_python_headers,
    "cache folder": machine.check_cache_folder,
    "compile on CPU": compiling.check_compile_on_cpu,
    "compile on GPU": compiling.check_compile_on_gpu,
}


def run_checks() -> list[Check]:
    """Look at everything, what other things need first; no error of a check ends this."""
    done = []
    for name, look in _CHECKS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what others warn of meanwhile is for the check to tell
            try:
                check = look()
            except Exception as error:
                check = Check(status="warning", found=f"could not be looked at: {said(error)}")
        if check is not None:
            done.append(replace(check, name=name))
    return done
