"""The models of the tables of cases, by what is special about them."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.support.models import CLASSES, FEATURES, Classifier, Wrapper, mlp

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


class Heads(Wrapper):
    """Returns a mapping of two outputs."""

    def forward(self, x):
        features = self.net(x)
        return {"a": features, "b": features[:, :2].exp()}


class TwoHeads(Classifier):
    def __init__(self):
        super().__init__(Heads())

    def forward(self, x):
        out = self.net(x)
        return out["a"] * out["b"].mean()

    logits = forward

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


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
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    weight = net[0].weight.detach()
    net[0].weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))
    return net


class SwapsWeights(Classifier):
    """Validates with other weights, and puts the first ones back, as averages of weights by hand do."""

    def validation_step(self, batch, batch_idx):
        own = [weight.detach().clone() for weight in self.net.parameters()]
        for weight in self.net.parameters():
            weight.data.mul_(2)
        self.validation_outputs.append(self.net(batch[0]))
        for weight, value in zip(self.net.parameters(), own, strict=True):
            weight.data.copy_(value)
        self.validation_outputs.append(self.net(batch[0]))


class Recurrent(Classifier):
    def __init__(self):
        super().__init__(nn.Linear(8, CLASSES))
        self.rnn = nn.GRU(FEATURES, 8, batch_first=True)

    def logits(self, x):
        return self.net(self.rnn(x[:, None])[0][:, 0])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(FEATURES, CLASSES), []

    def encode(self, x):
        return self.linear(x)

    @functools.lru_cache  # noqa: B019
    def mask(self, size):
        self.calls.append(size)
        return torch.ones(size, 1)


class CallsMethods(Classifier):
    """Calls a method that is a target and keeps its name, and one that Python caches."""

    def __init__(self):
        super().__init__(Encoder())

    def logits(self, x):
        method = self.net.encode
        assert (method.__name__, method.__self__) == ("encode", self.net)
        return self.net.mask(len(x)) * method(x)


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


class Named(Wrapper):
    """Takes a string, for whose values torch compiles separate graphs until it reaches its limit."""

    def forward(self, x, name="a"):
        y = self.net(x)
        return y * 2 if name == "two" else y


class CallsTwice(Classifier):
    """Calls its network twice in each training step, the second time always with the same kind of input."""

    def __init__(self, first_call):
        super().__init__(Named())
        self.first_call = first_call

    def training_step(self, batch, batch_idx):
        x, y = batch
        size, name = self.first_call(batch_idx)
        loss = nn.functional.cross_entropy(self.net(x[:size], name), y[:size])
        loss = loss + nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss


class Critic(Classifier):
    """Differentiates the gradients of its critic, as a WGAN-GP does, and not those of its network."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
        return super().training_step(batch, batch_idx) + (gradient.norm(dim=1) - 1).square().mean()


class Force(nn.Module):
    """Computes gradients in its forward."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + force[:, :CLASSES]


# ------------------------------------------------------------------------------------------ shapes and recompiles


class Forward(Wrapper):
    """Runs a function of itself and its inputs as ``forward``."""

    def __init__(self, function: Callable[..., torch.Tensor], net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


class Words(Classifier):
    """Trains on dictionaries of words and a number of repetitions, and tells the marks that tensors keep."""

    def __init__(self) -> None:
        super().__init__(Forward(repeats, nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, CLASSES))))
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


def repeats(net, batch, times):
    return net.net[1](net.net[0](batch["words"]).repeat(1, times, 1).mean(1))


def words(*sizes: tuple[int, int], times: tuple[int, ...] = (1,)) -> Callable[[], DataLoader]:
    """Return a function that makes a loader of words with these sizes."""

    def make() -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        batches = [{"words": torch.randint(10, size, generator=generator)} for size in sizes]
        return DataLoader(list(zip(batches, itertools.cycle(times), strict=False)), batch_size=None)

    return make


class Changes(Classifier):
    """Unfreezes a weight of its network or changes a number of it in step 6."""

    def __init__(self, change: str) -> None:
        super().__init__(nn.Sequential(Forward(scales), nn.Identity()))
        self.change, self.net[0].scale = change, 2
        self.net[0].net[0].requires_grad_(change != "unfreeze")

    def training_step(self, batch, batch_idx):
        if batch_idx == 6:
            self.net[0].net[0].requires_grad_(True)
            self.net[0].scale = 3 if self.change == "number" else 2
        return super().training_step(batch, batch_idx)


def scales(net, x):
    return net.net(x) * net.scale


def breaks(net, x):
    hidden = net.net[:2](x)
    torch._dynamo.graph_break()
    return net.net[2:](hidden)


class Checkpointed(Classifier):
    def logits(self, x):
        return checkpoint(self.net, x.requires_grad_(), use_reentrant=False)


class Annealed(Classifier):
    """Passes another float in each step."""

    temperature = 1.0

    def logits(self, x):
        self.temperature += 0.37
        return self.net(x, self.temperature)


def divides(net, x, temperature=1.0):
    return torch.tanh(net.net(x) / temperature)


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def blocks() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3)])


# ------------------------------------------------------------------------------------------ breaks and Python state


def item(net, x):
    """Multiplies by a number of a tensor, which breaks the graph. It is always 2, so that torch does not recompile."""
    return net.net(x * (1 + x.sign().max().item()))


def several_breaks(net, x):
    """Breaks the graph four times. A setting is known for three of them."""
    x = x * (1 + x.abs().max().item())
    torch._dynamo.graph_break()
    x = x - x[x > 0].mean()
    return net.net(x + torch.arange((x[:, 0] > -100).sum()).sum())


class Counting(Forward):
    """Counts its calls in an attribute, a list and a plain tensor, and then runs the function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__(function)
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


