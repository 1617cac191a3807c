"""The models of the benchmarks by name: torchvision's, timm's as timm/NAME, and transformers as blocks-DEPTH."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compile_callbacks.bench.settings import parse_settings
from compile_callbacks.bench.subject import load

WIDTH, HEADS, TOKENS = 256, 4, 128
"""Of the transformers: narrow, so that what compiling takes is what depth makes of it."""


class Block(nn.Module):
    """One pre-norm layer of a transformer; shapes (N, T, C) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(n, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """A stack of such layers with a classifier."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def make(name: str, batch_size: int, image_size: int | None, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, a batch for it and labels, on a device; what takes images is laid out channels last."""
    if name.startswith("blocks-"):
        net: nn.Module = Transformer(int(name.removeprefix("blocks-"))).to(device)
        inputs = torch.randn(batch_size, TOKENS, WIDTH, device=device)
    else:
        settings = parse_settings(
            name, modes=[], device=device, batch_size=batch_size, image_size=image_size, channels_last=True
        )
        subject = load(settings)
        net, (inputs,) = subject.module, subject.args
    for weight in net.parameters():
        if not weight.any():  # the head of a fresh ViT is all zeros: its outputs would say nothing
            nn.init.normal_(weight, std=0.02)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):  # as after training: fresh ones compute x * 1 + 0
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
    return net, inputs, torch.randint(1000, (batch_size,), device=device)
