"""Weight folding on single graphs: results equal eager's after each change of the weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.folding.folded_graph import Folding, compile_inner

pytestmark = pytest.mark.usefixtures("no_codegen")


class Folded:
    """A module compiled with folding, outside of any callback."""

    def __init__(self, module):
        self.refreshes = 0
        self.folding = Folding(64.0, self._count)
        self.module, self.eager = module, copy.deepcopy(module)

        def call(*args):
            return module(*args)

        self.compiled = torch.compile(call, backend=self._backend)

    def _count(self):
        self.refreshes += 1

    def _backend(self, graph, inputs):
        with self.folding.active():
            return _torch.inductor.compile_graph(graph, inputs, options={}, inner_compile=compile_inner)

    def assert_equals_eager(self, *args, rtol=1e-4, atol=1e-5):
        self.eager.load_state_dict(self.module.state_dict())
        with torch.no_grad():
            expected = self.eager(*args)
        with torch.no_grad():
            actual = self.compiled(*args)
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
        assert not self.folding.failures
        return actual

    @property
    def graphs(self):
        return len(self.folding.graphs)


def randomized(module):
    """With statistics and scales that a batch norm has after training."""
    torch.manual_seed(0)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2) if "var" in name or tensor.dim() == 1 else tensor.normal_()
    return module.eval()


def change_weights(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.25)


class Plain(nn.Module):
    """A forward in one line, with its parameters and buffers."""

    def __init__(self, forward, **tensors):
        super().__init__()
        self._forward = forward
        for name, tensor in tensors.items():
            register = self.register_parameter if isinstance(tensor, nn.Parameter) else self.register_buffer
            register(name, tensor)

    def forward(self, x):
        return self._forward(self, x)


def weight(*shape):
    return nn.Parameter(torch.rand(shape) + 0.5)


# ------------------------------------------------------------------------------------------ what is folded

NETS = {
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()), (2, 3, 9, 9)),
    "with a bias": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, groups=4), nn.BatchNorm2d(8)), (2, 4, 9, 9)),
    "one channel": (lambda: nn.Sequential(nn.Conv2d(3, 1, 3), nn.BatchNorm2d(1)), (2, 3, 9, 9)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)), (2, 3, 9, 9)),
    "linear": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8)), (4, 6)),
    "linear without bias": (lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)), (4, 6)),
}


@pytest.mark.parametrize("name", NETS)
def test_batch_norms_are_folded_into_products(name):
    make, shape = NETS[name]
    folded = Folded(randomized(make()))
    x = torch.randn(shape)
    for refreshes in (1, 2):
        for _ in range(2):
            folded.assert_equals_eager(x)
        assert (folded.graphs, folded.refreshes) == (1, refreshes)
        change_weights(folded.module)


# ------------------------------------------------------------------------------------------ what is not folded


def counting(module, x):
    module.steps += 1
    if module.breaks:
        torch._dynamo.graph_break()
    return x @ (module.steps[:, None] * module.scale)


@pytest.mark.parametrize("breaks", [False, True], ids=["in the graph", "in another graph"])
def test_a_buffer_that_forward_changes_is_read_on_each_call(breaks):
    module = Plain(counting, steps=torch.zeros(8), scale=nn.Parameter(torch.ones(8)))
    module.breaks = breaks
    folded = Folded(module)
    with torch.no_grad():
        for step in range(1, 4):
            torch.testing.assert_close(folded.compiled(torch.ones(2, 8)), torch.full((2, 8), 8.0 * step))
    assert folded.graphs == breaks


@pytest.mark.codegen
def test_outputs_are_not_in_memory_that_is_written_again():
    def returning(module, x):
        cast = module.weight.bfloat16()
        return x @ cast, cast.t(), module.weight * 2

    folded = Folded(Plain(returning, weight=weight(8, 8)))
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    before = folded.assert_equals_eager(x)
    kept = [tensor.clone() for tensor in before]
    change_weights(folded.module)
    after = folded.assert_equals_eager(x)
    assert not torch.equal(after[1], kept[1])
    assert all(torch.equal(tensor, copied) for tensor, copied in zip(before, kept, strict=True))
    before[1].zero_(), before[2].zero_()
    folded.assert_equals_eager(x)


# ------------------------------------------------------------------------------------------ how weights change


def replace_parameter(module):
    module[0].weight = nn.Parameter(torch.ones_like(module[0].weight))


def replace_scalar_parameter_by_an_equal_one(module):
    module[1].weight = nn.Parameter(module[1].weight.detach().clone())
    change_weights(module)


def load(module, **kwargs):
    state = {name: torch.rand_like(v.float()).to(v.dtype) for name, v in module.state_dict().items()}
    module.load_state_dict(state, **kwargs)


def load_assigning(module):
    load(module, assign=True)


def optimizer_step(module, **kwargs):
    optimizer = torch.optim.AdamW(module.parameters(), 0.5, **kwargs)
    module(torch.ones(2, 3, 9, 9)).square().mean().backward()
    optimizer.step()
    module.zero_grad()


def fused_optimizer_step(module):
    optimizer_step(module, fused=True)


def swap_data(module):
    module[0].weight.data = torch.ones_like(module[0].weight)
    with torch.no_grad():
        module[1].weight.mul_(2)


def edit_under_inference_mode(module):
    with torch.inference_mode():
        module[0].weight.mul_(2)


CHANGES = [replace_parameter, replace_scalar_parameter_by_an_equal_one, load, load_assigning, optimizer_step]
CHANGES += [fused_optimizer_step, swap_data, edit_under_inference_mode]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_each_change_is_seen_by_the_next_call(change):
    make, shape = NETS["one channel"]
    folded = Folded(randomized(make()))
    x = torch.randn(shape)
    folded.assert_equals_eager(x)
    change(folded.module)
    folded.assert_equals_eager(x)
    assert folded.refreshes == 2
