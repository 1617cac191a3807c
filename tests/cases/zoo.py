"""The models of the tables of cases, by what is special about them."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import operator
import random
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch._inductor.graph
from torch import nn
from torch.distributions import Normal
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import cross_entropy
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.support.models import CLASSES, FEATURES, Classifier, Wrapper, mlp
from tests.support.passes import Uncached

OLDEST = torch.__version__.startswith("2.11.")


# ------------------------------------------------------------------------------------------ values


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(), nn.Linear(16, CLASSES))


def convolutions() -> nn.Module:
    """With batch norms, and with dropout."""
    images = nn.Linear(FEATURES, 192), nn.Unflatten(1, (3, 8, 8))
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)
    return nn.Sequential(*images, *layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, CLASSES))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    before = nn.Linear(FEATURES, 96), nn.Unflatten(1, (6, 16))
    return nn.Sequential(*before, encoder, nn.Flatten(), nn.Linear(96, CLASSES))


class Policy(nn.Module):
    """Builds a distribution in each call, and has one that was built before."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)
        self.prior = Normal(torch.zeros(CLASSES), torch.ones(CLASSES))

    def forward(self, x):
        mean = self.net(x)
        return mean + Normal(mean, mean.exp()).log_prob(2 * mean) + self.prior.log_prob(mean)


class PlainStep(Classifier):
    """Its step is one graph. Its network has its own forward: torch 2.11 compiles no bare Sequential."""

    def __init__(self):
        super().__init__(Wrapper())

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


def tensor_subclass() -> nn.Module:
    """Lightning moves the module at the end of a run, which swaps such weights."""
    net: Any = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    weight = net[0].weight.detach()
    net[0].weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))
    return net


class SwapsWeights(Classifier):
    """Validates with other weights, and puts the first ones back, as averages of weights by hand do."""

    def validation_step(self, batch, batch_idx):
        own = [weight.detach().clone() for weight in self.net.parameters()]
        for factor in (2, 0):
            for weight, value in zip(self.net.parameters(), own, strict=True):
                weight.data.copy_(factor * value if factor else value)
            self.validation_outputs.append(self.net(batch[0]))


class TwoParts(Classifier):
    """A backbone and a head; its ``forward`` calls both. The backbone is not trained at first."""

    def __init__(self):
        super().__init__(nn.Sequential(mlp(), nn.Linear(CLASSES, CLASSES)))
        self.backbone, self.head = self.net
        self.net = None

    def forward(self, x):
        return self.head(self.backbone(x))

    logits = forward

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class CallsTwice(Classifier):
    """Calls its network twice in each training step, the second time always with the same kind of input.

    The network takes a string, for whose values torch compiles separate graphs until it reaches its limit.
    """

    def __init__(self):
        super().__init__(Calls(mlp(), lambda net, x, name="a": net(x) * 2 if name == "two" else net(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self.net(x, f"name {batch_idx % 10}"), y) + cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss


# ------------------------------------------------------------------------------------------ shapes and recompiles


class Words(Classifier):
    """Trains on dictionaries of words and a number of repetitions, and tells the marks that tensors keep."""

    def __init__(self) -> None:
        run = lambda net, batch, times: net[1](net[0](batch["words"]).repeat(1, times, 1).mean(1))  # noqa: E731
        super().__init__(Calls(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, CLASSES)), run))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0]["words"])
        loss = self.net(*batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_train_end(self):
        # AOTAutograd of torch 2.11 marks what it saves, without a guard
        names = [name for words in self.seen if not OLDEST for name in vars(words)]
        self.marks = str([name for name in names if "weak_dynamic" in name or "marking" in name])


def words(*sizes: tuple[int, int], times: tuple[int, ...] = (1,)) -> Callable[[], DataLoader]:
    """Return a function that makes a loader of words with these sizes."""

    def make() -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        batches = [{"words": torch.randint(10, size, generator=generator)} for size in sizes]
        return DataLoader(list(zip(batches, itertools.cycle(times), strict=False)), batch_size=None)

    return make


def breaks(net, x):
    hidden = net[:2](x)
    torch._dynamo.graph_break()
    return net[2:](hidden)


def annealed() -> Classifier:
    """Passes another float in each step."""
    temperatures = itertools.count(1.37, 0.37)
    net = Calls(smooth(), lambda net, x, temperature=1.0: torch.tanh(net(x) / temperature))
    return CallsInTraining(net, lambda net, x: net(x, next(temperatures)))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def blocks() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3)])


