"""The time of Dynamo's guards in a training step: with torch's own settings, and with those of this library.

torch 2.11 skips guards on weights by default, and then misses that a parameter is unfrozen (docs/correctness.md). The
backend is "aot_eager", because the guards do not depend on the backend. Each step computes gradients and updates the
weights, so that the CPU's caches are as in training. The time is "TorchDynamo Cache Lookup" in torch's profiler, the
mean of all steps.

python benchmarks/guards.py [--model resnet50] [--device cpu] [--steps 20] [--json FILE]
"""

from __future__ import annotations

import warnings

import torch
import torch._dynamo
from models import make
from tables import parser_for, print_columns, save


def lookup_us(model: str, device: str, steps: int, *, skips: bool) -> float:
    """Microseconds of a step in which Dynamo looks for the graph of a call."""
    torch._dynamo.reset()
    net, images, _ = make(model, 2, 64, device)
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
    parser = parser_for(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [
        {"guards": guards, "lookup_us": lookup_us(args.model, args.device, args.steps, skips=skips)}
        for guards, skips in (("torch's own", True), ("all weights", False))
    ]
    print(f"torch {torch.__version__}, {args.model}")
    print_columns({"guards": "{}", "lookup_us": "{:.0f}"}, rows)
    save(args.json, f"Guards of a training step of {args.model}", rows)


if __name__ == "__main__":
    main()
