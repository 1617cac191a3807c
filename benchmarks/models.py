"""Models by name: torchvision models, gpt2, bert and unet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

TEXT_TOKENS = 512


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
    if name in ("gpt2", "bert"):
        net: nn.Module = LanguageModel(name).to(device)
        inputs = torch.randint(30_000, (batch_size, TEXT_TOKENS), device=device)
        return net, inputs, inputs.flatten()
    if name == "unet":
        net = UNet().to(device).to(memory_format=torch.channels_last)
        inputs = torch.randn(batch_size, 3, image_size, image_size, device=device)
        labels = torch.randint(21, (batch_size, image_size, image_size), device=device)
        return net, inputs.to(memory_format=torch.channels_last), labels
    net = create(name).to(device).to(memory_format=torch.channels_last)
    inputs = torch.randn(batch_size, 3, image_size, image_size)
    inputs = inputs.to(device).to(memory_format=torch.channels_last)
    return net, inputs, torch.randint(1000, (batch_size,), device=device)


def create(name: str) -> nn.Module:
    """A model for images, with weights and statistics that make every output informative."""
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
