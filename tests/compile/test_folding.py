"""Weight folding on single graphs: right results whatever changes, folded where it pays, given up where it must be."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from compile_callbacks import _torch
from compile_callbacks.folding.fold_settings import FoldSettings
from compile_callbacks.folding.folded import compile_inner, folding


class Folded:
    """A module compiled with folding, outside of any callback."""

    def __init__(self, module, *, limit_mib=64.0, dynamic=None, cached=True):
        self._patches = {} if cached else {"force_disable_caches": True}
        self.graphs, self.left_out, self.refreshes = [], [], 0
        self.settings = FoldSettings(limit_mib, self.graphs.append, self.left_out.append, self._count)
        eager = copy.deepcopy(module)
        self.module, self._eager = module, eager

        def call(*args):
            return module(*args)

        self._compiled = torch.compile(call, backend=self._backend, dynamic=dynamic)

    def _count(self):
        self.refreshes += 1

    def _backend(self, graph, inputs):
        with folding(self.settings):
            return _torch.inductor.compile_graph(
                graph,
                inputs,
                patches=self._patches,
                fallback=lambda error: False,
                on_lowered=lambda seconds, backward: None,
                inner_compile=compile_inner,
            )

    def assert_equals_eager(self, *args, context=torch.no_grad, rtol=1e-4, atol=1e-5):
        self._eager.load_state_dict(self.module.state_dict())
        with context():
            expected = self._eager(*args)
        with context():
            actual = self._compiled(*args)
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
        assert not self.left_out
        return actual

    @property
    def folded_bytes(self):
        return sum(graph.folded_bytes for graph in self.graphs)


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


# ------------------------------------------------------------------------------------------ what is folded

NETS = {
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()), (2, 3, 9, 9)),
    "with a bias": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8)), (2, 3, 9, 9)),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8)), (2, 4, 9, 9)),
    "one channel": (lambda: nn.Sequential(nn.Conv2d(3, 1, 3), nn.BatchNorm2d(1)), (2, 3, 9, 9)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.BatchNorm2d(8)), (2, 3, 9, 9)),
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), (4, 6)),
    "linear without bias": (lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)), (4, 6)),
    "batch norm first": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8)), (4, 6)),
    "without affine": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)), (2, 3, 9, 9)),
}


@pytest.mark.parametrize("name", NETS)
def test_batch_norms_are_folded_into_products(name):
    make, shape = NETS[name]
    folded = Folded(randomized(make()))
    x = torch.randn(shape)
    for _ in range(2):
        folded.assert_equals_eager(x)
    assert (len(folded.graphs), folded.refreshes) == (1, 1)
    change_weights(folded.module)
    for _ in range(2):
        folded.assert_equals_eager(x)
    assert (len(folded.graphs), folded.refreshes) == (1, 2)


class Steps(nn.Module):
    """Arithmetic around a product that a batch norm does not have."""

    def __init__(self, steps):
        super().__init__()
        self.product = nn.Linear(6, 8)
        self.a, self.b = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.rand(1, 8) + 0.5)
        self._steps = steps

    def forward(self, x):
        return self._steps(self, self.product(x))


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
    folded = Folded(Steps(steps).eval())
    folded.assert_equals_eager(torch.randn(4, 6))
    change_weights(folded.module)
    folded.assert_equals_eager(torch.randn(4, 6))


def test_autocast_casts_once_for_each_version_of_the_weights():
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 49, 4))
    folded = Folded(randomized(module))
    x = torch.randn(2, 3, 9, 9)
    for _ in range(2):
        folded.assert_equals_eager(x, context=bfloat16, rtol=2e-2, atol=2)
    assert folded.refreshes == 1
    weights = 8 * 3 * 9 + 8 * 49 * 4 + 4
    assert folded.folded_bytes == 2 * weights + 4 * 8  # bfloat16 but for what is added after the convolution


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_transformer_layer_of_any_batch_size(context, monkeypatch):
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)  # eager's, which compiled has not
    torch.manual_seed(0)
    folded = Folded(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), dynamic=True)

    def autocast():
        stack = bfloat16()
        stack.enter_context(context())
        return stack

    for batch in (2, 3, 5):
        folded.assert_equals_eager(torch.randn(batch, 4, 16), context=autocast, rtol=5e-2, atol=5e-2)
    assert (len(folded.graphs), folded.refreshes) == (1, 1)
    change_weights(folded.module)
    folded.assert_equals_eager(torch.randn(7, 4, 16), context=autocast, rtol=5e-2, atol=5e-2)


class ClassToken(nn.Module):
    """As a ViT: a token that is expanded to the batch, and a table of positions."""

    def __init__(self):
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(x[:, 0])


def test_expanded_weights_stay_views():
    torch.manual_seed(0)
    folded = Folded(ClassToken())
    folded.assert_equals_eager(torch.randn(2, 4, 8), context=bfloat16, rtol=2e-2, atol=2e-2)
    change_weights(folded.module)
    folded.assert_equals_eager(torch.randn(2, 4, 8), context=bfloat16, rtol=2e-2, atol=2e-2)
    assert folded.folded_bytes == 2 * (8 * 3 + 3)  # the head's weight and bias, and nothing of the size of a batch


class Outer(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.row, self.weight, self._use = nn.Parameter(torch.randn(512)), nn.Parameter(torch.randn(8, 8)), use

    def forward(self, x):
        return self._use(x, self.row[:, None] * self.row)


def test_what_is_larger_than_its_sources_is_kept_only_for_those_that_read_it_from_memory():
    torch.manual_seed(0)
    added = Folded(Outer(lambda x, table: x + table))
    added.assert_equals_eager(torch.randn(512, 512))
    assert added.folded_bytes == 0
    multiplied = Folded(Outer(lambda x, table: x @ table))
    multiplied.assert_equals_eager(torch.randn(2, 512), atol=1e-3)
    assert multiplied.folded_bytes == 4 * 512 * 512


def test_no_more_memory_than_the_limit():
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    module.append(nn.BatchNorm1d(64))
    sizes = []
    for limit_mib in (0.001, 0.02, 1.0):
        folded = Folded(randomized(copy.deepcopy(module)), limit_mib=limit_mib)
        folded.assert_equals_eager(torch.randn(2, 64), context=bfloat16, rtol=0.1, atol=1e8)
        assert folded.folded_bytes <= limit_mib * 2**20
        sizes.append(folded.folded_bytes)
    assert 0 < sizes[0] < sizes[1] < sizes[2]


def test_memory_is_given_back_and_taken_again():
    make, shape = NETS["linear"]
    folded = Folded(randomized(make()))
    folded.assert_equals_eager(torch.randn(shape))
    (graph,) = folded.graphs
    graph.free()
    assert graph._memory == []
    folded.assert_equals_eager(torch.randn(shape))
    assert folded.refreshes == 2


# ------------------------------------------------------------------------------------------ what is not


class Plain(nn.Module):
    """A part of a network that is called with its input, in one line."""

    def __init__(self, forward, **tensors):
        super().__init__()
        self._forward = forward
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, x):
        return self._forward(self, x)


def test_a_graph_without_weight_arithmetic_is_left_as_it_is():
    folded = Folded(nn.Sequential(nn.Linear(6, 8), nn.ReLU()))
    folded.assert_equals_eager(torch.randn(2, 6))
    assert folded.graphs == []


def test_randomness_is_drawn_on_each_call():
    def noisy(module, x):
        return x @ (module.weight * 2 * torch.rand_like(module.weight))

    folded = Folded(Plain(noisy, weight=nn.Parameter(torch.randn(8, 8))))
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert not torch.equal(folded._compiled(x), folded._compiled(x))


def test_a_buffer_that_forward_changes_is_not_folded():
    def counting(module, x):
        module.steps += 1
        return x * (module.steps * module.scale)

    module = Plain(counting, steps=torch.zeros(8), scale=nn.Parameter(torch.ones(8)))
    folded = Folded(module)
    with torch.no_grad():
        for step in range(1, 4):
            torch.testing.assert_close(folded._compiled(torch.ones(8)), torch.full((8,), float(step)))


def test_a_buffer_that_another_graph_changes_is_seen():
    def counting(module, x):
        module.steps += 1
        torch._dynamo.graph_break()
        return x @ (module.steps[:, None] * module.scale)

    folded = Folded(Plain(counting, steps=torch.zeros(8), scale=nn.Parameter(torch.ones(8))))
    with torch.no_grad():
        for step in range(1, 4):
            torch.testing.assert_close(folded._compiled(torch.ones(2, 8)), torch.full((2, 8), 8.0 * step))
    assert folded.graphs


def test_a_number_read_off_a_weight_is_read_on_each_call():
    def scaled(module, x):
        return x @ (module.weight[:, None] * (module.weight * module.weight.sum().item()))

    folded = Folded(Plain(scaled, weight=nn.Parameter(torch.randn(8))))
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
    assert (len(folded.graphs), folded.refreshes) == (1, 2)


def test_what_the_user_gets_is_the_users():
    def returning(module, x):
        cast = module.weight.bfloat16()
        return x @ cast, cast.t(), module.weight * 2

    folded = Folded(Plain(returning, weight=nn.Parameter(torch.randn(8, 8))))
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    before = folded.assert_equals_eager(x)
    kept = [tensor.clone() for tensor in before]
    change_weights(folded.module)
    after = folded.assert_equals_eager(x)
    assert not torch.equal(after[1], kept[1])
    for tensor, copied in zip(before, kept, strict=True):
        assert torch.equal(tensor, copied)
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
    folded = Folded(Tied())
    tokens = torch.randint(10, (2, 3))
    folded.assert_equals_eager(tokens, context=bfloat16, rtol=2e-2, atol=2e-2)
    change_weights(folded.module)
    folded.assert_equals_eager(tokens, context=bfloat16, rtol=2e-2, atol=2e-2)
    assert (len(folded.graphs), folded.refreshes) == (1, 2)


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_parametrised_module(parametrize):
    torch.manual_seed(0)
    module = parametrize(nn.Linear(6, 6))
    folded = Folded(module.eval())
    x = torch.randn(2, 6)
    for _ in range(2):
        folded.assert_equals_eager(x)
    change_weights(folded.module)
    folded.assert_equals_eager(x)


def replace_parameter(module):
    module[0].weight = nn.Parameter(torch.ones_like(module[0].weight))


def replace_scalar_parameter_by_an_equal_one(module):
    module[1].weight = nn.Parameter(module[1].weight.detach().clone())
    change_weights(module)


def load(module):
    module.load_state_dict({name: torch.rand_like(v.float()).to(v.dtype) for name, v in module.state_dict().items()})


def load_assigning(module):
    state = {name: torch.rand_like(v.float()).to(v.dtype) for name, v in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


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


@pytest.mark.parametrize(
    "change",
    [
        change_weights,
        replace_parameter,
        replace_scalar_parameter_by_an_equal_one,
        load,
        load_assigning,
        optimizer_step,
        fused_optimizer_step,
        swap_data,
        edit_under_inference_mode,
    ],
    ids=lambda f: f.__name__,
)
def test_every_change_is_seen_by_the_next_call(change):
    make, shape = NETS["one channel"]
    folded = Folded(randomized(make()))
    x = torch.randn(shape)
    folded.assert_equals_eager(x)
    change(folded.module)
    folded.assert_equals_eager(x)
    assert folded.refreshes == 2


def test_edits_that_leave_no_trace_are_seen_where_a_stage_begins():
    make, shape = NETS["convolution"]
    folded = Folded(randomized(make()))
    folded.assert_equals_eager(torch.randn(shape))
    folded.module[0].weight.data.mul_(2)
    for graph in folded.graphs:
        graph.invalidate_weights()
    folded.assert_equals_eager(torch.randn(shape))
    folded.assert_equals_eager(torch.randn(shape))
    assert folded.refreshes == 2


def test_a_module_that_is_moved_between_types():
    make, shape = NETS["convolution"]
    folded = Folded(randomized(make()))
    x = torch.randn(shape)
    folded.assert_equals_eager(x)
    folded.module.double(), folded._eager.double()
    folded.assert_equals_eager(x.double())
    change_weights(folded.module)
    folded.module.float(), folded._eager.float()
    folded.assert_equals_eager(x)
    assert len(folded.graphs) == 2


def test_weights_made_under_inference_mode_have_no_version_and_are_computed_on_each_call():
    with torch.inference_mode():
        make, shape = NETS["convolution"]
        module = randomized(make())
    folded = Folded(module)
    x = torch.randn(shape)
    with torch.inference_mode():
        expected = module(x)
        torch.testing.assert_close(folded._compiled(x), expected, rtol=1e-4, atol=1e-5)
        module[0].weight.mul_(2)
        torch.testing.assert_close(folded._compiled(x), module(x), rtol=1e-4, atol=1e-5)


def test_a_failure_of_ours_leaves_the_graph_to_inductor(monkeypatch):
    def failing(*args):
        raise KeyError("something that nobody thought of")

    monkeypatch.setattr("compile_callbacks.folding.folded.split", failing)
    make, shape = NETS["convolution"]
    folded = Folded(randomized(make()), cached=False)
    x = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(folded._compiled(x), folded._eager(x), rtol=1e-4, atol=1e-5)
    assert folded.left_out == ["KeyError: 'something that nobody thought of'"]
