"""`torch.OutOfMemoryError` while a target compiles, while it runs, and while it is compared with eager."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch._inductor.graph

from compile_callbacks import CompileError, CompileWarning, compile_phases, report_of, restore
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


def test_a_graph_is_not_compared_if_the_users_call_lacks_memory(net, memory):
    compile_net(net)
    runs = []

    def allocate(operation):
        runs.append(operation)
        if runs.count("run") == 2:  # the first run is the eager run of the comparison
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    x = torch.ones(4, FEATURES)
    with torch.no_grad(), mock.patch(f"{__name__}.allocate", allocate):
        with pytest.raises(torch.OutOfMemoryError, match="1 TiB"):
            net(x)
        net(x)
    report = report_of(net).infer
    assert (report.verified, report.graphs, report.fallbacks) == ("not compared 1 (no memory)", 1, 0)
