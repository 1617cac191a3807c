"""`verify` on a GPU: CUDA graphs, and the memory that a comparison takes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compile_callbacks import CompileWarning, compile_phases, report_of, restore
from tests.support.models import FEATURES, mlp
from tests.support.wrong_passes import WrongForward

pytestmark = pytest.mark.gpu


def plain():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 3)).cuda()


def test_with_cuda_graphs_outputs_are_compared_in_training_and_all_results_in_inference():
    module, x = compile_phases(mlp().cuda(), train_mode="reduce-overhead", infer_mode="reduce-overhead"), None
    for _ in range(4):
        x = torch.randn(8, FEATURES, device="cuda")
        module.zero_grad()  # gradients may lie in memory of the CUDA graph, which its next run overwrites
        module(x).square().mean().backward()
    with torch.no_grad():
        module(x)
    report = report_of(module)
    assert report.train.verified == "outputs only 1"
    assert report.infer.verified == "equal 1"
    assert module[1].num_batches_tracked == 5
    restore(module)


def test_with_cuda_graphs_verify_eager_gives_the_results_of_eager_in_the_same_call_already():
    eager, x = plain(), torch.randn(8, FEATURES, device="cuda")
    module = copy.deepcopy(eager)
    compile_phases(module, train_mode="reduce-overhead", passes=[WrongForward("train")], verify="eager")
    with pytest.warns(CompileWarning, match="output 0 has a relative error"):
        output = module(x)
    output.sum().backward()
    expected = eager(x)
    expected.sum().backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in eager.parameters()])
    restore(module)


def test_dropout_is_compared_if_compiled_code_draws_the_numbers_of_eager():
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, 3)).cuda()
    compile_phases(net, train_mode={"options": {"fallback_random": True}}, verify="raise")
    net(torch.randn(8, FEATURES, device="cuda")).sum().backward()
    assert report_of(net).train.verified == "equal 1"
    restore(net)


def test_a_comparison_takes_no_more_memory_than_an_eager_step_a_copy_of_the_outputs_and_one_of_the_gradients():
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    net, x = nn.Sequential(*layers).cuda(), torch.randn(4096, 1024, device="cuda")

    def peak(step):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before

    eager = peak(lambda: torch.autograd.grad(net(x).sum(), list(net.parameters())))
    compile_phases(net, verify="raise")
    compared = peak(lambda: net(x))
    gradients = sum(weight.nbytes for weight in net.parameters())
    chunks = 8 * 8 * 2**22  # that are compared at a time, in float64
    assert compared <= eager + x.nbytes + gradients + chunks
    assert report_of(net).train.verified == "equal 1"
    restore(net)