def breaks_although_forbidden(net, x):
    with torch._dynamo.error_on_graph_break(True):
        torch._dynamo.graph_break()
    return net.net(x)


class Scaled(Wrapper):
    """Counts its calls, scales by the count, and takes another branch after 24 calls."""

    def __init__(self, times_bool: bool = False) -> None:
        super().__init__()
        self.calls, self.width, self.times_bool = 0, FEATURES, times_bool

    def forward(self, x):
        x = self.net(x.view(-1, self.width))
        self.calls += 1
        if self.times_bool:  # with which torch 2.11 fails if the count is an input of the graph
            return x * (self.calls * self.training) / 20
        return x * (1 + 1 / (2 + self.calls)) if self.calls < 24 else x * 2


class BatchError(Exception):
    """What only the user's code raises."""


class Skipping(Classifier):
    """Skips the batches for which its network raises, between two layers or behind a graph break."""

    def __init__(self, breaks: bool) -> None:
        super().__init__(Forward(_raises_for_bad_batches))
        self.skipped, self.net.bad, self.net.breaks, self.net.last = 0, False, breaks, nn.Linear(CLASSES, CLASSES)
        self.net.register_buffer("calls", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.net.bad = batch_idx in (0, 20, 30)
        try:
            return super().training_step(batch, batch_idx)
        except BatchError:
            self.skipped += 1
            return None


def _raises_for_bad_batches(net, x):
    net.calls.add_(1)
    hidden = net.net(x)
    if net.breaks:
        torch._dynamo.graph_break()
    if net.bad:
        raise BatchError("a bad batch")
    return net.last(hidden)


def nested() -> nn.Module:
    return nn.Sequential(*[Wrapper(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())) for _ in range(12)], mlp())


RANDOM = random.Random(7)
_cached = functools.lru_cache(lambda: [0])  # returns a list, which the calls change


def _default(calls=[]):  # noqa: B006
    calls.append(1)
    return len(calls)


def _class_attribute(net):
    type(net).count += 1
    return 1 + 0.01 * type(net).count


def _lru_cache(net):
    value = _cached()
    value[0] += 1
    return 1 + 0.01 * value[0]


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
    "class attribute": _class_attribute,
    "default argument": lambda net: 1 + 0.01 * _default(),
    "lru_cache": _lru_cache,
    "random.uniform": lambda net: random.uniform(0.5, 1.5),
    "random.sample": lambda net: 1 + 0.1 * random.sample(range(10), 1)[0],
    "Random": lambda net: 1 + 0.1 * net.random.random(),
    "sample of Random": lambda net: 1 + 0.1 * net.random.sample(range(10), 1)[0],
    # torch 2.11 replays no draw, and breaks the graph only if Python computes with the number
    "global Random": lambda net: RANDOM.uniform(0.5, 1.5),
    "numpy.random": lambda net: 1 + 0.1 * np.random.rand(),
    "numpy.normal": lambda net: torch.from_numpy(np.random.normal(size=(CLASSES,)).astype("float32")),
    "numpy's generator": lambda net: 1 + 0.1 * net.numpy_generator.random(),
    "torch's generator": lambda net: 1 + 0.1 * torch.rand((), generator=net.torch_generator),
    "seeds": _seeds,
    "draws once": _draws_once,
}


class PythonState(nn.Module):
    """A linear layer whose output is scaled by the state of one kind, so that stale state changes the losses."""

    count = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(FEATURES, CLASSES), kind
        self.calls, self.deque, self.drawn = 0, collections.deque(maxlen=3), None
        self.random, self.numpy_generator = random.Random(7), np.random.default_rng(7)
        self.torch_generator = torch.Generator().manual_seed(7)
        PythonState.count = 0
        _default.__defaults__[0].clear()
        _cached.cache_clear()
        RANDOM.seed(7)

    def forward(self, x):
        return self.linear(x) * PYTHON_STATE[self.kind](self)

    def state(self) -> str:
        of_torch = self.torch_generator.get_state().tolist()
        own = self.random.getstate(), self.numpy_generator.bit_generator.state, of_torch
        return str((self.deque, self.count, _default.__defaults__, _cached(), RANDOM.getstate(), *own))


class DrawsBetween(Classifier):
    """Draws from Python's generator between the calls of the target, and tells the state after training."""

    def __init__(self, kind: str) -> None:
        super().__init__(PythonState(kind))

    def training_step(self, batch, batch_idx):
        random.random()
        return super().training_step(batch, batch_idx)

    def on_fit_end(self):
        self.after = self.net.state()


# ------------------------------------------------------------------------------------------ targets


# ------------------------------------------------------------------------------------------ captures


# ------------------------------------------------------------------------------------------ freezing


# ------------------------------------------------------------------------------------------ backward passes


# ------------------------------------------------------------------------------------------ faults and errors
