"""What compiling and comparing leave alone in the user's code: calls, hooks, aliasing of inputs, random generators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_callbacks import compile_phases, report_of, restore
from tests.support.models import FEATURES

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


@pytest.fixture
def compiled():
    """Compiles modules so that a difference from eager raises, and undoes it after the test."""
    modules = []

    def compile_module(module, **settings):
        modules.append(compile_phases(module, **{"verify": "raise"} | settings))
        return modules[-1]

    yield compile_module
    for module in modules:
        restore(module)


def graphs_and_recompiles(module):
    report = report_of(module).train
    return report.graphs, report.recompiles


def test_attention_to_itself_compiles_one_graph(compiled):
    attention = compiled(nn.MultiheadAttention(16, 4, batch_first=True))
    x = torch.randn(2, 5, 16)
    for _ in range(3):
        attention(x, x, x)[0].sum().backward()
    assert graphs_and_recompiles(attention) == (1, 0)


def test_a_part_of_a_batch_compiles_one_graph(compiled):
    net, tokens = compiled(nn.Embedding(10, 4)), torch.randint(10, (4, 6))
    for _ in range(3):
        net(tokens[:, :-1]).sum().backward()
    assert graphs_and_recompiles(net) == (1, 0)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_one_tensor_that_is_given_twice_compiles_one_graph(compiled):
    model, batch = compiled(LanguageModel()), torch.randint(10, (4, 6))
    for _ in range(3):
        model(input_ids=batch, labels=batch).backward()
    assert graphs_and_recompiles(model) == (1, 0)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 4)

    def forward(self, x):
        return self.layer(x).relu().to_sparse()


def test_a_sparse_output_is_handed_out(compiled):
    module, x = compiled(Sparse()), torch.randn(8, FEATURES)
    output = module(x)
    assert output.is_sparse
    torch.testing.assert_close(output.to_dense(), module.layer(x).relu())
    output.to_dense().sum().backward()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4))
        self.calls, self.queue = 0, []

    def forward(self, x):
        self.calls += 1
        self.queue.append(len(x))
        return self.net(x)


def test_the_module_runs_as_often_as_the_user_calls_it(compiled):
    module, seen = Counting(), []
    module.net.register_forward_hook(lambda *_: seen.append("inside"))
    compiled(module)
    for number in range(1, 4):
        module(torch.randn(3 + number, FEATURES)).sum().backward()
        assert (module.calls, len(module.queue), len(seen)) == (number, number, number)
        assert module.net[1].num_batches_tracked == number
    assert report_of(module).train.verified == "equal 1"


def test_hooks_on_tensors_see_one_backward_pass(compiled):
    module, seen = compiled(nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU())), []
    x = torch.randn(3, FEATURES, requires_grad=True)
    x.register_hook(lambda gradient: seen.append("input"))
    module[0].weight.register_hook(lambda gradient: seen.append("weight"))
    module[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append("accumulated"))
    output = module(x)
    assert (seen, x.grad, module[0].weight.grad) == ([], None, None)
    output.sum().backward()
    assert sorted(seen) == ["accumulated", "input", "weight"]
    assert report_of(module).train.verified == "equal 1"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 6)

    def forward(self, x):
        return self.layer(x).relu()


class Positions(nn.Module):
    """Computes with the value of a tensor, which a graph cannot: torch ends the graph there."""

    def __init__(self):
        super().__init__()
        self.net = Block()

    def forward(self, x, length):
        return self.net(x) + torch.arange(0, length)


def test_a_graph_break_that_torch_asks_for_is_no_failure_of_the_compiler(compiled):
    module, x = compiled(Positions()), torch.randn(3, FEATURES)
    torch.testing.assert_close(module(x, torch.tensor(6)), module.net(x) + torch.arange(6))
    report = report_of(module).train
    assert report.graphs >= 1
    assert report.fallbacks == 0
