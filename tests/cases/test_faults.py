"""A failure of the compiler costs speed and nothing else. An error of the user's own code is raised unchanged."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.graph
from torch import nn

from compile_callbacks import CompileError, CompileWarning, InductorCompile, report_of
from tests.cases import zoo
from tests.cases.case import Case, check
from tests.cases.zoo import RAGGED, Calls, CallsInTraining, custom_operator
from tests.support.models import FEATURES, Classifier, Wrapper, batches_of, fit, mlp
from tests.support.passes import Uncached

pytestmark = pytest.mark.usefixtures("no_codegen", "recompiles_at_once")


# ------------------------------------------------------------------------------------------ the compiler fails

CAUSES = {
    "untraceable": "graph_break|autograd.Function",
    "pass": "ZeroDivisionError: by design",
    "memory": "OutOfMemoryError: CUDA",
}


def fault(name: str, phase: str, half: str, shape: str, **settings) -> Case:
    """A case in which the compiler fails at one place; both phases see two shapes, in both epochs."""
    place = zoo.Place(phase, half, shape)
    graph_pass, inside = {
        "untraceable": ([], contextlib.nullcontext),
        "pass": ([zoo.BrokenPass(place)], contextlib.nullcontext),
        # Inductor writes no code for a graph that comes out of torch's cache.
        "memory": ([Uncached()], functools.partial(zoo.out_of_memory_in_inductor, place)),
    }[name]
    # Inductor is tried once for each shape. After a failure of Dynamo, the target runs eagerly.
    failures = 2 if shape == "first" and name != "untraceable" else 1
    graphs, code = int(shape != "first"), "CC701" if name == "pass" else "CC301"
    says = f"^target 'net' runs eagerly in the {phase} phase"
    other = "infer" if phase == "train" else "train"
    expect: dict[str, Any] = {
        f"{each}.{name}": ... for each in ("train", "infer") for name in ("recompiles", "diagnostics.eager_calls")
    }
    expect |= {f"{phase}.diagnostics.skipped_passes": failures if name == "pass" else 0}
    expect |= {f"{phase}.fallbacks": failures, f"{phase}.graphs": graphs, f"{other}.graphs": 2}
    modes = {f"{phase}_mode": {"fullgraph": name == "untraceable"}, f"{other}_mode": "default"}
    return Case(
        name=f"{name}-{phase}-{half}-{shape}",
        make=lambda: Classifier(zoo.struck(place, untraceable=name == "untraceable")),
        train=(4, 4, 4, RAGGED),
        validation=(4, RAGGED),
        predict=None,
        trainer={"max_epochs": 2},
        callback={**modes, "targets": ["net"], "passes": graph_pass, **settings},
        expect=expect,
        codes=(code,),
        says=f"{says}.*({CAUSES[name]})",
        inside=inside,
    )


ROWS = """
untraceable-train-forward-first untraceable-train-backward-later untraceable-infer-forward-first
pass-train-forward-later pass-train-backward-first pass-infer-forward-later
memory-train-forward-first memory-train-backward-later memory-infer-forward-first
"""
FAULTS = [fault(*row.split("-")) for row in ROWS.split()]


@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_a_failure_costs_speed_and_nothing_else(case):
    """The report has each failure, with the cause that the warning names."""
    report = check(case).report
    name, phase, _, shape = case.name.split("-")
    events = report.phase(phase).diagnostics.events
    reasons = [event["reason"] for event in events if event["kind"] == "fallback"]
    assert len(reasons) == (2 if shape == "first" and name != "untraceable" else 1)
    assert all(re.search(CAUSES[name], reason) for reason in reasons)


@pytest.mark.codegen
def test_a_machine_without_a_compiler_trains_eagerly():
    mode = {"options": {"cpp.cxx": ("no-such-compiler",)}}
    callback = InductorCompile(mode, None, targets="net", passes=[Uncached()], baseline_steps=0)
    with pytest.warns(CompileWarning, match=r"runs eagerly .*C\+\+ compiler.*CC301"):
        module = fit(callback)
    assert module.losses == fit().losses
    assert (callback.report.train.graphs, callback.report.train.fallbacks) == (0, 1)


# ------------------------------------------------------------------------------------------ errors of the user's code


class UserError(Exception):
    """What only the user's code raises."""


raised: list[UserError] = []


def guard(x: torch.Tensor) -> torch.Tensor:
    """Raise an error for a ragged batch, and keep it."""
    if x.shape[0] == RAGGED:
        raised.append(UserError())
        raise raised[-1]
    return x


