"""A small spiking network over 20 time steps: eager, one hand-made CUDA graph of the step, and `reduce-overhead`.

The hand-made graph contains forward, loss and backward, and copies each batch into its inputs; the optimizer runs
outside of it. By hand and with this library, Dynamo compiles the network, and the loss runs eagerly. Each way is a
process with an empty cache. "first" is the first step, and "step" the median of the following ones.

python benchmarks/spiking.py [--batch-sizes 8 96] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from tables import Row, find, in_own_process, parser_for, print_columns, save, say
from torch import Tensor, nn
from trainer import synchronize

from compile_callbacks import compile_phases
from compile_callbacks.report.file import environment

STEPS_IN_TIME, CLASSES, DECAY, THRESHOLD = 20, 10, 0.9, 0.2
WAYS = ("eager", "hand-made graph", "by hand, reduce-overhead", "compile_phases, reduce-overhead")
COLUMNS = {
    "batch_size": "{}", "way": "{}", "first_step_seconds": "{:.1f}", "step_ms": "{:.2f}", "spread_ms": "{:.2f}",
    "of_eager": "{:.2f}", "last_loss": "{:.4f}",
}  # fmt: skip


class SpikingNet(nn.Module):
    """Leaky integrate-and-fire layers; events (T, N, 2, 32, 32) in, spike counts (N, C) out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.last = nn.Linear(32 * 8 * 8, CLASSES)

    def forward(self, events: Tensor) -> Tensor:
        first = second = last = count = 0.0
        for frame in events:
            first, spikes = fire(first, self.first(frame))
            second, spikes = fire(second, self.second(spikes))
            last, spikes = fire(last, self.last(spikes.flatten(1)))
            count = count + spikes
        return count


def fire(potential: Tensor | float, current: Tensor) -> tuple[Tensor, Tensor]:
    """The new potential and the spikes of a layer; the gradient of a spike is that of a sigmoid."""
    potential = DECAY * potential + current
    smooth = torch.sigmoid(4 * (potential - THRESHOLD))
    spikes = (potential > THRESHOLD).to(potential.dtype) + smooth - smooth.detach()
    return potential - THRESHOLD * spikes.detach(), spikes


def loss_of(net: nn.Module, events: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(events), labels)


def hand_made(net: nn.Module, events: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """Return the step as one CUDA graph, with its own inputs."""
    inputs, stream = (events.clone(), labels.clone()), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            loss_of(net, *inputs).backward()
            net.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = loss_of(net, *inputs)
        loss.backward()

    def step() -> Tensor:
        inputs[0].copy_(events)
        inputs[1].copy_(labels)
        graph.replay()
        return loss

    return step


def run(way: str, batch_size: int, args: argparse.Namespace) -> Row:
    """One way, in this process."""
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    net = SpikingNet().to(args.device)
    events = (torch.rand(STEPS_IN_TIME, batch_size, 2, 32, 32, device=args.device) < 0.2).float()
    labels = torch.randint(CLASSES, (batch_size,), device=args.device)
    if way.startswith("by hand"):
        net.compile(mode="reduce-overhead")
    elif way.startswith("compile_phases"):
        compile_phases(net, "reduce-overhead", "eager")
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, foreach=True)
    seconds, step = [], None
    for _ in range(args.steps + 1):
        synchronize()
        started = time.perf_counter()
        if way == "hand-made graph":
            step = step or hand_made(net, events, labels)
            loss = step()  # overwrites the gradients
            optimizer.step()
        else:
            loss = loss_of(net, events, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronize()
        seconds.append(time.perf_counter() - started)
    quartiles = statistics.quantiles(seconds[-args.steps // 2 :], n=4)
    return {
        "batch_size": batch_size, "way": way, "first_step_seconds": seconds[0], "step_ms": quartiles[1] * 1000,
        "spread_ms": (quartiles[2] - quartiles[0]) * 1000, "last_loss": loss.item(), "environment": environment(),
    }  # fmt: skip


def main() -> None:
    """Run each way in a new process, and print the table."""
    parser = parser_for(__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 96])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        os.dup2(2, 1)
        Path(os.environ["ROW"]).write_text(json.dumps(run(args.run[0], int(args.run[1]), args)))
        return
    rows: list[Row] = []
    for batch_size, way in [(size, way) for size in args.batch_sizes for way in args.ways]:
        row = in_own_process(way, str(batch_size))
        if row is None:
            say(f"batch {batch_size}, {way} failed")
            continue
        found = row.pop("environment")
        eager = find([*rows, row], "eager", batch_size=batch_size)
        row["of_eager"] = eager["step_ms"] / row["step_ms"] if eager else None
        rows.append(row)
        say(f"batch {batch_size}, {way}: step {row['step_ms']:.2f} ms")
        save(args.json, "a spiking network, training", rows, found)
    print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
