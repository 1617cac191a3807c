"""``background=True`` if the helper process, the run or the process that trains ends early."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import lightning.pytorch as pl
import pytest
import torch

from compile_callbacks import CompileWarning, InductorCompile, _torch
from compile_callbacks.background import IS_HELPER
from compile_callbacks.background.helper import Helper
from compile_callbacks.callbacks.from_environment import callbacks_from_environment
from compile_callbacks.graphs.requests import RequestQueue
from tests.support.background import (
    Until,
    UntilFallback,
    compiling_pids,
    eager_losses,
    images,
    is_running,
    pids,
    resnet18,
    waiting_graph,
)
from tests.support.models import loader, seeded, trainer

pytestmark = pytest.mark.usefixtures("background_ms")
all_versions = pytest.mark.all_versions


class Kill(pl.Callback):
    """Kills the helper process while it compiles."""

    def __init__(self, callback: InductorCompile) -> None:
        self.callback, self.killed = callback, set[int]()

    def on_train_batch_end(self, *args: object) -> None:
        if not self.killed and (found := compiling_pids(self.callback)):
            time.sleep(0.3)
            self.killed = found
            os.kill(next(iter(found)), signal.SIGKILL)


@all_versions
def test_if_the_helper_process_dies_the_steps_stay_eager():
    callback = InductorCompile(background=True)
    kill, module = Kill(callback), resnet18()
    with pytest.warns(CompileWarning, match="background failed: it ended with status -9.*CC308") as caught:
        trainer(callback, kill, UntilFallback(callback), max_epochs=-1).fit(module, images())
    assert len([w for w in caught if "CC308" in str(w.message)]) == 1
    assert kill.killed
    assert not pids(callback)
    assert module.losses == eager_losses(len(module.losses), resnet18(), images()).losses
    train = callback.report.train
    assert (train.graphs, train.verdict, train.fallbacks) == (0, "not compiled", 1)


def test_the_next_run_starts_a_helper_process_again():
    callback, module = InductorCompile(background=True), seeded()
    kill = Kill(callback)
    with pytest.warns(CompileWarning, match="CC308"):
        trainer(callback, kill, UntilFallback(callback), max_epochs=-1).fit(module, loader())
    assert callback.report.train.graphs == 0
    until = Until(callback)
    trainer(callback, until, max_epochs=-1).fit(module, loader())
    assert callback.report.train.diagnostics.steps["compiled"] == until.compiled_steps


def test_damaged_code_is_not_used(monkeypatch):
    load = _torch.portable_graphs.load
    monkeypatch.setattr(_torch.portable_graphs, "load", lambda artifact, options: load(artifact[:-20], options))
    callback, module = InductorCompile(background=True), seeded()
    until = UntilFallback(callback)
    with pytest.warns(CompileWarning, match="its code cannot be loaded.*CC308"):
        trainer(callback, until, max_epochs=-1).fit(module, loader())
    assert time.monotonic() < until.ends
    assert module.losses == eager_losses(len(module.losses)).losses


class Raise(pl.Callback):
    def __init__(self, callback: InductorCompile) -> None:
        self.callback, self.pids = callback, set[int]()

    def on_train_batch_end(self, *args: object) -> None:
        self.pids |= compiling_pids(self.callback)
        if self.pids:
            raise KeyError("the user's")


@all_versions
def test_an_exception_in_the_run_ends_the_helper_process():
    callback = InductorCompile(background=True)
    failing = Raise(callback)
    with pytest.raises(KeyError, match="the user's"):
        trainer(callback, failing, max_steps=50, max_epochs=-1).fit(resnet18(), images())
    assert failing.pids
    assert not any(is_running(pid) for pid in failing.pids)


@pytest.mark.parametrize(("trains_on_cpu", "niceness"), [(True, 0), (False, 5)])
def test_the_helper_process_starts_before_a_request_and_gives_way_only_to_a_gpu(trains_on_cpu, niceness):
    before = os.getpriority(os.PRIO_PROCESS, 0)
    helper = Helper(RequestQueue(), lambda problem, keys: pytest.fail(problem))
    helper.start(trains_on_cpu=trains_on_cpu, ranks=1)
    assert helper._conversation is not None
    pid, ends = helper._conversation._process.pid, time.monotonic() + 60
    while os.getpriority(os.PRIO_PROCESS, pid) != before + niceness and time.monotonic() < ends:
        time.sleep(0.05)
    assert os.getpriority(os.PRIO_PROCESS, pid) == before + niceness
    helper.stop()
    assert not is_running(pid)


def test_a_helper_process_that_cannot_start_leaves_no_open_file(monkeypatch):
    files, make = [], tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: files.append(make()) or files[-1])
    monkeypatch.setattr(sys, "executable", sys.executable + "-is-missing")
    Helper(RequestQueue(), lambda problem, keys: None).start(trains_on_cpu=True, ranks=1)
    assert [file.closed for file in files] == [True]


def test_the_number_of_a_helper_process_that_has_ended_is_not_signaled(monkeypatch):
    """Another process may have it."""
    helper = Helper(RequestQueue(), lambda problem, keys: None)
    helper.start(trains_on_cpu=True, ranks=1)
    os.kill(helper._conversation._process.pid, signal.SIGKILL)
    helper._conversation._process.wait()
    monkeypatch.setattr(os, "killpg", pytest.fail)
    helper.stop()


@pytest.mark.parametrize(
    ("environment", "processors", "compilers"),
    [({"TORCHINDUCTOR_COMPILE_THREADS": "3"}, 64, 3), ({"TORCHINDUCTOR_COMPILE_THREADS": "32"}, 4, 2), ({}, 1, 1)],
)
def test_the_helper_process_takes_no_more_than_the_user_and_the_machine_allow(
    monkeypatch, environment, processors, compilers
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, env, **_: pytest.fail(env["TORCHINDUCTOR_COMPILE_THREADS"])
    )
    threads = int(environment.get("TORCHINDUCTOR_COMPILE_THREADS", 8))
    helper = Helper(RequestQueue([waiting_graph(b"")]), lambda problem, keys: None)
    with (
        torch._inductor.config.patch(compile_threads=threads),
        pytest.raises(pytest.fail.Exception, match=f"^{compilers}$"),
    ):
        helper.start(trains_on_cpu=True, ranks=1)


@pytest.mark.parametrize(
    ("name", "variable", "reason"),
    [("application", "", "not a Python interpreter"), ("python", IS_HELPER, "started by a helper process")],
)
def test_an_application_is_not_started_again(tmp_path, monkeypatch, name, variable, reason):
    application, started = tmp_path / name, tmp_path / "started"
    application.write_text(f"#!/bin/sh\necho again >> {started}\n")
    application.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(application))
    monkeypatch.setenv(variable or "UNUSED", "1")
    monkeypatch.setenv("COMPILE_CALLBACKS", "default" if variable else "")
    callback, module = InductorCompile(background=True), seeded()
    until = UntilFallback(callback)
    with pytest.warns(CompileWarning, match=f"{reason}.*CC308"):
        trainer(callback, until, max_epochs=-1).fit(module, loader())
    assert not started.exists()
    assert callbacks_from_environment() == []


class Exits:
    def __reduce__(self) -> tuple[object, ...]:
        return sys.exit, ("usage: --lr",)


def test_the_users_files_do_not_end_the_helper_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "queue.py").write_text("raise ValueError")
    reasons: list[str] = []
    waiting = waiting_graph(pickle.dumps(Exits()), compile_here=reasons.append)
    helper, ends = Helper(RequestQueue([waiting]), lambda problem, keys: reasons.append(problem)), time.monotonic() + 60
    while not reasons and time.monotonic() < ends:
        helper.poll()
        time.sleep(0.05)
    helper.stop()
    assert reasons == ["SystemExit: usage: --lr"]


_KILLED = """
    import sys
    from compile_callbacks import InductorCompile
    from tests.support.background import compiling_pids, images, resnet18
    from tests.support.models import trainer
    import lightning.pytorch as pl

    callback = InductorCompile(background=True)

    class Print(pl.Callback):
        def on_train_batch_end(self, *args):
            if found := compiling_pids(callback):
                print(*found, flush=True)

    trainer(callback, Print(), max_steps=100000, max_epochs=-1).fit(resnet18(), images())
"""


@all_versions
def test_the_helper_process_ends_if_the_main_process_is_killed(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}  # noqa: PTH109
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_KILLED)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        lines = iter(process.stdout.readline, b"")
        helper = next(int(line) for line in lines if line.strip().isdigit())
        process.kill()
    ends = time.monotonic() + 30
    while is_running(helper) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not is_running(helper)
    assert not list(tmp_path.glob("compile_callbacks*"))
