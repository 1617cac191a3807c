"""What Dynamo's guards cost in a training step: those that it has by its own settings, and those of this library.

In torch 2.11 Dynamo skips guards on weights unless it is told not to, and then does not see a parameter thaw
(docs/correctness.md). Graphs are not compiled, as guards are the same; each step computes gradients and moves the
weights, so that guards find the CPU's caches as they do in training. The time is that of "TorchDynamo Cache Lookup" in
torch's profiler, a mean of all steps.

python benchmarks/guards.py [--model resnet50] [--device cpu] [--steps 20]
"""

from __future__ import annotations

import argparse
import warnings

import torch
import torch._dynamo
import torchvision


def lookup_us(model: str, device: str, steps: int, *, skips: bool) -> float:
    """Microseconds a step that Dynamo takes to find the graph of a call."""
    torch._dynamo.reset()
    net = torchvision.models.get_model(model).to(device)
    images = torch.randn(2, 3, 64, 64, device=device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    with torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=skips):
        compiled = torch.compile(net, backend="aot_eager")

        def step() -> None:
            optimizer.zero_grad()
            compiled(images).sum().backward()
            optimizer.step()

        for _ in range(4):
            step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(steps):
                step()
    [lookup] = [event for event in profile.key_averages() if event.key == "TorchDynamo Cache Lookup"]
    return lookup.cpu_time_total / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| torch | guards on weights | us a step |\n| --- | --- | --- |")
    for skips in (True, False):
        found = lookup_us(args.model, args.device, args.steps, skips=skips)
        print(f"| {torch.__version__} | {'by torch' if skips else 'all'} | {found:.0f} |", flush=True)


if __name__ == "__main__":
    main()