# ------------------------------------------------------------------------------------------ breaks and Python state


def item(net, x):
    """Multiplies by a number of a tensor, which breaks the graph. It is always 2, so that torch does not recompile."""
    return net(x * (1 + x.sign().max().item()))


def several_breaks(net, x):
    """Breaks the graph twice. A setting is known for one of them."""
    x = x * (1 + x.abs().max().item())
    torch._dynamo.graph_break()
    return net(x)


class Counting(Wrapper):
    """Counts its calls in an attribute, a list and a plain tensor, and then runs the function of itself."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.calls, self.sizes, self.total = 0, [], torch.zeros(1)
        self.blocks = nn.Sequential(*[Wrapper(nn.Sequential(nn.Linear(3, 3), nn.Tanh())) for _ in range(4)])

    def forward(self, x):
        self.calls += 1
        self.sizes.append(x.shape[0])
        self.total.add_(1)
        return self.function(self, x)


def breaks_before_blocks(net, x):
    hidden = net.net(x)
    torch._dynamo.graph_break()
    return net.blocks(hidden)


class Scaled(Wrapper):
    """Counts its calls, scales by the count, and takes another branch after 24 calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.width = 0, FEATURES

    def forward(self, x):
        x = self.net(x.view(-1, self.width))
        self.calls += 1
        return x * (1 + 1 / (2 + self.calls)) if self.calls < 24 else x * 2


RANDOM = random.Random(7)


def _full_deque(net):  # its sum stops growing with its length
    net.calls += 1
    net.deque.append(net.calls)
    return 1 + 0.01 * sum(net.deque)


def _seeds(net):  # each call leaves the generator in the same state, also in eager
    random.seed(3)
    return random.uniform(0.5, 1.5)


def _draws_once(net):
    if net.drawn is None:
        net.drawn = random.sample([0.5, 1.0, 1.5], 1)[0]
    return net.drawn


PYTHON_STATE = {
    "full deque": _full_deque,
    "random.sample": lambda net: 1 + 0.1 * random.sample(range(10), 1)[0],
    "sample of Random": lambda net: 1 + 0.1 * net.random.sample(range(10), 1)[0],
    # torch 2.11 replays no draw, and breaks the graph only if Python computes with the number
    "global Random": lambda net: RANDOM.uniform(0.5, 1.5),
    "numpy's generator": lambda net: 1 + 0.1 * net.numpy_generator.random(),
    "torch's generator": lambda net: 1 + 0.1 * torch.rand((), generator=net.torch_generator),
    "seeds": _seeds,
    "draws once": _draws_once,
}


class PythonState(nn.Module):
    """A linear layer whose output is scaled by the state of one kind, so that stale state changes the losses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(FEATURES, CLASSES), kind
        self.calls, self.deque, self.drawn = 0, collections.deque(maxlen=3), None
        self.random, self.numpy_generator = random.Random(7), np.random.default_rng(7)
        self.torch_generator = torch.Generator().manual_seed(7)
        RANDOM.seed(7)

    def forward(self, x):
        return self.linear(x) * PYTHON_STATE[self.kind](self)

    def state(self) -> str:
        of_torch = self.torch_generator.get_state().tolist()
        own = self.random.getstate(), self.numpy_generator.bit_generator.state, of_torch
        return str((RANDOM.getstate(), *own))


class DrawsBetween(Classifier):
    """Draws from Python's generator between the calls of the target, and tells the state after training."""

    def __init__(self, kind: str) -> None:
        super().__init__(PythonState(kind))

    def logits(self, x):
        random.random()
        return self.net(x)

    def on_fit_end(self):
        self.after = self.net.state()


# ------------------------------------------------------------------------------------------ targets


class Logits(Classifier):
    """Trains, validates and predicts with `logits`, a function of the module and its inputs; never calls itself."""

    def __init__(self, call=None, **parts):
        super().__init__()
        self.call = call
        for name, make in parts.items():
            setattr(self, name, make())

    def logits(self, x):
        return self.call(self, x)

    def validation_step(self, batch, batch_idx):
        self.validation_outputs.append(self.logits(batch[0]).detach().clone())

    def predict_step(self, batch, batch_idx):
        return self.logits(batch[0])


