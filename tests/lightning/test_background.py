"""``background=True``: a helper process compiles while training continues."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._inductor.standalone_compile import AOTCompiledArtifact

from compile_callbacks import CompileWarning, GraphPass, InductorCompile, _torch
from compile_callbacks.background.helper import Helper
from compile_callbacks.graphs.requests import RequestQueue
from compile_callbacks.passes import RecordGraphs
from compile_callbacks.tuning.contest import Contest
from tests.cases.zoo import Calls, breaking
from tests.support.background import SECONDS, assert_trained_as_eager, compiled_steps, is_running, pids, run
from tests.support.models import Classifier, batches_of, fit, loader, mlp, seeded, trainer
from tests.support.processes import start_new_process
from tests.support.step_times import Times

pytestmark = pytest.mark.usefixtures("background_ms", "forked_helper", "no_codegen")
all_versions = pytest.mark.all_versions
SUBPROCESS = "compile_callbacks.background.helper.subprocess"


def reasons(phase, kind="foreground"):
    return [event["reason"] for event in phase.diagnostics.events if event["kind"] == kind]


# ------------------------------------------------------------------------------------------ the switch


@all_versions
def test_training_goes_on_and_switches_when_all_graphs_are_loaded(tmp_path, monkeypatch):
    """With symbolic sizes, gradients accumulated over the switch, and a file that hides one of Python's."""
    monkeypatch.setattr(SUBPROCESS, subprocess)
    monkeypatch.chdir(tmp_path)
    Path("queue.py").write_text("raise ValueError")
    load, processes = AOTCompiledArtifact.deserialize, []
    count = lambda data: processes.append(torch._inductor.config.compile_threads) or load(data)  # noqa: E731
    monkeypatch.setattr(AOTCompiledArtifact, "deserialize", count)
    with monkeypatch.context() as before_the_import:  # which must not be a part of the step with the capture
        before_the_import.delitem(sys.modules, "torch._inductor.compile_fx")
        assert _torch.inductor.begin_marks() is None
    make, data = lambda: seeded(lambda: Classifier(breaking())), batches_of(4, 5, 6, 7, 4, 5, 6, 7)
    callback = InductorCompile(background=True)
    module = run(callback, compiled_steps(12), make(), data=data, accumulate_grad_batches=4)
    assert_trained_as_eager(module, make, data, accumulated=4)
    report, details = callback.report.train, callback.report.train.diagnostics
    assert (report.graphs, report.verified, details.steps) == (2, "equal 2", {"compiled": 12, "eager": 1})
    assert not reasons(report) + reasons(report, "fallback")
    # The baseline and its warm-up steps, and the step with the capture.
    assert len(module.losses) >= 12 + 1 + details.waiting_steps + 12
    assert details.waiting_steps > 0
    assert report.background_seconds > 0
    assert report.compile_seconds > details.load_seconds > 0
    assert details.waiting_step_ms > 0
    assert set(processes) == {1}  # a load starts none for Triton
    assert callback.report.infer.verdict in ("still compiling", "too few samples", "faster", "slower", "no difference")


@all_versions
def test_a_run_that_ends_before_the_compile_is_continued_by_the_next(tmp_path):
    callback, module, data = InductorCompile(background=True), seeded(), loader(7)
    run(callback, lambda report: False, module, data=data, max_steps=14)
    assert (callback.report.train.graphs, callback.report.train.verdict) == (0, "still compiling")
    module.trainer.save_checkpoint(tmp_path / "last.ckpt")
    run(callback, compiled_steps(12), module, data=data, ckpt_path=tmp_path / "last.ckpt")
    assert callback.report.train.diagnostics.steps["compiled"] == 12
    assert_trained_as_eager(module, data=data)


