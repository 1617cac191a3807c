"""What finding the graph of a call costs in a training step: Dynamo's guards, and this library's.

In torch 2.11 Dynamo skips guards on weights unless it is told not to, and then does not see a parameter thaw
(docs/correctness.md). This library looks at all weights itself, and leaves Dynamo the rest.

The net has as many layers and weights as a ResNet-50, and small ones: what a step computes hardly touches the CPU's
caches, as where a GPU computes and the step waits for the host. Graphs are not compiled, as guards are the same; each
step computes gradients and moves the weights. The time is that of "TorchDynamo Cache Lookup" in torch's profiler, a
mean of all steps, and for this library's own look at the weights a mean of the steps' clock.

python benchmarks/guards.py [--layers 53] [--device cpu] [--steps 50]
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from typing import Any, Literal, get_args

import torch
import torch._dynamo
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.compiling.weight_guards import WeightGuards, replaced

Way = Literal["torch's own settings", "torch, all weights", "this library"]


def small_net(layers: int) -> nn.Module:
    """A convolution, a batch norm and an activation, so many times; a ResNet-50 has them 53 times."""
    convolved = (nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(*convolved, nn.Flatten(), nn.Linear(4, 4))


def region(region_module: nn.Module, images: torch.Tensor) -> Any:
    """What is compiled, as the library does it."""
    return region_module(images)


def microseconds(layers: int, device: str, steps: int, way: Way) -> tuple[float, float]:
    """A step's time in Dynamo's guards, and in the library's."""
    torch._dynamo.reset()
    net = small_net(layers).to(device)
    images = torch.randn(2, 4, 1, 1, device=device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    guards = WeightGuards(net)
    guard_filter = _torch.without_tensor_guards("region_module", functools.partial(replaced, [guards]))
    own_seconds = 0.0

    with torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=way == "torch's own settings"):
        compiled = _torch.compile_function(
            region,
            torch._dynamo.lookup_backend("aot_eager"),
            fullgraph=True,
            dynamic=None,
            guard_filter=guard_filter if way == "this library" else None,
        )

        def step() -> None:
            nonlocal own_seconds
            optimizer.zero_grad()
            if way == "this library":
                started = time.perf_counter()
                guards.changed()
                own_seconds += time.perf_counter() - started
            compiled(net, images).sum().backward()
            optimizer.step()

        for _ in range(4):
            step()
        own_seconds = 0.0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(steps):
                step()
    [lookup] = [event for event in profile.key_averages() if event.key == "TorchDynamo Cache Lookup"]
    return lookup.cpu_time_total / steps, own_seconds / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=53)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}\n")
    print("| us a step | Dynamo's guards | the library's | both |\n| --- | --- | --- | --- |")
    for way in get_args(Way):
        dynamo, own = microseconds(args.layers, args.device, args.steps, way)
        print(f"| {way} | {dynamo:.0f} | {own:.0f} | {dynamo + own:.0f} |", flush=True)


if __name__ == "__main__":
    main()
