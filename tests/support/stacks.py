"""Models with repeated blocks, like a transformer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import CLASSES, FEATURES

WIDTH = 16


class Block(nn.Module):
    """A residual block whose attributes change its results."""

    def __init__(self, *, scale: float = 1.0, drop: float = 0.0, tanh: bool = False, special: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(drop)
        self.scale, self.tanh, self.special = scale, tanh, special

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.up(self.norm(x))
        out = F.gelu(out, approximate="tanh") if self.tanh else F.gelu(out)
        return x + self.drop(out) * self.scale


class Stack(nn.Module):
    """A model like a transformer: an embedding, blocks and a head."""

    def __init__(self, blocks: list[nn.Module], call=lambda block, x: block(x), rounds: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(blocks)
        self.call, self.rounds = call, rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in list(self.layers) * self.rounds:
            x = self.call(layer, x)
        return self.head(x)


def blocks(count: int = 4, kind=Block, **settings) -> list[nn.Module]:
    return [kind(**settings) for _ in range(count)]
