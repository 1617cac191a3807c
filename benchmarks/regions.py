"""Llama shapes: whole compile by hand, accelerate's regional compile, and `targets="repeated"`.

The workload is that of accelerate's own benchmark (benchmarks/torch.compile of its repository): float16, eval mode, 128
tokens, and a forward pass with gradients enabled. With --train, a step is forward and backward. Each way is a process
with an empty cache. One process after the other runs its first step, in which everything compiles, and waits. Then the
steps of all ways are timed in alternating blocks, because such short steps depend on the CPU. accelerate must be
installed for its rows.

python benchmarks/regions.py [--models 1b 3b 8b] [--batch-sizes 1 4] [--train] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch
from conduct import Group, Variant, Workload
from tables import Row, add_pacing, find, parser_for, print_columns, rows_of, say
from torch import nn
from turn import Turn
from ways import Pacer

from compile_callbacks import compile_phases, report_of

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
    "backward_seconds": "{:.1f}", "step_ms": "{:.2f}", "of_whole": "{:.3f}", "spread_ms": "{:.2f}",
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


def loop(work: Workload, way: Variant, connection: Connection, turn: Turn, steps: int) -> None:
    """Run steps of one way until `Pacer` ends them."""
    net = original = llama(work.model, work.device)
    if way.name == "whole by hand":
        net = torch.compile(net)
    elif way.name == "accelerate":
        from accelerate.utils import compile_regions

        net = compile_regions(net)
    elif way.name == "repeated":
        compile_phases(net, "default", "default", targets="repeated", verify="off")
    tokens = torch.randint(0, 250, (work.batch_size, 128), device=work.device)

    def info() -> dict[str, Any]:
        if way.name != "repeated":
            return {}
        report = report_of(original).train
        # The library compiles backward graphs in the forward pass, and torch.compile in the first backward pass.
        seconds = sum(event.get("backward_seconds") or 0.0 for event in report.diagnostics.events)
        return {"report": report.to_dict(), "targets": list(report.targets), "backward_seconds": seconds}

    pacer = Pacer(connection, turn, steps, info=info)
    while True:
        pacer.before_step()
        logits = net(tokens, use_cache=False).logits
        if work.phase == "train":
            logits.float().logsumexp(-1).mean().backward()
            net.zero_grad()


def compared(rows: Iterable[Row]) -> list[Row]:
    """The rows, with their times divided by those of the whole compile."""
    rows = list(rows)
    for row in rows:
        whole = find(rows, "whole by hand", **{name: row[name] for name in ("model", "batch_size", "phase")})
        for name, ratio in {"first_step_seconds": "of_whole_first", "step_ms": "of_whole"}.items():
            if whole.get(name) and row.get(name) and row["way"] != "eager":
                row[ratio] = row[name] / whole[name]
    return rows


def show(rows: Iterable[Row]) -> None:
    print_columns(COLUMNS, compared(rows))


def main() -> None:
    """Run each way in a new process, and print the table."""
    parser = parser_for(__doc__)
    add_pacing(parser)
    parser.set_defaults(jobs=1, prepare_steps=5)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(SHAPES), default=["1b", "3b", "8b"])
    add("--batch-sizes", type=int, nargs="+", default=[1, 4])
    add("--ways", nargs="+", choices=WAYS, default=WAYS)
    add("--train", action="store_true")
    args = parser.parse_args()
    if "accelerate" in args.ways and importlib.util.find_spec("accelerate") is None:
        say("accelerate is not installed, so its rows are missing")
        args.ways = [way for way in args.ways if way != "accelerate"]
    phase = "train" if args.train else "forward"
    batches: list[list[Group]] = [
        [(Workload(name, phase, size, 0, args.device, 0), [Variant(way, "llama") for way in args.ways])]
        for name in args.models
        for size in args.batch_sizes
    ]
    show(rows_of(args, f"Llama shapes, {phase}", batches, own_caches=True))


if __name__ == "__main__":
    main()
