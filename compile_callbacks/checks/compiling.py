"""Whether torch.compile works here: an addition, compiled for real."""

from __future__ import annotations

import time

import torch

from compile_callbacks.checks.check import Check, said
from compile_callbacks.checks.machine import has_gpu
from compile_callbacks.checks.remedies import install
from compile_callbacks.checks.toolchain import cpp_compiler_remedy


def check_compile_on_cpu() -> Check:
    """Whether an addition on the CPU compiles and gives the right sum."""
    return _compile_on("cpu")


def check_compile_on_gpu() -> Check | None:
    """The same on the GPU; ``None`` without one."""
    return _compile_on("cuda") if has_gpu() else None


def _compile_on(device: str) -> Check:
    # A number that no earlier run had: its code comes from no cache, so that the compilers really run.
    number = 1 + time.time_ns() % 2**40
    consequence = f"modules on the {device.replace('cuda', 'GPU').replace('cpu', 'CPU')} run uncompiled"

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + (number if torch.compiler.is_compiling() else 0)

    started = time.perf_counter()
    x = torch.arange(1000, device=device)
    try:
        total = torch.compile(add)(x)
    except Exception as error:
        return Check(status="failed", found=said(error), consequence=consequence, remedy=_remedy(said(error)))
    seconds = time.perf_counter() - started
    if torch.equal(total, x):
        return Check(
            status="failed",
            found="torch.compile does nothing",
            consequence=consequence,
            remedy="unset TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE and TORCHDYNAMO_SUPPRESS_ERRORS",
        )
    if not torch.equal(total, x + number):
        return Check(
            status="failed",
            found="an addition gives a wrong sum",
            consequence="compiled modules compute something else",
            remedy="pip install --force-reinstall torch",
        )
    return Check(found=f"an addition compiled in {seconds:.1f} s, with the right sum")


def _remedy(found: str) -> str:
    if "C++ compiler" in found:
        return cpp_compiler_remedy()
    if "C compiler" in found:  # what Triton builds its launchers with
        return f"{install('gcc')}, or set CC to a compiler that is elsewhere"
    return "the remedies of the checks before this one; if there are none, TORCH_LOGS='+inductor' says more"
