"""Inference with weight folding, against the same settings without it, with Inductor's freezing, and eager.

Each row is one model, batch size, precision and mode. Blocks of calls of the four alternate; a cell is the median of
its blocks, in milliseconds a call. Beside it: the memory of the folded tensors, the microseconds that a call takes to
see that no weight changed, the time to compute the folded tensors anew after every weight changed, and the largest
difference of the folded graph from eager after that, by the norm.

python benchmarks/fold_weights.py [--models resnet50 ...] [--batch-sizes 1 16 128] [--precisions bf16 fp32]
                                  [--modes default reduce-overhead] [--device cuda] [--image-size 224] [--json FILE]

A model is a name of torchvision's or, as timm/NAME, of timm's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import timeit
import warnings
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from compile_callbacks import InductorConfig
from compile_callbacks.compiling.switch import PhaseSwitch
from compile_callbacks.compiling.targets import Target
from compile_callbacks.measuring.events import CompileRecorder

OPTIONS = {"default": {}, "reduce-overhead": {"triton.cudagraphs": True}}
BLOCKS, BLOCK_SECONDS = 9, 0.05


def make(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    if name.startswith("timm/"):
        import timm

        module = timm.create_model(name.removeprefix("timm/"))
    else:
        module = torchvision.models.get_model(name)
    for weight in module.parameters():
        if not weight.any():  # the head of a fresh ViT is all zeros
            nn.init.normal_(weight, std=0.02)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):  # as after training: fresh ones compute x * 1 + 0
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
    return module.to(device, memory_format=torch.channels_last).eval()


class Way:
    """A module compiled in one way, or not at all."""

    def __init__(self, module: nn.Module, config: InductorConfig | None, precision: str) -> None:
        self.precision = precision
        self.module = copy.deepcopy(module)
        self.recorder = CompileRecorder()
        self.switch = PhaseSwitch([Target("net", self.module)], {"infer": config}, recorder=self.recorder)
        self.switch.install()
        self.switch.select("infer", compiled=config is not None, frozen=bool(config and config.freezes))
        self.blocks: list[float] = []

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        # A context for each call, as in a Trainer's steps: within one, autocast remembers its casts of weights.
        with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.module(images)

    def time(self, images: torch.Tensor, calls: int) -> None:
        synchronize(images)
        started = time.perf_counter()
        for _ in range(calls):
            self(images)
        synchronize(images)
        self.blocks.append((time.perf_counter() - started) / calls * 1000)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.blocks)

    @property
    def folded_mb(self) -> float:
        return sum(event.folded_mb or 0 for event in self.recorder.of("infer", "fold"))


def synchronize(images: torch.Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize()


def refresh_ms(way: Way, images: torch.Tensor) -> float:
    """What a call takes more when the folded tensors are to be computed anew."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(10):
        for suspected in times:
            if suspected:
                way.switch.suspect_weights()
            synchronize(images)
            started = time.perf_counter()
            way(images)
            synchronize(images)
            times[suspected].append((time.perf_counter() - started) * 1000)
    return statistics.median(times[True]) - statistics.median(times[False])


def check_us(way: Way) -> float:
    """What a call takes to see that no weight changed."""
    graphs = [graph for region in way.switch.regions("infer") for graph in region.folded_graphs()]
    return sum(min(timeit.repeat(lambda g=g: g._knows(g._seen), number=1000, repeat=5)) * 1000 for g in graphs)


def change_weights(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 0.2 * torch.rand((), generator=generator).item())


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(actual.double() - expected.double()) / expected.double().norm())


def row(name: str, batch_size: int, precision: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    torch._dynamo.reset()
    module = make(name, args.device)
    images = torch.randn(batch_size, 3, args.image_size, args.image_size, device=args.device)
    images = images.to(memory_format=torch.channels_last)
    options = OPTIONS[mode]
    configs = {
        "eager": None,
        "plain": InductorConfig(options=options, fold_weights=False),
        "folded": InductorConfig(options=options),
        "frozen": InductorConfig(options={**options, "freezing": True}),
    }
    ways = {name_: Way(module, config, precision) for name_, config in configs.items()}
    for way in ways.values():
        for _ in range(4):
            way(images)
    synchronize(images)
    started = time.perf_counter()
    ways["eager"](images)
    synchronize(images)
    calls = max(1, round(BLOCK_SECONDS / (time.perf_counter() - started)))
    for _ in range(BLOCKS):
        for way in ways.values():
            way.time(images, calls)
    refresh, check = refresh_ms(ways["folded"], images), check_us(ways["folded"])
    for name_ in ("eager", "folded"):
        change_weights(ways[name_].module)
    off = difference(ways["folded"](images).clone(), ways["eager"](images))
    times = {name_: way.median_ms for name_, way in ways.items()}
    for way in ways.values():
        way.switch.remove()
    return {
        "model": name, "batch_size": batch_size, "precision": precision, "mode": mode, **times,
        "folded / frozen": times["folded"] / times["frozen"], "folded / plain": times["folded"] / times["plain"],
        "folded_mb": ways["folded"].folded_mb, "check_us": check, "refresh_ms": refresh, "difference": off,
    }  # fmt: skip


COLUMNS = {
    "model": "{}", "batch_size": "{}", "precision": "{}", "mode": "{}",
    "eager": "{:.2f}", "plain": "{:.2f}", "folded": "{:.2f}", "frozen": "{:.2f}",
    "folded / frozen": "{:.3f}", "folded / plain": "{:.3f}",
    "folded_mb": "{:.0f}", "check_us": "{:.1f}", "refresh_ms": "{:.2f}", "difference": "{:.1e}",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["resnet50", "vit_b_16", "convnext_tiny", "timm/efficientnet_b0"]
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 16, 128])
    parser.add_argument("--precisions", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--modes", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.device == "cpu":
        args.modes = [mode for mode in args.modes if mode != "reduce-overhead"] or ["default"]

    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " --- |" * len(COLUMNS), flush=True)
    rows = []
    for name in args.models:
        for batch_size in args.batch_sizes:
            for precision in args.precisions:
                for mode in args.modes:
                    rows.append(row(name, batch_size, precision, mode, args))
                    print("| " + " | ".join(f.format(rows[-1][c]) for c, f in COLUMNS.items()) + " |", flush=True)
    print(f"\ntorch {torch.__version__}, {torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
