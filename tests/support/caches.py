"""Keeps torch's caches between test sessions, and speeds up the C++ compiler. conftest.py imports this before torch."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

# The caches of torch are kept from run to run: a fit that compiles both phases takes 0.5 s of CPU with cached graphs,
# and 1.4 s without. A change of the parts of the package that act within a compile, after the look-up, empties them.
if "COMPILE_CALLBACKS_TEST_CACHE" not in os.environ:
    root = Path(__file__).parents[2]
    cache = root / ".pytest_cache" / f"inductor-{importlib.metadata.version('torch')}"
    os.environ["COMPILE_CALLBACKS_TEST_CACHE"] = str(cache)
    shutil.rmtree(f"{cache}_runs", ignore_errors=True)
    if sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) > 2**30:
        shutil.rmtree(cache, ignore_errors=True)
    inside = ("_torch", "graphs", "passes")
    sources = [path for name in inside for path in (root / "compile_callbacks" / name).glob("*.py")]
    compiled_by = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()
    if not (cache / compiled_by).exists():
        for old in (cache / "aotautograd", cache / "fxgraph", *cache.glob("?" * 64)):
            shutil.rmtree(old, ignore_errors=True)
        (cache / compiled_by).mkdir(parents=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["COMPILE_CALLBACKS_TEST_CACHE"]
# To find out which instruction sets the C++ compiler knows, torch starts it for each one: 9 s of CPU in an empty cache
# folder and, on torch 2.11, 18 s in each process. Every compiler knows AVX2.
with contextlib.suppress(OSError):
    if " avx2 " in Path("/proc/cpuinfo").read_text():
        os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Half of the time of a kernel is its link against torch's libraries. gold is twice as fast as GNU's default linker, but
# not every compiler finds its own libraries for gold, so one library is linked to try.
if "COMPILER_PATH" not in os.environ and (gold := shutil.which("ld.gold")):
    linker = Path(f"{os.environ['COMPILE_CALLBACKS_TEST_CACHE']}_linker")
    linker.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (linker / "ld").symlink_to(gold)
    link = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(linker / "linked.so")]
    environment = {**os.environ, "COMPILER_PATH": str(linker)}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run(link, input=b"int one() { return 1; }", env=environment, capture_output=True, check=True)
        os.environ["COMPILER_PATH"] = str(linker)
