"""The functions of this library between torch's code and a compiled graph."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.symbolic_convert
import torch.distributed as dist
from torch import nn

import compile_callbacks
from compile_callbacks import CompileWarning, InductorConfig, report_of
from tests.support.models import FEATURES, Wrapper, mlp

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

OURS = str(Path(compile_callbacks.__file__).parent)


def frames_around_the_compiled_code(call):
    """Return the longest chain of our functions between torch's code for a target and the compiled function."""
    longest: list[str] = []

    def look(frame, event, _):
        nonlocal longest
        if event != "call" or frame.f_code.co_filename.startswith(OURS):
            return
        chain = []
        while (frame := frame.f_back) is not None and frame.f_code.co_filename.startswith(OURS):
            chain.append(frame.f_code.co_qualname)
        # Dynamo's code for the target has the name of our function, which is beneath the dispatcher.
        is_graph = chain and chain[-1].startswith(("CompiledGraph", "CudaGraph"))
        # The check for a failed first run has returned before the compiled function is called.
        if is_graph and chain[0] != "end_failed_warmup" and len(chain) > len(longest):
            longest = chain

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return longest


@pytest.mark.parametrize("verify", ["off", "warn"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", [mlp, lambda: nn.Linear(FEATURES, 3)], ids=["with batch norm", "linear"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_later_call_adds_one_frame_and_another_one_for_cuda_graphs(compiled, make, grad, verify, device):
    mode = "reduce-overhead" if device == "cuda" else "default"
    module = compiled(make().to(device), train_mode=mode, infer_mode=mode, verify=verify)
    x = torch.randn(4, FEATURES, device=device)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            module(x)
        assert frames_around_the_compiled_code(lambda: module(x)) == (
            ["CudaGraph.__call__", "CompiledGraph.__call__"] if device == "cuda" else ["CompiledGraph.__call__"]
        )


@pytest.fixture
def process_group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["default", InductorConfig(fullgraph=True)])
def test_a_bad_batch_and_a_failure_of_dynamo_are_handled_in_the_clones_of_ddps_optimizer(
    compiled, process_group, mode, monkeypatch
):
    class Raising(Wrapper):
        bad = False

        def forward(self, x):
            if self.bad:
                raise KeyError("bad")
            return self.net(x)

    module, x = compiled(Raising(), train_mode=mode), torch.randn(4, FEATURES)
    with torch._dynamo.config.patch(optimize_ddp="ddp_optimizer"):
        parallel = nn.parallel.DistributedDataParallel(module)
        for module.bad in (False, True, False):
            with pytest.raises(KeyError) if module.bad else contextlib.nullcontext():
                parallel(x).sum().backward()
        assert (report_of(module).train.graphs, report_of(module).train.fallbacks) == (1, 0)
        # Another module, because torch skips code that raised an exception of the user's.
        parallel = nn.parallel.DistributedDataParallel(compiled(Raising(), train_mode=mode))
        monkeypatch.setattr(torch._dynamo.symbolic_convert.InstructionTranslator, "run", lambda self: 1 / 0)
        with pytest.warns(CompileWarning, match="'forward' runs eagerly in the train phase.*ZeroDivisionError"):
            parallel(torch.randn(5, FEATURES)).sum().backward()
