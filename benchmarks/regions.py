"""Llama shapes: whole compile by hand, accelerate's regional compile, and `targets="repeated"`.

The workload is that of accelerate's own benchmark (benchmarks/torch.compile of its repository): float16, eval mode, 128
tokens, and a forward pass with gradients enabled. With --train, a step is forward and backward. Each way is a process
with an empty cache. "first" is the duration of the first step, in which everything compiles, and "step" is the median
of the following ones. accelerate must be installed for its rows.

python benchmarks/regions.py [--models 1b 3b 8b] [--batch-sizes 1 4] [--train] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tables import Row, find, in_own_process, parser_for, print_columns, print_environment, save, say
from torch import nn
from trainer import synchronize

from compile_callbacks import compile_phases, report_of
from compile_callbacks.report.file import environment

# Hidden size, layers, heads, key and value heads, and intermediate size of Llama 3.2 1B and 3B, and 3.1 8B.
SHAPES = {
    "1b": (2048, 16, 32, 8, 8192),
    "3b": (3072, 28, 24, 8, 8192),
    "8b": (4096, 32, 32, 8, 14336),
    "tiny": (64, 3, 4, 2, 128),
}
WAYS = ("eager", "whole by hand", "accelerate", "repeated")
COLUMNS = {
    "model": "{}", "batch_size": "{}", "way": "{}", "first_step_seconds": "{:.1f}", "of_whole_first": "{:.2f}",
    "step_ms": "{:.2f}", "of_whole": "{:.3f}", "spread_ms": "{:.2f}",
}  # fmt: skip


def llama(name: str, device: str) -> nn.Module:
    """A Llama with new weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, groups, width = SHAPES[name]
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=width, vocab_size=256 if name == "tiny" else 128_256, tie_word_embeddings=name != "8b",
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.float16 if device == "cuda" else torch.float32).eval()


def run(way: str, name: str, batch_size: int, args: argparse.Namespace) -> Row:
    """One way, in this process."""
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    net = llama(name, args.device)
    if way == "whole by hand":
        net = torch.compile(net)
    elif way == "accelerate":
        from accelerate.utils import compile_regions

        net = compile_regions(net)
    elif way == "repeated":
        compile_phases(net, "default", "default", targets="repeated", verify="off")
    tokens = torch.randint(0, 250, (batch_size, 128), device=args.device)
    seconds = []
    for _ in range(args.steps + 1):
        synchronize()
        started = time.perf_counter()
        logits = net(tokens, use_cache=False).logits
        if args.train:
            logits.float().logsumexp(-1).mean().backward()
            net.zero_grad()
        synchronize()
        seconds.append(time.perf_counter() - started)
    quartiles = statistics.quantiles(seconds[1:], n=4)
    train = report_of(net).train if way == "repeated" else None
    return {
        "graphs": train and train.graphs, "graph_breaks": train and train.graph_breaks,
        "targets": train and list(train.targets), "backward_seconds": train and backward_seconds(train),
        "model": name, "batch_size": batch_size, "way": way, "phase": "train" if args.train else "forward",
        "first_step_seconds": seconds[0], "step_ms": statistics.median(seconds[1:]) * 1000, "samples": args.steps,
        "spread_ms": (quartiles[2] - quartiles[0]) * 1000, "environment": environment(),
    }  # fmt: skip


def backward_seconds(report: Any) -> float:
    """The part of the first step in which Inductor compiled backward graphs; by hand, `backward()` compiles them."""
    return sum(event.get("backward_seconds") or 0.0 for event in report.diagnostics.events)


def main() -> None:
    """Run each way in a new process, and print the table."""
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(SHAPES), default=["1b", "3b", "8b"])
    add("--batch-sizes", type=int, nargs="+", default=[1, 4])
    add("--ways", nargs="+", choices=WAYS, default=WAYS)
    add("--train", action="store_true")
    add("--steps", type=int, default=100)
    add("--run", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        os.dup2(2, 1)
        way, name, batch_size = args.run
        Path(os.environ["ROW"]).write_text(json.dumps(run(way, name, int(batch_size), args)))
        return
    rows: list[Row] = []
    found = None
    for name, batch_size, way in [(n, b, w) for n in args.models for b in args.batch_sizes for w in args.ways]:
        if way == "accelerate" and importlib.util.find_spec("accelerate") is None:
            say("accelerate is not installed, so its rows are missing")
            continue
        row = in_own_process(way, name, str(batch_size))
        if row is None:
            say(f"{name}, batch {batch_size}, {way} failed")
            continue
        found = row.pop("environment")
        whole = find([*rows, row], "whole by hand", model=name, batch_size=batch_size)
        if whole:
            row["of_whole_first"] = row["first_step_seconds"] / whole["first_step_seconds"]
            row["of_whole"] = row["step_ms"] / whole["step_ms"]
        rows.append(row)
        say(f"{name}, batch {batch_size}, {way}: first {row['first_step_seconds']:.1f} s, step {row['step_ms']:.2f} ms")
        save(args.json, f"Llama shapes, {row['phase']}", rows, found)
    print_environment({"device": found["device"], "versions": found} if found else {"device": None, "versions": {}})
    print_columns(COLUMNS, [{**dict.fromkeys(COLUMNS), **row} for row in rows])


if __name__ == "__main__":
    main()
