"""The models of the tables of cases, by what is special about them."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.distributions import Normal
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.models import CLASSES, FEATURES, Classifier, Wrapper, mlp

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


# ------------------------------------------------------------------------------------------ breaks and Python state


# ------------------------------------------------------------------------------------------ targets


# ------------------------------------------------------------------------------------------ captures


# ------------------------------------------------------------------------------------------ freezing


# ------------------------------------------------------------------------------------------ backward passes


# ------------------------------------------------------------------------------------------ faults and errors
