"""Weight folding on single graphs: results equal eager's after each change of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_callbacks import report_of

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.fixture
def folded(compiled):
    """Compiles a module with folding in the infer phase."""
    return lambda module: compiled(module, train_mode=None, infer_mode={"fold_weights": True}, verify="off")


def folding_of(module):
    """The number of graphs with folded weights, and how often these were computed."""
    report = report_of(module).infer
    events = [event for event in report.diagnostics.events if event["kind"] == "fold"]
    assert ([event for event in events if event.get("reason")], report.fallbacks) == ([], 0)
    return len(events), report.diagnostics.weight_refreshes


def assert_equals_eager(module, x, rtol=1e-4, atol=1e-5):
    with torch.no_grad():
        actual, expected = module(x), module._call_impl(x)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    return actual


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


NETS = {
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()), (2, 3, 9, 9)),
    "with a bias": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, groups=4), nn.BatchNorm2d(8)), (2, 4, 9, 9)),
    "one channel": (lambda: nn.Sequential(nn.Conv2d(3, 1, 3), nn.BatchNorm2d(1)), (2, 3, 9, 9)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)), (2, 3, 9, 9)),
    "linear": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8)), (4, 6)),
    "linear without bias": (lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)), (4, 6)),
}


@pytest.mark.parametrize("name", NETS)
def test_batch_norms_are_folded_into_products(folded, name):
    make, shape = NETS[name]
    module, x = folded(randomized(make())), torch.randn(shape)
    for refreshes in (1, 2):
        for _ in range(2):
            assert_equals_eager(module, x)
        assert folding_of(module) == (1, refreshes)
        change_weights(module)


def counting(module, x):
    module.steps += 1
    if module.breaks:
        torch._dynamo.graph_break()
    return x @ (module.steps[:, None] * module.scale)


@pytest.mark.filterwarnings("ignore:fold_weights=True has no effect")
@pytest.mark.parametrize("breaks", [False, True], ids=["in the graph", "in another graph"])
def test_a_buffer_that_forward_changes_is_read_on_each_call(folded, breaks):
    module = Plain(counting, steps=torch.zeros(8), scale=nn.Parameter(torch.ones(8)))
    module.breaks = breaks
    folded(module)
    with torch.no_grad():
        for step in range(1, 4):
            torch.testing.assert_close(module(torch.ones(2, 8)), torch.full((2, 8), 8.0 * step))
    assert folding_of(module)[0] == breaks


@pytest.mark.codegen
def test_outputs_are_not_in_memory_that_is_written_again(folded):
    def returning(module, x):
        cast = module.weight.bfloat16()
        return x @ cast, cast.t(), module.weight * 2

    module = folded(Plain(returning, weight=nn.Parameter(torch.rand(8, 8) + 0.5)))
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    before = assert_equals_eager(module, x)
    kept = [tensor.clone() for tensor in before]
    change_weights(module)
    after = assert_equals_eager(module, x)
    assert not torch.equal(after[1], kept[1])
    assert all(torch.equal(tensor, copied) for tensor, copied in zip(before, kept, strict=True))
    before[1].zero_(), before[2].zero_()
    assert_equals_eager(module, x)


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
def test_each_change_is_seen_by_the_next_call(folded, change):
    make, shape = NETS["one channel"]
    module, x = folded(randomized(make())), torch.randn(shape)
    assert_equals_eager(module, x)
    change(module)
    assert_equals_eager(module, x)
    assert folding_of(module)[1] == 2
