"""What Dynamo's guards cost in a training step: those that it has by its own settings, and those of this library.

In torch 2.11 Dynamo passes over guards on weights unless it is told not to, and then does not see a parameter thaw
(docs/correctness.md); this library has them passed over, and compares all weights itself. Graphs are not compiled, as
guards are the same; each step computes gradients and moves the weights, so that guards find the CPU's caches as they do
in training. The time is that of "TorchDynamo Cache Lookup" in torch's profiler, a mean of all steps, and that of the
comparison.

python benchmarks/guards.py [--model resnet50] [--device cpu] [--steps 20]
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
import torch._dynamo
import torchvision

from compile_callbacks import _torch
from compile_callbacks.compiling.guard_refresher import GuardRefresher


def guards_us(model: str, device: str, steps: int, *, passes_over: bool, compares: bool) -> float:
    """Microseconds a step that Dynamo takes to find the graph of a call, and the library to compare weights."""
    torch._dynamo.reset()
    net = torchvision.models.get_model(model).to(device)
    images = torch.randn(2, 3, 64, 64, device=device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    refresher, comparing = GuardRefresher(net), []
    with torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=passes_over):
        compiled = torch.compile(net, backend="aot_eager")

        def step() -> None:
            optimizer.zero_grad()
            if compares:
                begun = time.perf_counter()
                refresher.refresh((images,), {}, guarded=True)
                comparing.append(time.perf_counter() - begun)
            compiled(images).sum().backward()
            optimizer.step()

        for _ in range(4):
            step()
        comparing.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(steps):
                step()
    [lookup] = [event for event in profile.key_averages() if event.key == "TorchDynamo Cache Lookup"]
    return lookup.cpu_time_total / steps + sum(comparing) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| torch | guards | us a step |\n| --- | --- | --- |")
    ways = {"by torch's own settings": (True, False), "on all weights": (False, False)}
    if _torch.SKIPS_GUARDS_ON_WEIGHTS:
        ways["passed over, and weights compared"] = True, True
    for name, (passes_over, compares) in ways.items():
        found = guards_us(args.model, args.device, args.steps, passes_over=passes_over, compares=compares)
        print(f"| {torch.__version__} | {name} | {found:.0f} |", flush=True)


if __name__ == "__main__":
    main()
