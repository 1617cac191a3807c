"""A hundred processes that write one folder of artifacts, half of them killed; prints what readers found, as JSON.

Run as a program, by itself: a process that has not imported torch is forked in a millisecond.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import types
from pathlib import Path

if __name__ == "__main__":  # a run of doctests imports this file too
    package = types.ModuleType("compile_callbacks")
    package.__path__ = [str(Path(__file__).parent.parent / "compile_callbacks")]
    sys.modules["compile_callbacks"] = package

from compile_callbacks.warm_start.artifacts import Artifact, ArtifactStore

WRITERS, SAVES, KEYS = 100, 5, ("a", "b", "c")


def content(name: str) -> bytes:
    return (name * 300).encode()


def write(folder: str, writer: int) -> None:
    choose = random.Random(writer)
    store = ArtifactStore(folder, limit_mb=0.03)  # less than all of it: files are evicted meanwhile
    for number in range(SAVES):
        name = f"{writer}-{number}"
        store.save(choose.choice(KEYS), [Artifact("inductor", name, content(name))])


def read(folder: str) -> int:
    """How many artifacts are there; each of them must be what its writer wrote."""
    found = [artifact for key in KEYS for artifact in ArtifactStore(folder).load(key)]
    assert all(artifact.content == content(artifact.key) for artifact in found)
    return len(found)


def main(folder: str) -> None:
    choose = random.Random(0)
    writers = {}
    for writer in range(WRITERS):
        if (process := os.fork()) == 0:
            write(folder, writer)
            os._exit(0)
        writers[process] = choose.random() * 0.3 if writer % 2 else None
    started, reads, killed, failed = time.monotonic(), [], 0, 0
    while writers:
        reads.append(read(folder))
        for process, lifetime in list(writers.items()):
            if lifetime is not None and time.monotonic() - started > lifetime:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                del writers[process]
                killed += os.WIFSIGNALED(status)
                failed += os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
    names = [path.name for path in Path(folder).iterdir()]
    abandoned = sum(name.endswith(".tmp") for name in names)
    size = sum((Path(folder) / name).stat().st_size for name in names if not name.endswith(".tmp"))
    print(json.dumps({"reads": len(reads), "found": read(folder), "killed": killed, "failed": failed,
                      "abandoned": abandoned, "size": size}))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