def logits(call, kind=Logits, **parts):
    return lambda: kind(call, **parts)


def linear(inputs=FEATURES, outputs=CLASSES):
    return lambda: nn.Linear(inputs, outputs)


class Parts(Wrapper):
    """Has methods, and a forward that calls one of them."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU()))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.decode(self.net(x))

    def encode(self, x):
        return self.net(x)

    def decode(self, x):
        return self.head(x).relu()

    def generate(self, x):
        return self.net(x).sum() + self(x)

    @functools.lru_cache  # noqa: B019
    def mask(self, size):
        return torch.ones(size, 1)


class WithParameters(MeanMetric):
    """A metric with a network, as LPIPS and FID are."""

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(CLASSES, 1).requires_grad_(False)

    def update(self, out):
        super().update(self.network(out.detach()))


def call_in_all_ways(m, x):
    """Call a module, a forward, a method that calls its module, methods, a module before its part, and in a child."""
    encode = m.split.encode
    assert (encode.__name__, encode.__self__) == ("encode", m.split)
    out = m.net(x) + m.inside.forward(x) + m.own.generate(x) + m.split.decode(m.scale(encode(x)))
    out = m.split.mask(len(x)) * out + m.before(x) + m.before.net(x).sum() + m.outer.net(x)
    m.metric(out)  # is no target; counts each sample once
    return out


CALLED = dict.fromkeys(("net", "inside", "own", "split", "before"), Parts)
called = logits(call_in_all_ways, **CALLED, outer=Wrapper, scale=nn.Softplus, metric=WithParameters)


def twice(method):
    return lambda *args, **kwargs: 2 * method(*args, **kwargs)


class Patched(Logits):
    """Replaces methods of its parts by closures and a method, before the run and in a step; they must stay there."""

    def __init__(self):
        super().__init__(lambda m, x: m.net(x) + sum(part.decode(part.encode(x)) for part in (m.second, m.third)))
        self.net, self.second, self.third = Parts(), Parts(), Parts()
        method = types.MethodType(lambda self, x: 2 * self.head(x), self.second)
        self.net.forward, self.second.decode = self.own = [twice(self.net.forward), method]

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.third.decode = twice(self.third.decode)
            self.own.append(self.third.decode)
        return super().training_step(batch, batch_idx)

    def teardown(self, stage):
        parts = zip((self.net, self.second, self.third), self.own, strict=True)
        assert all(any(value is own for value in vars(part).values()) for part, own in parts)


class Unsupported(Logits):
    """Calls a scripted and a traced child."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates TorchScript
            self.scripted = torch.jit.script(nn.Linear(FEATURES, FEATURES))
            self.traced = torch.jit.trace(nn.Linear(FEATURES, FEATURES), torch.ones(2, FEATURES))

    def logits(self, x):
        return self.net(self.traced(self.scripted(x)))


class Replaces(Logits):
    """Replaces a net and a layer, and moves a net, at the second epoch, in the hook that Lightning calls last."""

    replaced: ClassVar = weakref.WeakSet()

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.replaced.add(self.net)
            self.net, self.second[3] = mlp(), nn.Linear(16, CLASSES)
            self.moved, self.third = self.third, None
            self.trainer.strategy.setup_optimizers(self.trainer)


def call_later(m, x):
    """Call more parts from the second epoch on."""
    out = m.parts.net(x)
    return m.direct(m.parts.head(out)) if m.current_epoch else out


def five_layers():
    """A list in a child, a member of which has another structure."""
    layers = (nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=i != 3), nn.Tanh()) for i in range(5))
    return Wrapper(nn.ModuleList(layers))


layers = logits(
    lambda m, x: m.head(functools.reduce(lambda x, f: f(x), m.list.net, x)), list=five_layers, head=linear()
)


class Marked(Wrapper):
    forward = torch.compiler.nested_compile_region(Wrapper.forward)


def marked_blocks():
    return nn.Sequential(*(Marked(nn.Linear(FEATURES, FEATURES)) for _ in range(3)), nn.Linear(FEATURES, CLASSES))


