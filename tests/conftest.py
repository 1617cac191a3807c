"""Fresh compiler state for each test, and nothing of a test left behind in torch."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

# One compiler cache for the whole run, all of its processes included: the first compile of a process builds a C++
# header for seconds. A new one for each run: a pass that torch's cache spares is not seen to run.
os.environ.setdefault("COMPILE_CALLBACKS_TEST_CACHE", f"{tempfile.gettempdir()}/compile_callbacks_tests_{os.getpid()}")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["COMPILE_CALLBACKS_TEST_CACHE"]
# torch asks with a compile and a process for each of the CPU's instruction sets whether the compiler knows it: for 9 s
# of CPU in an empty cache folder and, on torch 2.11, for 18 s in each process. AVX2 is what every compiler knows.
with contextlib.suppress(OSError):
    if " avx2 " in Path("/proc/cpuinfo").read_text():
        os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Half of what a kernel costs is the link against torch's libraries, in which gold is twice as fast as GNU's own linker.
# Not every compiler finds its own libraries for it, so that one library is linked to see.
if "COMPILER_PATH" not in os.environ and (gold := shutil.which("ld.gold")):
    linker = Path(f"{os.environ['COMPILE_CALLBACKS_TEST_CACHE']}_linker")
    linker.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (linker / "ld").symlink_to(gold)
    link = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(linker / "linked.so")]
    environment = {**os.environ, "COMPILER_PATH": str(linker)}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run(link, input=b"int one() { return 1; }", env=environment, capture_output=True, check=True)
        os.environ["COMPILER_PATH"] = str(linker)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors; threads that wait for each other only cost time

import pytest
import torch
import torch._dynamo
import torch._dynamo.config
import torch._inductor.config
from torch._dynamo.callback import callback_handler

from compile_callbacks import CompileWarning
from compile_callbacks.cli.explain import read_entries

# For doctests, pytest would import these modules a second time, under another name: custom operators of theirs would be
# registered twice.
collect_ignore = ["support"]

ENTRIES = read_entries()


def pytest_unconfigure() -> None:
    cache = os.environ["COMPILE_CALLBACKS_TEST_CACHE"]
    if cache.endswith(f"_{os.getpid()}"):
        shutil.rmtree(cache, ignore_errors=True)
        shutil.rmtree(f"{cache}_linker", ignore_errors=True)
        shutil.rmtree(f"{cache}_runs", ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """No compiled code from the test before, and no global setting of torch's changed after it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inductor, dynamo = torch._inductor.config.get_config_copy(), torch._dynamo.config.get_config_copy()
    environment = dict(os.environ)
    hooks = _global_hooks()
    yield
    assert _global_hooks() == hooks
    assert torch._inductor.config.get_config_copy() == inductor
    assert torch._dynamo.config.get_config_copy() == dynamo
    assert callback_handler.start_callbacks == []
    assert callback_handler.end_callbacks == []
    changed = {name for name, value in os.environ.items() if environment.get(name) != value}
    assert not {name for name in changed if not name.startswith(_SET_BY_OTHERS)}


@pytest.fixture(autouse=True)
def _warnings_have_entries(monkeypatch):
    """Each warning of the library has a code that ``compile-callbacks explain`` knows."""
    messages: list[str] = []
    monkeypatch.setattr(CompileWarning, "__init__", lambda warning, *args: messages.extend(map(str, args)))
    yield
    codes = [re.findall(r"\[(CC\d{3}): compile-callbacks explain \1\]$", message) for message in messages]
    assert {code for found in codes for code in found} <= set(ENTRIES)


def _global_hooks() -> dict[str, list[int]]:
    """The keys of the hooks that are registered for every module of the process."""
    hooks = vars(torch.nn.modules.module)
    return {name: list(keys) for name, keys in hooks.items() if name.startswith("_global_") and isinstance(keys, dict)}


@pytest.fixture
def no_codegen(request):
    """Have Inductor call aten's kernels on a CPU: the C++ compiler takes most of the time of a compile.

    For tests whose subject is what happens around a graph, and not the code that is generated for it.
    """
    generates = "gpu" in request.keywords or "codegen" in request.keywords
    with torch._inductor.config.patch(fallback_by_default=not generates):
        yield


@pytest.fixture
def dropped_backends_go():
    """A backend that is active listens to torch until it is collected, which takes a fifth of a second."""
    yield
    if callback_handler.start_callbacks:
        gc.collect()


# torch, Lightning and scikit-learn set some of their own.
_SET_BY_OTHERS = (
    "PYTEST",
    "TORCHINDUCTOR",
    "_TORCHINDUCTOR",
    "PL_",
    "TRITON",
    "CUDA_DEVICE_ORDER",
    "PYTORCH_NVML",
    "KMP_",
)
