"""First step, step time and gradients of a transformer against its depth: whole, separate blocks, and eager.

- eager: not compiled.
- whole: `compile_phases(net)`, one graph of all layers.
- separate: `compile_phases(net, targets=["layers.*"])`, a graph of one layer that all layers share.

Each row is a process with an empty cache; they run one after the other. "first step" is the first training step
with compiling, "step" the median of the following ones. "gradient error" is the largest relative error of a gradient
against the eager model's, before the first step. The CPU times are of all threads and of the C++ compiler; unlike the
other times, they hardly depend on other processes of the machine. "of whole" is a time divided by the whole model's.

python benchmarks/scaling.py [--device cpu] [--depths 12 24 48] [--width 512] [--mode reduce-overhead] [--steps 30]
                             [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from tables import Row, find, parser_for, print_columns, relative_error, save
from torch import nn

from compile_callbacks import compile_phases, report_of
from compile_callbacks.report.file import environment

WAYS: dict[str, Any] = {"eager": None, "whole": None, "separate": ["layers.*"]}
COLUMNS = {
    "layers": "{}", "way": "{}", "first_step_seconds": "{:.2f}", "of_whole_first_step": "{:.0%}", "step_ms": "{:.2f}",
    "of_whole_step": "{:.0%}", "spread_ms": "{:.2f}", "samples": "{}", "first_step_cpu_seconds": "{:.1f}",
    "step_cpu_ms": "{:.1f}", "load_average": "{:.1f}", "gradient_error": "{:.1e}", "targets": "{}",
}  # fmt: skip


class Transformer(nn.Module):
    """Encoder layers between an embedding and a head."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(width, width), nn.Linear(width, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def measure(way: str, depth: int, args: argparse.Namespace, cache: str, sender: Any) -> None:
    """Measure one row; runs in a process with an empty cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.manual_seed(0)
    net = Transformer(depth, args.width, args.heads).to(args.device)
    x = torch.randn(args.batch_size, args.tokens, args.width, device=args.device)
    dtype = getattr(torch, args.dtype)
    eager = copy.deepcopy(net)
    if way != "eager":
        compile_phases(net, train_mode=args.mode, infer_mode=None, targets=WAYS[way])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=args.device == "cuda")

    def backward(module: nn.Module) -> None:
        with torch.autocast(args.device, dtype, enabled=dtype != torch.float32):
            loss = module(x).float().square().mean()
        loss.backward()

    def step() -> tuple[float, float]:
        started, started_cpu = time.perf_counter(), sum(os.times()[:4])
        optimizer.zero_grad()
        backward(net)
        optimizer.step()
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, sum(os.times()[:4]) - started_cpu

    backward(eager)
    (first, first_cpu), gradients = step(), [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    errors = [relative_error(g, p.grad) for g, p in zip(gradients, eager.parameters(), strict=True) if p.grad.any()]
    for _ in range(args.warmup_steps):
        step()
    seconds = [step() for _ in range(args.steps)]
    quartiles = statistics.quantiles([1000 * wall for wall, _ in seconds], n=4)
    row = {
        "layers": depth, "way": way, "device": args.device, "mode": args.mode, "width": args.width,
        "first_step_seconds": first, "step_ms": quartiles[1], "spread_ms": quartiles[2] - quartiles[0],
        "samples": args.steps, "first_step_cpu_seconds": first_cpu,
        "step_cpu_ms": 1000 * statistics.fmean(cpu for _, cpu in seconds),
        "load_average": os.getloadavg()[0],
        "gradient_error": max(errors), "targets": "" if way == "eager" else ", ".join(report_of(net).train.targets),
        "environment": environment(),
    }  # fmt: skip
    sender.send(row)


def rows_of(args: argparse.Namespace) -> list[Row]:
    """Measure all rows, one process after the other."""
    context = multiprocessing.get_context("spawn")
    rows: list[Row] = []
    found = None
    for depth in args.depths:
        for way in args.ways:
            receiver, sender = context.Pipe(duplex=False)
            with tempfile.TemporaryDirectory() as cache:
                process = context.Process(target=measure, args=(way, depth, args, cache, sender))
                process.start()
                sender.close()
                try:
                    row = receiver.recv()
                    found = row.pop("environment")
                    rows.append(row)
                except EOFError:
                    print(f"depth {depth}, {way}: the process failed", flush=True)
                process.join()
            save(args.json, f"A transformer against its depth, {args.mode}", rows, found)
    return rows


def of_whole(rows: list[Row]) -> list[Row]:
    """Return the rows with their times divided by those of the whole model."""
    columns = dict(zip(("of_whole_first_step", "of_whole_step"), times_of(rows), strict=True))
    compared = []
    for row in rows:
        whole = find(rows, "whole", layers=row["layers"])
        compared.append(row | {name: row[of] / whole[of] for name, of in columns.items() if whole})
    return compared


def show(rows: list[Row]) -> None:
    """Print the table."""
    print_columns(COLUMNS, of_whole(rows))


def times_of(rows: list[Row]) -> tuple[str, str]:
    """Return the fields of the first step and of the later steps: of CPU time on a CPU, which others may use, too."""
    on_cpu = all(row["device"] == "cpu" for row in rows)
    return ("first_step_cpu_seconds", "step_cpu_ms") if on_cpu else ("first_step_seconds", "step_ms")


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--depths", type=int, nargs="+", default=[12, 24, 48])
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    add("--mode", default=None, help="by default reduce-overhead on a GPU, else default")
    add("--width", type=int, default=None, help="by default 512 on a GPU, else 64")
    add("--heads", type=int, default=8)
    add("--tokens", type=int, default=None, help="by default 256 on a GPU, else 32")
    add("--batch-size", type=int, default=8)
    add("--dtype", choices=["float32", "bfloat16"], default=None, help="by default bfloat16 on a GPU, else float32")
    add("--warmup-steps", type=int, default=5)
    add("--steps", type=int, default=30)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.mode = args.mode or ("reduce-overhead" if on_gpu else "default")
    args.width = args.width or (512 if on_gpu else 64)
    args.tokens = args.tokens or (256 if on_gpu else 32)
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    show(rows_of(args))


if __name__ == "__main__":
    main()