def adapt(m, x):
    """Train a shallow copy of a network with another head, as meta-learning does."""
    fast, head = copy.copy(m.net), copy.deepcopy(m.net[3])
    with torch.no_grad():
        head.weight.mul_(2)
    fast._modules = {**m.net._modules, "3": head}
    return fast(x)


# ------------------------------------------------------------------------------------------ captures


def multiply_by_index(product, x, w):
    product[:] = x * w
    return product


MULTIPLY = {
    "add in place": lambda product, x, w: operator.iadd(product, x * w),
    "out": lambda product, x, w: torch.mul(x, w, out=product),
    "relu in place": lambda product, x, w: nn.functional.relu(product.add(x * w), True),
    "index": multiply_by_index,
    "new tensor": lambda product, x, w: x * w,
}


@functools.cache
def multiply(how):
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return MULTIPLY[how](torch.zeros_like(x), x, w)

        @staticmethod
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            return gradient * w, (gradient * x).sum(0)

    return Multiply


def function_that(how):
    net, function = nn.Linear(FEATURES, FEATURES), multiply(how)
    net.scale = nn.Parameter(torch.ones(FEATURES))
    return Calls(net, lambda net, x: function.apply(net(x), net.scale))


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.mul_(3))
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class MarksDirty(nn.Linear):
    """Does not use the result of the function, which is the changed input."""

    def forward(self, x):
        y = super().forward(x)
        Triple.apply(y)
        return y * y


# ------------------------------------------------------------------------------------------ freezing


def convolutional():
    """A convolution, into which Inductor folds the batch norm."""
    layers = nn.Conv2d(2, 8, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES)
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), *layers)


class ChangesLayers(Logits):
    """Changes its layers before each second batch, and keeps all gradients."""

    def __init__(self, changes, **layers):
        super().__init__(lambda m, x: m.c(m.b(m.a(x))), **layers)
        self.changes, self.gradients = changes, []

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx % 2 == 0 and batch_idx:  # nothing is new in the batch after it
            self.changes[batch_idx // 2 - 1](self)

    def on_after_backward(self):
        self.gradients.append({n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None})


def trains(path, requires_grad):
    return lambda m: m.get_submodule(path).requires_grad_(requires_grad)


def block(activation=nn.Tanh):
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), activation())


FREEZES = [trains("b", False), trains("b", True), trains("b", False)]
BLOCK_CHANGES = [
    *FREEZES,
    lambda m: setattr(m.b[0], "weight", nn.Parameter(m.b[0].weight.detach() + 1, requires_grad=False)),
    trains("b", True),
    lambda m: setattr(m, "b", block(nn.ReLU)),
    *FREEZES,
]


# ------------------------------------------------------------------------------------------ backward passes


class Calls(nn.Module):
    """Calls a module with a function, ``run(net, *inputs)``."""

    def __init__(self, net, run=lambda net, x: net(x)):
        super().__init__()
        self.net, self.run = net, run

    def forward(self, *inputs):
        return self.run(self.net, *inputs)


class CallsInTraining(Classifier):
    """Calls its net with a function in training."""

    def __init__(self, net, run):
        super().__init__(net)
        self.run = run

    def logits(self, x):
        return self.run(self.net, x)


def around(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), middle, nn.Linear(16, CLASSES))


def normalized() -> nn.Module:
    return around(nn.Sequential(nn.LayerNorm(16), nn.Tanh()))


def breaking() -> nn.Module:
    """A graph break, and a view of an intermediate. Only the second graph has a ReLU."""

    def run(net, x):
        hidden = torch.tanh(net[0](x))
        torch._dynamo.graph_break()
        return torch.relu(net[2](hidden.unflatten(1, (4, 4)).flatten(1)))

    return Calls(around(nn.Identity()), run)


def critic(net, x, y):
    """The loss of a critic: norms of gradients of inputs."""
    (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def meta(net, x, y):
    """The norm of the gradient of weights."""
    loss = cross_entropy(net(x), y)
    gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return loss + 0.01 * sum(gradient.square().sum() for gradient in gradients)


def kept(net, x, y):
    """Three backward passes of one graph."""
    out = net(x)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    second = torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0]
    return cross_entropy(out, y) * (1 + 0.1 * (first.norm() + second.norm()))


