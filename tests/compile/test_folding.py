"""Weight folding on single graphs: results equal eager's after each change of the weights."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from compile_callbacks import _torch
from compile_callbacks.folding.folded_graph import Folding, compile_inner


class Folded:
    """A module compiled with folding, outside of any callback."""

    def __init__(self, module, *, limit_mib=64.0, dynamic=None, options=None):
        self.refreshes = 0
        self.folding, self._options = Folding(limit_mib, self._count), options or {}
        self.module, self.eager = module, copy.deepcopy(module)

        def call(*args):
            return module(*args)

        self.compiled = torch.compile(call, backend=self._backend, dynamic=dynamic)

    def _count(self):
        self.refreshes += 1

    def _backend(self, graph, inputs):
        with self.folding.active():
            return _torch.inductor.compile_graph(graph, inputs, options=self._options, inner_compile=compile_inner)

    def assert_equals_eager(self, *args, context=torch.no_grad, rtol=1e-4, atol=1e-5):
        self.eager.load_state_dict(self.module.state_dict())
        with context():
            expected = self.eager(*args)
        with context():
            actual = self.compiled(*args)
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
        assert not self.folding.failures
        return actual

    @property
    def graphs(self):
        return len(self.folding.graphs)

    @property
    def folded_bytes(self):
        return sum(graph.folded_bytes for graph in self.folding.graphs)


def bfloat16():
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
    return stack


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


@pytest.mark.parametrize(
    "steps",
    [
        lambda m, y: (y + m.a) * 2 / m.b,
        lambda m, y: m.a - y * m.b,
        lambda m, y: m.a / y,
        lambda m, y: y * m.a * y,
        lambda m, y: (y * m.a).double() * m.b,
        lambda m, y: y * m.a[0] + m.b,
        lambda m, y: y.unsqueeze(0).expand(3, -1, -1) * m.a,
        lambda m, y: y * torch.arange(8) + torch.ones(8),
    ],
    ids=range(8),
)
def test_any_arithmetic_after_a_product(steps):
    torch.manual_seed(0)
    module = Plain(lambda m, x: steps(m, nn.functional.linear(x, m.w, m.c)), w=weight(8, 6), c=weight(8), a=weight(8))
    module.b = weight(1, 8)
    folded = Folded(module)
    for _ in range(2):
        folded.assert_equals_eager(torch.randn(4, 6))
        change_weights(folded.module)


def test_autocast_casts_once_for_each_version_of_the_weights():
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 49, 4))
    folded = Folded(randomized(module))
    x = torch.randn(2, 3, 9, 9)
    for _ in range(2):
        folded.assert_equals_eager(x, context=bfloat16, rtol=2e-2, atol=2)
    assert folded.refreshes == 1
    weights = 8 * 3 * 9 + 8 * 49 * 4 + 4
    assert folded.folded_bytes == 2 * weights + 4 * 8  # bfloat16, except for the sum after the convolution


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_transformer_layer_of_any_batch_size(context, monkeypatch):
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)  # eager alone has a fast path
    torch.manual_seed(0)
    folded = Folded(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), dynamic=True)

    def autocast():
        stack = bfloat16()
        stack.enter_context(context())
        return stack

    for batch in (2, 3):
        folded.assert_equals_eager(torch.randn(batch, 4, 16), context=autocast, rtol=5e-2, atol=5e-2)
    assert (folded.graphs, folded.refreshes) == (1, 1)
    change_weights(folded.module)
    folded.assert_equals_eager(torch.randn(7, 4, 16), context=autocast, rtol=5e-2, atol=5e-2)


def test_expanded_weights_stay_views():
    def with_class_token(module, x):
        x = torch.cat([module.token.expand(x.shape[0], -1, -1), x], 1) + module.positions
        return x[:, 0] @ module.head

    folded = Folded(Plain(with_class_token, token=weight(1, 1, 8), positions=weight(1, 5, 8), head=weight(8, 3)))
    for _ in range(2):
        folded.assert_equals_eager(torch.randn(2, 4, 8), context=bfloat16, rtol=2e-2, atol=2e-2)
        change_weights(folded.module)
    assert folded.folded_bytes == 2 * 8 * 3  # the head, and nothing of the size of a batch


def test_a_tensor_larger_than_its_sources_is_folded_only_for_operators_that_read_it_from_memory():
    def outer(row):
        return row[:, None] * row

    added = Folded(Plain(lambda m, x: x + outer(m.row), row=weight(512)))
    added.assert_equals_eager(torch.randn(512, 512))
    assert added.folded_bytes == 0
    multiplied = Folded(Plain(lambda m, x: x @ outer(m.row), row=weight(512)))
    multiplied.assert_equals_eager(torch.randn(2, 512), atol=1e-3)
    assert multiplied.folded_bytes == 4 * 512 * 512


def test_no_more_memory_than_the_limit():
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.BatchNorm1d(64))
    sizes = []
    for limit_mib in (0.001, 0.02, 1.0):
        folded = Folded(randomized(copy.deepcopy(module)), limit_mib=limit_mib)
        folded.assert_equals_eager(torch.randn(2, 64), context=bfloat16, rtol=0.1, atol=1e8)
        assert folded.folded_bytes <= limit_mib * 2**20
        sizes.append(folded.folded_bytes)
    assert 0 < sizes[0] < sizes[1] < sizes[2]


# ------------------------------------------------------------------------------------------ what is not folded


def test_a_graph_without_weight_arithmetic_is_left_as_it_is():
    folded = Folded(nn.Sequential(nn.Linear(6, 8), nn.ReLU()))
    folded.assert_equals_eager(torch.randn(2, 6))
    assert folded.graphs == 0


def test_random_numbers_are_drawn_on_each_call():
    folded = Folded(Plain(lambda m, x: x @ (m.weight * 2 * torch.rand_like(m.weight)), weight=weight(8, 8)))
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert not torch.equal(folded.compiled(x), folded.compiled(x))


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


def test_a_number_read_from_a_weight_is_read_on_each_call():
    def scaled(module, x):
        return x @ (module.weight[:, None] * (module.weight * module.weight.sum().item()))

    folded = Folded(Plain(scaled, weight=weight(8)))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for _ in range(2):
            folded.assert_equals_eager(torch.randn(2, 8))
            change_weights(folded.module)


def test_an_operator_with_several_results():
    def standardized(module, x):
        variance, mean = torch.var_mean(module.weight, 0)
        upper, lower = ((module.weight - mean) * variance.rsqrt()).chunk(2)
        return x @ upper.t() + x @ lower.t()

    folded = Folded(Plain(standardized, weight=nn.Parameter(torch.randn(8, 8))))
    for _ in range(2):
        folded.assert_equals_eager(torch.randn(2, 8))
        change_weights(folded.module)
    assert (folded.graphs, folded.refreshes) == (1, 2)


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


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def test_tied_weights():
    folded, tokens = Folded(Tied()), torch.randint(10, (2, 3))
    for refreshes in (1, 2):
        folded.assert_equals_eager(tokens, context=bfloat16, rtol=2e-2, atol=2e-2)
        assert (folded.graphs, folded.refreshes) == (1, refreshes)
        change_weights(folded.module)


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_parametrized_module(parametrize):
    torch.manual_seed(0)
    folded = Folded(parametrize(nn.Linear(6, 6)).eval())
    for _ in range(2):
        folded.assert_equals_eager(torch.randn(2, 6))
        change_weights(folded.module)


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


def test_freed_and_invalidated_tensors_are_computed_again():
    make, shape = NETS["convolution"]
    folded = Folded(randomized(make()))
    folded.assert_equals_eager(torch.randn(shape))
    (graph,) = folded.folding.graphs
    folded.module[0].weight.data.mul_(2)  # which neither identity nor version shows
    graph.invalidate_weights()
    for _ in range(2):
        folded.assert_equals_eager(torch.randn(shape))
    assert folded.refreshes == 2
    graph.free()
    assert graph._memory == []
    folded.assert_equals_eager(torch.randn(shape))
    assert folded.refreshes == 3


def test_a_module_that_is_moved_between_dtypes():
    make, shape = NETS["convolution"]
    folded, x = Folded(randomized(make())), torch.randn(shape)
    folded.assert_equals_eager(x)
    folded.module.double(), folded.eager.double()
    folded.assert_equals_eager(x.double())
    change_weights(folded.module)
    folded.module.float(), folded.eager.float()
    folded.assert_equals_eager(x)
    assert folded.graphs == 2


def test_weights_made_under_inference_mode_have_no_version_and_are_read_on_each_call():
    make, shape = NETS["convolution"]
    with torch.inference_mode():
        module = randomized(make())
    folded, x = Folded(module), torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(folded.compiled(x), module(x), rtol=1e-4, atol=1e-5)
        module[0].weight.mul_(2)
        torch.testing.assert_close(folded.compiled(x), module(x), rtol=1e-4, atol=1e-5)


def test_a_failure_of_the_split_leaves_the_graph_to_inductor(monkeypatch):
    def failing(*args):
        raise KeyError("unexpected")

    monkeypatch.setattr("compile_callbacks.folding.folded_graph.split", failing)
    make, shape = NETS["convolution"]
    folded = Folded(randomized(make()), options={"force_disable_caches": True})
    x = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(folded.compiled(x), folded.eager(x), rtol=1e-4, atol=1e-5)
    assert folded.folding.failures == ["KeyError: 'unexpected'"]
