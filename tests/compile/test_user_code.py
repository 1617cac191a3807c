"""Compiling and comparing leave the user's code alone: calls, hooks, aliased inputs, checkpoints and transforms."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from compile_callbacks import CompileWarning, report_of
from tests.support.against_eager import FLOAT32
from tests.support.models import FEATURES, Wrapper
from tests.support.wrong_passes import WrongForward

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


@pytest.fixture
def compiled(compiled):
    """Compiles modules so that a difference from eager raises."""
    return functools.partial(compiled, verify="raise")


def relu_layer():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU())


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


TOKENS, SEQUENCE = torch.arange(24).reshape(4, 6) % 10, torch.randn(2, 5, 16)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: nn.MultiheadAttention(16, 4, batch_first=True), lambda m: m(SEQUENCE, SEQUENCE, SEQUENCE)[0]),
        (lambda: nn.Embedding(10, 4), lambda m: m(TOKENS[:, :-1])),
        (LanguageModel, lambda m: m(input_ids=TOKENS, labels=TOKENS)),
    ],
    ids=["one input three times", "a view of a batch", "one tensor under two names"],
)
def test_aliased_and_strided_inputs_compile_one_graph(compiled, make, call):
    module = compiled(make())
    for _ in range(3):
        call(module).sum().backward()
    report = report_of(module).train
    assert (report.graphs, report.recompiles) == (1, 0)


def test_a_sparse_output_is_returned(compiled):
    class Sparse(Wrapper):
        def forward(self, x):
            return self.net(x).to_sparse()

    module, x = compiled(Sparse(relu_layer())), torch.randn(8, FEATURES)
    output = module(x)
    assert output.is_sparse
    torch.testing.assert_close(output.to_dense(), module.net(x))
    output.to_dense().sum().backward()


@pytest.mark.usefixtures("recompiles_at_once")
def test_the_module_runs_as_often_as_the_user_calls_it(compiled):
    class Counting(Wrapper):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4)))
            self.calls, self.queue = 0, []

        def forward(self, x):
            self.calls += 1
            self.queue.append(len(x))
            return self.net(x)

    module, seen = Counting(), []
    module.net.register_forward_hook(lambda *_: seen.append("inside"))
    compiled(module)
    for number in range(1, 4):
        module(torch.randn(3 + number, FEATURES)).sum().backward()
        assert (module.calls, len(module.queue), len(seen)) == (number, number, number)
        assert module.net[1].num_batches_tracked == number
    assert report_of(module).train.verified == "equal 3"


def test_hooks_on_tensors_see_one_backward_pass(compiled):
    module, seen = compiled(relu_layer()), []
    x = torch.randn(3, FEATURES, requires_grad=True)
    x.register_hook(lambda gradient: seen.append("input"))
    module[0].weight.register_hook(lambda gradient: seen.append("weight"))
    module[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append("accumulated"))
    output = module(x)
    assert (seen, x.grad, module[0].weight.grad) == ([], None, None)
    output.sum().backward()
    assert sorted(seen) == ["accumulated", "input", "weight"]
    assert report_of(module).train.verified == "equal 1"


def test_a_graph_break_that_torch_asks_for_is_not_a_failure_of_the_compiler(compiled):
    class Positions(Wrapper):
        """Computes with the value of a tensor, which a graph cannot: torch ends the graph there."""

        def forward(self, x, length):
            return self.net(x) + torch.arange(0, length)

    # If Dynamo skips the caller, it compiles the forward of an inner wrapper separately; those of torch.nn it does not.
    module, x = compiled(Positions(Wrapper(relu_layer()))), torch.randn(3, FEATURES)
    torch.testing.assert_close(module(x, torch.tensor(16)), module.net(x) + torch.arange(16))
    report = report_of(module).train
    assert report.graphs >= 1
    assert report.fallbacks == 0


class Breaking(nn.Module):
    """Has two graphs, and only the second one has a ReLU."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, FEATURES)

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * torch.sigmoid(x)[:, :1]
        torch._dynamo.graph_break()
        return torch.relu(self.second(hidden))


def gradients(net, *batches):
    """The gradients of one step that calls the net in a checkpoint for each batch."""
    net.zero_grad()
    outputs = [checkpoint(net, batch, use_reentrant=False) for batch in batches]
    sum(output.square().sum() for output in outputs).backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


@pytest.mark.parametrize(
    ("make_net", "sizes", "wrong_sizes"),
    [(relu_layer, (8, 5, 8), (5,)), (Breaking, (8,), ())],
    ids=["of a later call", "behind a graph break"],
)
def test_a_graph_that_differs_does_not_change_the_recomputation_of_a_checkpoint(compiled, make_net, sizes, wrong_sizes):
    eager = make_net()
    wrong = WrongForward("train", *wrong_sizes)
    ours = compiled(copy.deepcopy(eager), passes=[wrong], verify="eager", train_mode={"dynamic": False})
    batches = [torch.randn(size, FEATURES) for size in sizes]
    with pytest.warns(CompileWarning, match="it runs eagerly from here on"):
        found = gradients(ours, *batches)
    torch.testing.assert_close(found, gradients(eager, *batches))
    torch.testing.assert_close(gradients(ours, *batches), gradients(eager, *batches))
    assert report_of(ours).train.fallbacks == 1


# ------------------------------------------------------------------------------------------ transforms


def vmapped(net, x):
    return vmap(net)(x)


def per_sample_gradients(net, x):
    def energy(weights, sample):
        return functional_call(net, weights, (sample,)).square().sum()

    of_samples = vmap(grad(energy), in_dims=(None, 0))(dict(net.named_parameters()), x)
    return net(x) + sum(gradient.norm() for gradient in of_samples.values())


def directional(net, x):
    return sum(jvp(net, (x,), (x.cos(),)))


class Transformed(Wrapper):
    """Calls its net under a transform."""

    def __init__(self, transform):
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 3)))
        self.transform = transform

    def forward(self, x):
        return self.transform(self.net, x).square().sum()


def losses_and_gradients(module):
    x = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)
    losses = []
    for _ in range(3):
        losses.append(module(x))
        losses[-1].backward()
    return losses, [parameter.grad for parameter in module.parameters()]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:Warning")  # from torch's own jvp
@pytest.mark.parametrize("transform", [vmapped, per_sample_gradients, directional])
def test_a_target_under_a_transform_runs_eagerly_with_a_warning(compiled, transform):
    module = compiled(Transformed(transform), targets="net", on_error="raise")
    with pytest.warns(CompileWarning, match="target 'net' runs eagerly in the train phase") as warned:
        found = losses_and_gradients(module)
    torch.testing.assert_close(found, losses_and_gradients(Transformed(transform)), **FLOAT32)
    assert len([warning for warning in warned if issubclass(warning.category, CompileWarning)]) == 1
    report = report_of(module).train
    assert report.fallbacks == 0
    # Calls that are not transformed are compiled.
    assert report.graphs == (1 if transform is per_sample_gradients else 0)