user_kernel = custom_operator("user_kernel", guard)
sound_kernel = custom_operator("sound_kernel", lambda x: x, custom_operator("user_kernel_backward", guard))


class UserFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return guard(gradient)


def doing(does) -> nn.Module:
    return Calls(mlp(), lambda net, x: does(net(x)))


def guilty(does) -> Classifier:
    return Classifier(doing(does))


SINCE_2_13 = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch < 2.13 fails while it traces that backward, which is a failure of the compiler",
)


@pytest.mark.parametrize(("make", "on_error"), [
    pytest.param(lambda: guilty(guard), "eager", id="forward"),
    pytest.param(lambda: guilty(user_kernel), "raise", id="kernel"),
    pytest.param(lambda: guilty(sound_kernel), "eager", id="backward kernel"),
    pytest.param(lambda: guilty(UserFunction.apply), "raise", id="backward of a function", marks=SINCE_2_13),
    pytest.param(lambda: CallsInTraining(mlp(), lambda net, x: net(x) + guard(x).sum()), "eager", id="training step"),
])  # fmt: skip
def test_an_error_of_the_users_comes_through_as_it_is(make, on_error):
    module = make()
    callback = InductorCompile(targets=["net"], baseline_steps=0, on_error=on_error)
    with pytest.raises(UserError) as caught:
        fit(callback, make=lambda: module, train=batches_of(4, 4, RAGGED), validation=None)
    assert caught.value in raised
    assert caught.traceback[-1].path.name == "test_faults.py"  # the file that raised it
    assert caught.traceback[-1].name == "guard"
    assert (callback.report.train.fallbacks, callback.report.infer.fallbacks) == (0, 0)
    assert "_compiled_call_impl" not in vars(module.net)


@pytest.mark.parametrize("on_error", ["eager", "raise"])
def test_an_error_that_dynamo_meets_first_is_the_users_all_the_same(on_error):
    callback = InductorCompile(on_error=on_error, baseline_steps=0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        fit(callback, make=lambda: CallsInTraining(mlp(), lambda net, x: net(x[:, :3])), train=2)
    assert not isinstance(caught.value, CompileError)
    assert callback.report.train.fallbacks == 0
    assert "training_step" in [entry.name for entry in caught.traceback]


# ------------------------------------------------------------------------------------------ out of memory

SHORT: list[str] = []
"""The runs that are out of memory: ``"run"`` is each, and ``"run 2"`` the second one."""
RUNS: list[str] = []
"""The runs so far."""


def allocates_and_doubles(x):
    RUNS.append("run")
    if {"run", f"run {RUNS.count('run')}"} & set(SHORT):
        raise torch.OutOfMemoryError("tried to allocate 1 TiB to run")
    return x * 2


allocates = custom_operator("allocates", allocates_and_doubles, lambda gradient: gradient * 2)


@pytest.fixture
def compile_net(compiled):
    """A function that compiles a net. Each call of the net, which writes statistics by default, allocates."""
    SHORT.clear()
    RUNS.clear()
    mode = {"passes": [Uncached()]}
    return lambda net=None, **settings: compiled(net or doing(allocates), mode, mode, **settings)


def step(net, *short, error=None):
    """Train a step in which these operations are out of memory."""
    SHORT[:] = short
    with pytest.raises(torch.OutOfMemoryError, match=error) if error else contextlib.nullcontext():
        net(torch.ones(4, FEATURES)).sum().backward()


@pytest.mark.all_versions
@pytest.mark.parametrize("on_error", ["eager", "raise"])
def test_a_step_without_memory_raises_its_own_error_and_later_steps_run_compiled(compile_net, on_error):
    writes_nothing = Calls(nn.Linear(FEATURES, 3), lambda net, x: allocates(net(x)))
    net = compile_net(writes_nothing, verify="off", on_error=on_error)
    for operations in (("run",), ("run",), (), ("run 4",), ()):  # eager, the fourth run would not lack memory
        step(net, *operations, error="1 TiB to run" if operations else None)
    report = report_of(net).train
    assert (report.graphs, report.fallbacks) == (1, 0)


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("short", "verified", "runs"),
    [
        ((1,), "not compared 1 (no memory)", 3),  # the eager run of the comparison
        ((2,), "not compared 1 (no memory)", 4),
        ((3,), "equal 1", 4),  # the user's call
    ],
)
def test_a_graph_is_not_compared_if_a_run_lacks_memory(compile_net, short, verified, runs):
    net, x = compile_net(), torch.ones(4, FEATURES)
    SHORT[:] = [f"run {number}" for number in short]
    with torch.no_grad():
        with pytest.raises(torch.OutOfMemoryError, match="1 TiB") if short == (3,) else contextlib.nullcontext():
            net(x)
        net(x)
    assert RUNS.count("run") == runs
    report = report_of(net).infer
    assert (report.verified, report.graphs, report.fallbacks) == (verified, 1, 0)


