"""`verify` on a GPU: CUDA graphs, and the memory that a comparison takes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from compile_callbacks import CompileWarning, compile_phases, report_of, restore
from compile_callbacks.graphs import accuracy
from tests.support.models import FEATURES, Cosines, mlp
from tests.support.passes import WrongForward

pytestmark = pytest.mark.gpu


def recordings_and_memory(verify):
    torch.compiler.reset()  # frees the CUDA graphs of other tests
    modes = {"train_mode": "reduce-overhead", "infer_mode": "reduce-overhead"}
    module, x = compile_phases(mlp().cuda(), **modes, verify=verify), torch.randn(8, FEATURES, device="cuda")
    for _ in range(4):
        module.zero_grad()  # gradients may lie in memory of the CUDA graph, which its next run overwrites
        module(x).square().mean().backward()
        with torch.no_grad():
            module(x)
    report = report_of(module)
    assert report.train.verified == report.infer.verified == (None if verify == "off" else "equal 1")
    assert module[1].num_batches_tracked == 8
    module.zero_grad()
    roots = torch._inductor.cudagraph_trees.get_manager(x.device.index).get_roots()
    children = sorted(len(node.children) for node in roots)
    torch.cuda.empty_cache()
    memory = torch.cuda.memory_reserved()
    restore(module)
    return children, memory


def test_with_cuda_graphs_all_results_are_compared_before_torch_records():
    unverified = [recordings_and_memory("off") for _ in range(2)][1]  # the first run also loads libraries
    assert recordings_and_memory("raise") == unverified


def test_with_cuda_graphs_verify_eager_gives_the_results_of_eager_in_the_same_call_already(compiled):
    eager = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 3)).cuda()
    x = torch.randn(8, FEATURES, device="cuda")
    module = copy.deepcopy(eager)
    compiled(module, train_mode="reduce-overhead", passes=[WrongForward("train")], verify="eager")
    with pytest.warns(CompileWarning, match="output 0 has a relative error"):
        output = module(x)
    output.sum().backward()
    expected = eager(x)
    expected.sum().backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in eager.parameters()])


def test_a_comparison_takes_no_more_memory_than_an_eager_step_a_copy_of_the_outputs_and_one_of_the_gradients(compiled):
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    net, x = nn.Sequential(*layers).cuda(), torch.randn(4096, 1024, device="cuda")

    def peak(step):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before

    eager = peak(lambda: torch.autograd.grad(net(x).sum(), list(net.parameters())))
    compiled(net, verify="raise")
    compared = peak(lambda: net(x))
    gradients = sum(weight.nbytes for weight in net.parameters())
    assert compared <= eager + x.nbytes + gradients + accuracy.COMPARISON_BYTES
    assert report_of(net).train.verified == "equal 1"


def test_a_comparison_that_does_not_fit_is_skipped_before_the_process_runs_out_of_memory(compiled):
    rows, width = 2**14, 1024
    net, x = compiled(Cosines(width).cuda(), verify="raise"), torch.randn(rows, FEATURES, device="cuda")
    torch.cuda.empty_cache()
    total, out_of_memory = torch.cuda.get_device_properties().total_memory, torch.cuda.memory_stats()["num_ooms"]
    room_for_values = 12 * rows * width * 4
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room_for_values) / total)
        net(x).sum().backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert report_of(net).train.verified == "not compared 1 (no memory)"
    assert torch.cuda.memory_stats()["num_ooms"] == out_of_memory


class Attention(nn.Module):
    def __init__(self, written_out):
        super().__init__()
        self.project, self.written_out = nn.Linear(64, 192), written_out

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        if not self.written_out:
            return nn.functional.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT / 4).softmax(-1) @ v


def test_wrong_gradients_of_torch_are_found():
    """torch 2.11 computes wrong gradients of attention that is written out, if a fused one was compiled before it."""
    x = torch.randn(2, 48, 64, device="cuda", requires_grad=True)
    for written_out, enabled in ((False, False), (False, True), (True, False), (True, True)):
        torch.compiler.reset()
        torch.manual_seed(0)
        module = Attention(written_out).cuda()
        exact = torch.autograd.grad(copy.deepcopy(module).double()(x.double()).square().mean(), x)[0]
        compile_phases(module)
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled), warnings.catch_warnings(action="ignore"):
            output = module(x)
        (gradient,) = torch.autograd.grad(output.float().square().mean(), x)
        restore(module)
        assert (gradient - exact).norm() < 0.02 * exact.norm()
