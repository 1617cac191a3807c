"""Models by name: torchvision models, timm models as timm/NAME, gpt2, bert, unet, and transformers.

blocks-DEPTH is a transformer, and items-DEPTH one whose layers each read a number from the device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HEADS, TOKENS = 256, 4, 128  # narrow, so that depth dominates the compile time
TEXT_TOKENS = 512


class Block(nn.Module):
    """A pre-norm transformer layer; shapes (N, T, C) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(n, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm_2(x))


class ClippedBlock(Block):
    """A layer that limits the norm of its input, as code that is ported from NumPy does: it breaks the graph."""

    def forward(self, x: Tensor) -> Tensor:
        norm = x.detach().square().mean().sqrt().item()
        return super().forward(x * (1 / (1 + 1e-3 * norm)))


class Transformer(nn.Module):
    """A stack of layers with a classifier."""

    def __init__(self, depth: int, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


BLOCKS: dict[str, type[Block]] = {"blocks": Block, "items": ClippedBlock}


class LanguageModel(nn.Module):
    """GPT-2 or BERT of Hugging Face with new weights; tokens (N, T) in, logits (N * T, V) out."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        if name == "gpt2":
            self.net = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
        else:
            self.net = transformers.BertForMaskedLM(transformers.BertConfig())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens).logits.flatten(0, 1)


class UNet(nn.Module):
    """A U-Net with batch norm; images (N, 3, H, W) in, logits (N, 21, H, W) out; H and W are multiples of 16."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        inputs, outputs = (3, *widths[:-1]), widths
        self.down = nn.ModuleList(double_conv(*pair) for pair in zip(inputs, outputs, strict=True))
        self.middle = double_conv(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in reversed(widths))
        self.join = nn.ModuleList(double_conv(2 * width, width) for width in reversed(widths))
        self.head = nn.Conv2d(widths[0], 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for down in self.down:
            skipped.append(down(x))
            x = nn.functional.max_pool2d(skipped[-1], 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skipped.pop(), up(x)], dim=1))
        return self.head(x)


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


def make(name: str, batch_size: int, image_size: int = 224, device: str = "cpu") -> tuple[nn.Module, Tensor, Tensor]:
    """A model, a batch for it and labels; images and convolution weights use the channels-last memory format."""
    torch.manual_seed(0)
    kind, _, depth = name.partition("-")
    if kind in BLOCKS:
        net: nn.Module = Transformer(int(depth), BLOCKS[kind]).to(device)
        inputs = torch.randn(batch_size, TOKENS, WIDTH, device=device)
    elif name in ("gpt2", "bert"):
        net = LanguageModel(name).to(device)
        inputs = torch.randint(30_000, (batch_size, TEXT_TOKENS), device=device)
        return net, inputs, inputs.flatten()
    elif name == "unet":
        net = UNet().to(device, memory_format=torch.channels_last)
        inputs = torch.randn(batch_size, 3, image_size, image_size, device=device)
        labels = torch.randint(21, (batch_size, image_size, image_size), device=device)
        return net, inputs.to(memory_format=torch.channels_last), labels
    else:
        net = create(name).to(device, memory_format=torch.channels_last)
        inputs = torch.randn(batch_size, 3, image_size, image_size)
        inputs = inputs.to(device, memory_format=torch.channels_last)
    return net, inputs, torch.randint(1000, (batch_size,), device=device)


def create(name: str) -> nn.Module:
    """A model for images, with weights and statistics that make every output informative."""
    if name.startswith("timm/"):
        import timm

        net = timm.create_model(name.removeprefix("timm/"))
    else:
        import torchvision

        net = torchvision.models.get_model(name)
    for weight in net.parameters():
        if not weight.any():  # the head of a new ViT is all zeros, and so are its outputs
            nn.init.normal_(weight, std=0.02)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):  # as after training: a new batch norm is the identity
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
    return net
