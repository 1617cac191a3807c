"""`torch.OutOfMemoryError` and other errors while a target compiles, runs, or is compared with eager."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch._inductor.graph
from torch import nn

from compile_callbacks import CompileError, CompileWarning, compile_phases, report_of, restore
from compile_callbacks.graphs.accuracy import COMPARISON_BYTES
from tests.support.models import FEATURES, Wrapper
from tests.support.uncached import Uncached

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

SHORT: list[str] = []
"""The operations that are out of memory: ``"run"`` and ``"compile"``."""


def allocate(operation):
    if operation in SHORT:
        raise torch.OutOfMemoryError(f"tried to allocate 1 TiB to {operation}")


@torch.library.custom_op("compile_callbacks_tests::allocates", mutates_args=())
def allocates(x: torch.Tensor) -> torch.Tensor:
    allocate("run")
    return x * 2


allocates.register_fake(torch.empty_like)
allocates.register_autograd(lambda ctx, gradient: gradient * 2)


class Net(Wrapper):
    def forward(self, x):
        return allocates(self.net(x))


@pytest.fixture
def memory():
    """The list `SHORT`, while Inductor allocates, too."""
    compile_to_module = torch._inductor.graph.GraphLowering.compile_to_module

    def allocating(lowering):
        allocate("compile")
        return compile_to_module(lowering)

    with mock.patch.object(torch._inductor.graph.GraphLowering, "compile_to_module", allocating):
        yield SHORT
    SHORT.clear()


@pytest.fixture
def net():
    module = Net()
    yield module
    restore(module)


def compile_net(net, **settings):
    return compile_phases(net, train_mode={"passes": [Uncached()]}, infer_mode={"passes": [Uncached()]}, **settings)


def step(net):
    net(torch.ones(4, FEATURES)).sum().backward()


@pytest.mark.parametrize("on_error", ["eager", "raise"])
@pytest.mark.parametrize("operations", [("run",), ("compile", "run")])
def test_a_step_without_memory_raises_its_own_error_and_later_steps_run_compiled(net, memory, operations, on_error):
    compile_net(net, verify="off", on_error=on_error)
    for compiled in (False, False, True):
        if compiled:
            memory.clear()
            step(net)
        memory[:] = operations
        with pytest.raises(torch.OutOfMemoryError, match="1 TiB to run"):
            step(net)
    memory.clear()
    step(net)
    report = report_of(net).train
    assert (report.graphs, report.fallbacks) == (1, 0)


def test_a_graph_whose_compile_alone_lacks_memory_runs_eagerly(net, memory):
    compile_net(net)
    memory.append("compile")
    with pytest.warns(CompileWarning, match=r"the compiler failed: OutOfMemoryError: .* 1 TiB to compile"):
        step(net)
    step(net)
    memory[:] = ["run"]
    with pytest.raises(torch.OutOfMemoryError, match="1 TiB to run"):
        step(net)
    memory.clear()
    step(net)
    report = report_of(net).train
    assert (report.graphs, report.fallbacks) == (0, 1)


def test_raise_names_the_target_if_the_compile_alone_lacks_memory(net, memory):
    compile_net(net, on_error="raise")
    memory.append("compile")
    with pytest.raises(CompileError, match=r"failed: OutOfMemoryError: .* 1 TiB to compile"):
        step(net)


@pytest.mark.parametrize("call", [1, 2], ids=["the eager run of the comparison", "the user's call"])
def test_a_graph_is_not_compared_if_a_run_lacks_memory(net, memory, call):
    compile_net(net)
    runs = []

    def allocate(operation):
        runs.append(operation)
        if runs.count("run") == call:
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    x = torch.ones(4, FEATURES)
    with torch.no_grad(), mock.patch(f"{__name__}.allocate", allocate):
        with pytest.raises(torch.OutOfMemoryError, match="1 TiB") if call == 2 else contextlib.nullcontext():
            net(x)
        net(x)
    assert runs.count("run") == 3
    report = report_of(net).infer
    assert (report.verified, report.graphs, report.fallbacks) == ("not compared 1 (no memory)", 1, 0)


# -------------------------------------------------------------------------------- the comparison would lack memory


MIB = 2**20


class Wide(nn.Module):
    """Computes two values of 2 MiB from an input and a weight of 1 MiB each, and an output of 2 MiB."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512, 512))

    def forward(self, x):
        return torch.cat([x, self.weight]).cos().exp()


NEEDED = {"train": 3 * 2 + 1 + 3 * 2 + 2 * 2, "infer": 2 * 2}
"""MiB: all values, the gradient, three outputs and two values; or the two values that exist at one time."""


@pytest.mark.parametrize("phase", ["train", "infer"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_graph_is_compared_only_if_the_eager_run_fits_into_the_free_memory(phase, missing, compiled):
    module = compiled(Wide())
    free = COMPARISON_BYTES + NEEDED[phase] * MIB - missing
    with (
        mock.patch("compile_callbacks.graphs.verification.free_memory", return_value=free),
        torch.set_grad_enabled(phase == "train"),
    ):
        outputs = module(torch.ones(512, 512))
    torch.testing.assert_close(outputs, Wide()(torch.ones(512, 512)))
    report = getattr(report_of(module), phase)
    assert report.verified == ("not compared 1 (no memory)" if missing else "equal 1")


def test_a_comparison_that_does_not_fit_runs_nothing_eagerly(net, memory):
    compile_net(net)
    runs = []
    with (
        mock.patch("compile_callbacks.graphs.verification.free_memory", return_value=0),
        mock.patch(f"{__name__}.allocate", runs.append),
    ):
        step(net)
    assert runs.count("run") == 1
    [event] = [event for event in report_of(net).train.diagnostics.events if event["kind"] == "verify"]
    assert event["reason"].endswith("MiB, and 0 MiB are free")


# ---------------------------------------------------------------------------------------------- compiled code fails


calls: list[str] = []


@torch.library.custom_op("compile_callbacks_tests::fails_compiled", mutates_args=())
def fails_compiled(x: torch.Tensor) -> torch.Tensor:
    """Fails at its second call, which is the compiled one."""
    calls.append("fails_compiled")
    if len(calls) == 2:
        raise ValueError("no such kernel")
    return x * 2


fails_compiled.register_fake(torch.empty_like)
fails_compiled.register_autograd(lambda ctx, gradient: gradient * 2)


class FailsCompiled(Wrapper):
    def __init__(self):
        super().__init__(nn.Linear(FEATURES, 16))
        calls.clear()
        self.python_calls = 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.python_calls += 1
        self.calls += 1
        return fails_compiled(self.net(x))


@pytest.mark.parametrize("phase", ["train", "infer"])
def test_compiled_code_that_raises_falls_back_without_a_second_call_of_user_code(compiled, phase):
    module = compiled(FailsCompiled())
    x = torch.randn(8, FEATURES)
    reason = "because its compiled code raised an error that eager does not: ValueError: no such kernel"
    with torch.set_grad_enabled(phase == "train"):
        with pytest.warns(CompileWarning, match=f"target 'forward' runs eagerly in the {phase} phase, {reason}"):
            output = module(x)
        torch.testing.assert_close(output, module.net(x) * 2)
        assert (module.calls, module.python_calls) == (1, 1)
        module(x)
    assert (module.calls, module.python_calls) == (2, 2)
    assert report_of(module).phase(phase).fallbacks == 1
