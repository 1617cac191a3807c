"""Modules for the tests of ``compile-callbacks bench``, made by factories without arguments."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.models import Wrapper


def classifier():
    """A module and its input."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(4, 8)


def images():
    """A module without inputs: it gets images."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Breaks(Wrapper):
    """A graph break, which ``fullgraph`` refuses."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.net(x)


def breaks():
    return Breaks(), torch.randn(4, 8)


def dropout():
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 3)), torch.randn(4, 8)