@pytest.mark.all_versions
@pytest.mark.parametrize(("free", "verified"), [(0, "not compared 1 (no memory)"), (2**40, "equal 1")])
def test_a_graph_is_compared_only_if_the_eager_run_fits_into_the_free_memory(compile_net, free, verified):
    """On a CPU, the memory has no known limit."""
    net, x = compile_net(), torch.ones(4, FEATURES)
    with mock.patch("compile_callbacks.graphs.verification.free_memory", return_value=free):
        for phase in ("train", "infer"):
            with torch.set_grad_enabled(phase == "train"):
                net(x)
            assert report_of(net).phase(phase).verified.startswith(verified)


# ------------------------------------------------------------------------------------------ compiled code fails


def fails_at_second_call(x):
    """The second call is the compiled one."""
    RUNS.append("fails")
    if RUNS.count("fails") == 2:
        raise ValueError("no such kernel")
    return x * 2


fails_compiled = custom_operator("fails_compiled", fails_at_second_call, lambda gradient: gradient * 2)


class FailsCompiled(Wrapper):
    def __init__(self):
        super().__init__(nn.Linear(FEATURES, 16))
        self.python_calls = 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.python_calls += 1
        self.calls += 1
        return fails_compiled(self.net(x))


@pytest.mark.all_versions
@pytest.mark.parametrize("phase", ["train", "infer"])
def test_compiled_code_that_raises_falls_back_without_a_second_call_of_user_code(phase, compiled):
    RUNS.clear()
    module, x = compiled(FailsCompiled()), torch.randn(8, FEATURES)
    reason = "because its compiled code raised an error that eager does not: ValueError: no such kernel"
    with torch.set_grad_enabled(phase == "train"):
        with pytest.warns(CompileWarning, match=f"target 'forward' runs eagerly in the {phase} phase, {reason}"):
            output = module(x)
        torch.testing.assert_close(output, module.net(x) * 2)
        assert (module.calls, module.python_calls) == (1, 1)
        module(x)
    assert (module.calls, module.python_calls) == (2, 2)
    assert report_of(module).phase(phase).fallbacks == 1


@pytest.mark.all_versions
@pytest.mark.parametrize("phase", ["train", "infer"])
def test_a_later_call_that_fails_runs_eagerly_if_the_graph_writes_nothing(phase, compiled):
    module = compiled(Calls(nn.Linear(FEATURES, 3), lambda net, x: fails_compiled(net(x))))
    x = torch.randn(8, FEATURES)
    with torch.set_grad_enabled(phase == "train"):
        RUNS[:] = ["fails"] * 2  # no failure
        expected = module(x)
        RUNS[:] = ["fails"]
        with pytest.warns(CompileWarning, match=f"a part of target 'forward' runs eagerly in the {phase} phase"):
            torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(module(x), expected)
    assert RUNS.count("fails") == 4
    assert report_of(module).phase(phase).fallbacks == 1


@pytest.mark.all_versions
def test_a_later_call_that_fails_in_eager_too_raises_the_error_of_eager(compiled):
    RUNS[:] = ["fails"] * 2  # no failure
    module = compiled(Calls(nn.Embedding(10, 3), lambda net, x: net(x)), infer_mode=None)
    module(torch.tensor([1, 2]))
    with pytest.raises(IndexError):
        module(torch.tensor([1, 12]))
    module(torch.tensor([3, 4]))
    assert (report_of(module).train.graphs, report_of(module).train.fallbacks) == (1, 0)


@pytest.mark.all_versions
def test_an_error_of_a_later_call_names_target_setting_and_remedy(compiled):
    writes = nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3))
    module, x = compiled(Calls(writes, lambda net, x: fails_compiled(net(x)))), torch.randn(8, FEATURES)
    RUNS[:] = ["fails"] * 2  # no failure
    module(x)
    RUNS[:] = ["fails"]
    with pytest.raises(ValueError, match="no such kernel") as caught:
        module(x)
    [note] = caught.value.__notes__
    assert note.startswith("raised by compiled code of target 'forward'; if eager code does not, set train_mode=")