def plain(net, x, y):
    return cross_entropy(net(x), y)


class Repeated(Classifier):
    """Trains with a loss that needs several backward passes, with manual optimization from the third step on."""

    def __init__(self, loss_of, net, manual=False, first=2):
        super().__init__(net)
        self.loss_of, self.automatic_optimization, self.first = loss_of, not manual, first

    def training_step(self, batch, batch_idx):
        x, y = batch[0].clone().requires_grad_(), batch[1]
        loss_of = self.loss_of if self.automatic_optimization or batch_idx >= self.first else plain
        loss = loss_of(self.net, x, y)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss


def in_checkpoint(net, x):
    return checkpoint(net, x, use_reentrant=False)


def in_checkpoints(net, x):
    """Call the net twice before the backward passes."""
    return in_checkpoint(net, x) + in_checkpoint(net, x[:5]).mean()


# ------------------------------------------------------------------------------------------ calls of the user's code


def language_model(net, tokens):
    """Give the embedding a view of a batch, and the loss one tensor under two names."""

    def loss_of(input_ids, labels):
        logits = net[1](net[0](input_ids))
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return loss_of(input_ids=tokens, labels=tokens)


def vmapped(net, x):
    return vmap(net)(x)


def per_sample_gradients(net, x):
    def energy(weights, sample):
        return functional_call(net, weights, (sample,)).square().sum()

    of_samples = vmap(grad(energy), in_dims=(None, 0))(dict(net.named_parameters()), x)
    return net(x) + sum(gradient.norm() for gradient in of_samples.values())


def directional(net, x):
    return sum(jvp(net, (x,), (x.cos(),)))


# ------------------------------------------------------------------------------------------ faults and errors


def custom_operator(name, function, backward=lambda gradient: gradient):
    """A custom operator that returns a copy of a function's result."""
    called, schema = lambda x: function(x).clone(), "(Tensor x) -> Tensor"
    made = torch.library.custom_op(f"compile_callbacks_tests::{name}", called, mutates_args=(), schema=schema)
    made.register_fake(torch.empty_like)
    made.register_autograd(lambda ctx, gradient: backward(gradient))
    return made


RAGGED = 2
"""The size of the last batch of an epoch, which is the later shape."""


class Place(NamedTuple):
    """A phase, a half of the step, and the shape at which the compiler fails: ``"first"`` or ``"later"``."""

    phase: str
    half: str
    shape: str


class BackwardUntraceable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        torch._dynamo.graph_break()
        return 2 * gradient


def struck(place: Place, untraceable: bool) -> nn.Module:
    """Layers with buffers, and between them code that Dynamo cannot trace at a place, if this is the fault."""

    def run(net, x):
        x = net[1](net[0](x))
        if untraceable and net.training == (place.phase == "train") and (place.shape == "first" or len(x) == RAGGED):
            if place.half == "backward":
                return net[2](BackwardUntraceable.apply(x))
            torch._dynamo.graph_break()
        return net[2](x)

    return Calls(around(nn.BatchNorm1d(16)), run)


class BrokenPass(Uncached):
    """Raises in one phase and half of the step, in all graphs or in that of the later shape."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        inputs = graph.find_nodes(op="placeholder")
        half = "backward" if any(node.name.startswith("tangents") for node in inputs) else "forward"
        sizes = [size for node in inputs for size in getattr(node.meta["val"], "shape", ())]
        later = any(not isinstance(size, int) or size == RAGGED for size in sizes)
        if (self.phase, half) == self.place[:2] and (self.place.shape == "first" or later):
            raise ZeroDivisionError("by design")


@contextlib.contextmanager
def out_of_memory_in_inductor(place: Place) -> Iterator[None]:
    """Raise an error where Inductor has lowered a graph and begins to make code of it."""
    lowering = torch._inductor.graph.GraphLowering
    real, seen = lowering.compile_to_module, []

    def compile_to_module(self: Any) -> Any:
        half = "backward" if self.is_backward else "forward"
        if (half, self.is_inference) == (place.half, place.phase == "infer"):
            seen.append(self)
            if place.shape == "first" or len(seen) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self)

    with mock.patch.object(lowering, "compile_to_module", compile_to_module):
        yield