class LearnsSlowly(Classifier):
    """Rounding errors stay small, however many steps the compiles take."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.usefixtures("recompiles_at_once")
def test_candidates_are_compiled_while_the_best_so_far_trains(background_ms, monkeypatch):
    """``"auto"`` also tries the setting that removes a graph break."""
    scaled = lambda net, x: net(x * (1 + x.abs().max().item()))  # noqa: E731
    make, healed = lambda: seeded(lambda: LearnsSlowly(Calls(mlp(), scaled))), "dynamo={'capture_scalar_outputs': True}"
    background_ms.update({"default": 1.5, healed: 1.0})
    monkeypatch.setattr("compile_callbacks.tuning.contest.why_not_compiled", lambda *args: "")
    callback = InductorCompile("auto", None, background=True)
    module = run(callback, lambda report: "chosen" in [t["verdict"] for t in report.train.diagnostics.trials], make())
    train = callback.report.train
    trials = {trial["candidate"]: trial["verdict"] for trial in train.diagnostics.trials}
    assert {"eager": "beaten", "default": "beaten", healed: "chosen"}.items() <= trials.items()
    assert train.mode == healed
    variants = {(series["candidate"], series["kind"]) for series in train.diagnostics.series}
    assert {("waiting", "eager"), ("default", "compiled"), (healed, "compiled")} <= variants
    assert_trained_as_eager(module, make)


SLOWER = "compiled steps were slower in alternating blocks"


@pytest.mark.parametrize(
    ("eager", "compiled", "ranks", "compared", "sent_back"),
    [
        (2.0, 3.0, 1, True, [f"{SLOWER} (2.00 → 3.00 ms)"]),
        ([2.0] * 12 + [4.0], 3.0, 1, True, []),  # the machine became slower
        (2.0, 3.0, 2, False, []),  # each step lasts as long as that of the slowest rank
    ],
)
def test_slower_steps_go_back_to_eager_after_a_comparison(eager, compiled, ranks, compared, sent_back, monkeypatch):
    times = Times(monkeypatch, train={"eager": eager, "waiting": 2.0, None: compiled})
    begin = Contest.begin
    monkeypatch.setattr(Contest, "begin", lambda this, conditions: begin(this, conditions._replace(ranks=ranks)))
    callback, mode = InductorCompile("fast", background=True), "eager" if sent_back else "default"
    run(callback, lambda report: reasons(report.train, "sent_back") or compiled_steps(400)(report))
    train = callback.report.train
    assert (reasons(train, "sent_back"), train.mode) == (sent_back, mode)
    assert re.search(rf"^ *mode +{mode} +default$", str(callback.report), re.MULTILINE)
    assert ("runs eagerly again: " + "".join(sent_back) in str(callback.report)) == bool(sent_back)
    assert (times.counts["train", "eager"] > 12 + 30) == compared  # after the baseline
    assert train.diagnostics.waiting_steps > 0


@pytest.mark.parametrize(("steps", "requests"), [(41, False), (43, True), (-1, True)])
def test_a_compile_that_the_run_cannot_repay_is_not_requested(steps, requests, background_ms, monkeypatch):
    background_ms["eager"] = background_ms["waiting"] = 2000.0
    monkeypatch.setattr("compile_callbacks.session.phase_run.LEAST_SECONDS", 60.0)
    callback, imports = InductorCompile("default", None, background=True), []
    monkeypatch.setattr(_torch.inductor, "import_inductor", lambda: imports.append(1) or 0.0)
    waiting = lambda report: report.train.diagnostics.waiting_steps  # noqa: E731
    run(callback, waiting, max_steps=steps, data=loader(40), starts_process=requests)
    looks_at_each_step = callback.session._step is None
    assert (waiting(callback.report), bool(imports), looks_at_each_step) == (requests,) * 3
    assert len(reasons(callback.report.train, "not_requested")) == (not requests)


# ------------------------------------------------------------------------------------------ in the foreground


class FailsInOtherProcess(GraphPass):
    """Ends the other process when it is loaded there, as the import of a script may."""

    def __init__(self):
        self.pid = os.getpid()

    def __call__(self, graph, is_inference):
        pass

    def __setstate__(self, state):
        vars(self).update(state)
        if os.getpid() != self.pid:
            sys.exit("not here")


@pytest.mark.parametrize(
    ("graph_pass", "reason"),
    [
        (RecordGraphs(), "torch serializes no compiled code with a graph pass whose uuid() is None"),
        (FailsInOtherProcess(), "not here"),
    ],
)
def test_a_graph_that_cannot_be_sent_or_compiled_in_the_helper_process_compiles_in_the_foreground(graph_pass, reason):
    callback = InductorCompile("default", None, background=True, passes=[graph_pass])
    run(callback, compiled_steps(2))
    train, waits = callback.report.train, isinstance(graph_pass, FailsInOtherProcess)
    (found,) = reasons(train)
    assert reason in found
    assert (train.graphs, train.verified, train.diagnostics.waiting_steps > 0) == (1, "equal 1", reason == "not here")
    if not waits:
        assert [graph.kind for graph in graph_pass.graphs] == ["forward", "backward"]


def test_sizes_for_which_the_code_is_not_valid_compile_in_the_foreground(monkeypatch):
    only_four = lambda _, positions: lambda inputs: [inputs[i] for i in positions] == [4]  # noqa: E731
    monkeypatch.setattr(_torch.portable_graphs, "guard_of", only_four)
    callback = InductorCompile("default", None, background=True)
    run(callback, compiled_steps(12), data=batches_of(4, 5, 6, 7, 4, 5, 6, 7))
    train = callback.report.train
    assert reasons(train) == ["the code of another process is not valid for the sizes of a call"]
    assert (train.fallbacks, train.graphs) == (0, 2)


# ------------------------------------------------------------------------------------------ failures


@all_versions
def test_if_the_helper_process_dies_the_steps_stay_eager_and_the_next_run_starts_it_again(tmp_path):
    callback, module, later = InductorCompile("default", None, background=True, cache_dir=tmp_path), seeded(), []

    def is_over(report):
        later.extend([pids(callback)] * report.train.fallbacks)
        return len(later) > 16  # two epochs

    with pytest.warns(CompileWarning, match="background failed: it ended with status -9.*CC308") as caught:
        run(callback, is_over, module, when_waiting=lambda runner: os.kill(*pids(callback), signal.SIGKILL))
    assert len([w for w in caught if "CC308" in str(w.message)]) == 1
    assert not any(later)
    train = callback.report.train
    assert (train.graphs, train.verdict, train.fallbacks) == (0, "not compiled", 1)
    assert_trained_as_eager(module)
    run(callback, compiled_steps(12), module)
    assert callback.report.train.diagnostics.steps["compiled"] == 12
    assert (tmp_path / "inductor" / "aotautograd").exists()  # of the helper process


def test_damaged_code_is_not_used(monkeypatch):
    load = _torch.portable_graphs.load
    monkeypatch.setattr(_torch.portable_graphs, "load", lambda artifact, options: load(artifact[:-20], options))
    callback = InductorCompile("default", None, background=True)
    with pytest.warns(CompileWarning, match="its code cannot be loaded.*CC308"):
        module = run(callback, lambda report: report.train.fallbacks)
    assert_trained_as_eager(module)


@pytest.mark.parametrize(
    ("name", "variable", "reason"),
    [
        ("application", "", "not a Python interpreter"),
        ("python", "_COMPILE_CALLBACKS_HELPER", "started by a helper"),
    ],
)
def test_an_application_is_not_started_again(tmp_path, monkeypatch, name, variable, reason):
    application, started = tmp_path / name, tmp_path / "started"
    application.write_text(f"#!/bin/sh\necho again >> {started}\n")
    application.chmod(0o755)
    monkeypatch.setattr(SUBPROCESS, subprocess)
    monkeypatch.setattr(sys, "executable", str(application))
    monkeypatch.setenv(variable or "UNUSED", "1")
    monkeypatch.setenv("COMPILE_CALLBACKS", "default" if variable else "")
    callback = InductorCompile("default", None, background=True)
    with pytest.warns(CompileWarning, match=f"{reason}.*CC308"):
        fit(callback, max_epochs=3)
    assert callback.report.train.fallbacks == 1
    assert not started.exists()
    assert not [each for each in trainer().callbacks if "compile" in type(each).__module__]


# ------------------------------------------------------------------------------------------ processes


def test_the_number_of_a_process_that_has_ended_is_not_signaled(monkeypatch):
    """Another process may have the number."""
    helper = Helper(RequestQueue([]), lambda problem, keys: pytest.fail(problem))
    helper.start(ranks=1)
    os.kill(helper._process.pid, signal.SIGKILL)
    helper._process.wait()
    monkeypatch.setattr(os, "killpg", pytest.fail)
    helper.stop()


_KILLED = """
from compile_callbacks import InductorCompile
from tests.support.background import pids, run

mode = {"options": {"fallback_by_default": True}}  # a compile of seconds would delay the end of the helper process
callback = InductorCompile(mode, None, background=True, baseline_steps=0)
run(callback, lambda report: False, when_waiting=lambda runner: print("helper", *pids(callback), flush=True))
"""


@all_versions
def test_the_helper_process_ends_if_the_main_process_is_killed(tmp_path):
    script, printed = tmp_path / "script.py", tmp_path / "printed"
    script.write_text(_KILLED)
    process = start_new_process(script, (), environment={"TMPDIR": str(tmp_path)}, printed=printed)
    ends, found = time.monotonic() + SECONDS, None
    while found is None and time.monotonic() < ends:
        time.sleep(0.1)
        found = re.search(r"^helper (\d+)$", printed.read_text() if printed.exists() else "", re.MULTILINE)
    process.kill()
    process.join()
    while is_running(int(found[1])) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not is_running(int(found[1]))
    assert not list(tmp_path.glob("compile_callbacks*"))
