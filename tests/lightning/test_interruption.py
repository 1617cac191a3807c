"""Ctrl-C and SIGTERM while something compiles: the run stops as it would without the callback, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")

# Trains until a signal interrupts it: in the fourth step, while a compiler or a graph pass runs, or in an eager step.
RUN = """
import os, shutil, signal, stat, sys, time
from pathlib import Path

# A process in the background of a shell ignores Ctrl-C, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

folder, place, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
reached = folder / "reached"

import torch
import torch._inductor.config
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from tests.support.models import Classifier, loader, seeded, trainer
from tests.support.uncached import Uncached

from compile_callbacks import InductorCompile


def interrupted():
    if not reached.exists():
        reached.touch()
        time.sleep(seconds)


class Slow(Uncached):
    def __call__(self, graph, is_inference):
        interrupted()


class SlowStep(Classifier):
    def training_step(self, batch, batch_idx):
        if place == "eager" and batch_idx == 3:
            interrupted()
        return super().training_step(batch, batch_idx)


callbacks = [OnExceptionCheckpoint(folder)]
if place != "eager":
    graph_pass = Slow() if place == "pass" else Uncached()
    callbacks.append(InductorCompile("default", None, targets=["net"], passes=[graph_pass],
                                     baseline_steps=1, verify="off"))
if place == "compiler":
    compiler = folder / "g++"
    compiler.write_text(f"#!/bin/sh\\n[ $# -gt 1 ] && [ ! -e {reached} ] && touch {reached} && exec sleep {seconds}\\n"
                        f'exec {shutil.which("g++")} "$@"\\n')
    compiler.chmod(stat.S_IRWXU)
    torch._inductor.config.cpp.cxx = (str(compiler),)

module = seeded(SlowStep)
trainer(*callbacks, max_epochs=4, enable_checkpointing=True).fit(module, loader(8), loader(2))
print("ran to the end")
"""


def processes(mark: str) -> list[str]:
    """The command lines of processes that were started with ``mark`` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended, or belongs to another user
    return found


def interrupt(folder: Path, place: str, how: str, seconds: float) -> tuple[int, str]:
    """Start a run, interrupt it at ``place``, and wait for its end."""
    folder.mkdir()
    mark = f"COMPILE_CALLBACKS_TEST={folder}"
    environment = os.environ | {
        "COMPILE_CALLBACKS_TEST": str(folder),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), place, str(seconds)],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (folder / "reached").exists():
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        if how == "ctrl-c":
            os.killpg(run.pid, signal.SIGINT)  # a terminal sends the signal to all of its processes
        else:
            os.kill(run.pid, signal.SIGTERM if how == "sigterm" else signal.SIGINT)
        said, _ = run.communicate(timeout=100)
        deadline = time.monotonic() + 10
        while (left := processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == []
        return run.returncode, said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "how", "seconds"),
    [
        ("compiler", "ctrl-c", 90),  # a terminal sends the signal to the C++ compiler too
        ("pass", "sigterm", 4),  # Lightning ends the step before it stops at SIGTERM
    ],
)
def test_an_interrupted_compile_ends_as_lightning_would_end_it(place, how, seconds, tmp_path):
    eager_status, _ = interrupt(tmp_path / "eager", "eager", how.replace("ctrl-c", "sigint"), seconds)
    status, said = interrupt(tmp_path / "ours", place, how, seconds)
    assert status == eager_status, said
    assert "ran to the end" not in said
    checkpoints = [tmp_path / name / "on_exception.ckpt" for name in ("ours", "eager")]
    assert checkpoints[0].exists() == checkpoints[1].exists()
    if not checkpoints[0].exists():
        return
    saved, expected = (torch.load(path, weights_only=False) for path in checkpoints)
    assert saved["global_step"] == expected["global_step"]
    assert list(saved["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(saved["state_dict"], expected["state_dict"], rtol=1e-4, atol=1e-5)
