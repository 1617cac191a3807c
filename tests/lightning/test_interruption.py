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

# Trains until a signal interrupts it: in the fourth step, while a compiler or a graph pass runs, or before the step.
RUN = """
import shutil, signal, sys, time
from pathlib import Path

# A process in the background of a shell ignores Ctrl-C, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

folder, place, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
reached = folder / "reached"

import torch._inductor.config
from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint
from tests.support.models import loader, seeded, trainer
from tests.support.uncached import Uncached

from compile_callbacks import InductorCompile


class Slow(Uncached):
    def __call__(self, graph, is_inference):
        if not reached.exists():
            reached.touch()
            time.sleep(seconds)


if place == "eager":
    ours = LambdaCallback(on_train_batch_start=lambda *args: args[-1] == 3 and Slow()(None, False))
else:
    passes = [Slow() if place == "pass" else Uncached()]
    ours = InductorCompile("default", None, targets=["net"], passes=passes, baseline_steps=1, verify="off")
if place == "compiler":
    compiler = folder / "g++"
    compiler.write_text(f"#!/bin/sh\\n[ $# -gt 1 ] && [ ! -e {reached} ] && touch {reached} && exec sleep {seconds}\\n"
                        f'exec {shutil.which("g++")} "$@"\\n')
    compiler.chmod(0o700)
    torch._inductor.config.cpp.cxx = (str(compiler),)
callbacks = OnExceptionCheckpoint(folder), ours
trainer(*callbacks, max_epochs=4, enable_checkpointing=True).fit(seeded(), loader(8), loader(2))
print("ran to the end")
"""


def processes(mark):
    """The command lines of processes that were started with ``mark`` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes())
    return found


def interrupt(folder, place, how, seconds):
    """Start a run, interrupt it at ``place``, and wait for its end. Return its status, output and checkpoint."""
    folder.mkdir()
    variables = {"COMPILE_CALLBACKS_TEST": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    environment = os.environ | variables | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command, output = [sys.executable, "-c", RUN, str(folder), place, str(seconds)], folder / "printed"
    with output.open("w") as file:
        run = subprocess.Popen(command, env=environment, cwd=folder, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_until(lambda: (folder / "reached").exists() or run.poll() is not None, 120)
        assert run.poll() is None, output.read_text()
        time.sleep(0.5)
        if how == "ctrl-c":
            os.killpg(run.pid, signal.SIGINT)  # a terminal sends the signal to all of its processes
        else:
            os.kill(run.pid, signal.SIGTERM if how == "sigterm" else signal.SIGINT)
        status = run.wait(timeout=100)
        wait_until(lambda: not processes(f"COMPILE_CALLBACKS_TEST={folder}"), 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    path = folder / "on_exception.ckpt"
    saved = torch.load(path, weights_only=False) if path.exists() else {"state_dict": {}}
    return status, output.read_text(), (saved.get("global_step"), dict(saved["state_dict"]))


def wait_until(is_true, seconds):
    ends = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < ends
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "how", "seconds"),
    [
        ("compiler", "ctrl-c", 90),  # a terminal sends the signal to the C++ compiler too
        ("pass", "sigterm", 4),  # Lightning ends the step before it stops at SIGTERM
    ],
)
def test_an_interrupted_compile_ends_as_lightning_would_end_it(place, how, seconds, tmp_path):
    eager_status, _, expected = interrupt(tmp_path / "eager", "eager", how.replace("ctrl-c", "sigint"), seconds)
    status, said, saved = interrupt(tmp_path / "ours", place, how, seconds)
    assert status == eager_status, said
    assert "ran to the end" not in said
    torch.testing.assert_close(saved, expected, rtol=1e-4, atol=1e-5)
