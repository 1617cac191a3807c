"""A transformer of a billion parameters under FSDP2: eager steps against steps with compiled blocks, in one run.

    python benchmarks/fsdp2.py --json fsdp2.json              # two GPUs; Lightning starts the second process
    python benchmarks/fsdp2.py --tiny --device cpu            # two processes on the CPU, to see that it works

The blocks are written as Hugging Face's Llama writes them: RMS norms in float32, rotary embeddings, attention by
`scaled_dot_product_attention`, a gated MLP; depth and width are those of Qwen2.5-1.5B. Each block is sharded
(`fully_shard`), then the rest; weights are gathered in bfloat16 and gradients reduced in float32. Ways run one after
another, each a `Trainer.fit` from the same seed on the same batches, eager first and last. A step is from one batch's
start to the next one's, synchronised; losses are the first process's, and those of the two eager fits show how far
rounding alone goes.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from compile_callbacks import InductorCompile

PROCESSES = 2
WARMUP_STEPS = 5  # not timed; what compiles does so in the first
EAGER = "eager"


@dataclass(frozen=True)
class Size:
    layers: int = 28
    width: int = 1536
    heads: int = 12
    hidden: int = 5120
    vocabulary: int = 32000
    sequence: int = 2048
    batch: int = 12  # sequences a process; with 4, compiling gained nothing on H200s


TINY = Size(layers=2, width=32, heads=2, hidden=64, vocabulary=64, sequence=16, batch=2)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm, self.mlp_norm = RMSNorm(size.width), RMSNorm(size.width)
        self.queries, self.keys, self.values, self.mixed = (
            nn.Linear(size.width, size.width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        normed = self.attention_norm(x)
        queries, keys, values = (
            project(normed).view(batch, sequence, self.heads, -1).transpose(1, 2)
            for project in (self.queries, self.keys, self.values)
        )
        attended = F.scaled_dot_product_attention(
            rotated(queries, cos, sin), rotated(keys, cos, sin), values, is_causal=True
        )
        x = x + self.mixed(attended.transpose(1, 2).reshape(batch, sequence, width))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Transformer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        head_width = size.width // size.heads
        speeds = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(size.sequence), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class Model(pl.LightningModule):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.losses: list[torch.Tensor] = []

    def configure_model(self) -> None:
        torch.manual_seed(0)  # the same weights in each process, and in each way
        with self.trainer.strategy.root_device:
            self.net = Transformer(self.size)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*self.net.layers, self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"], mp_policy=policy)

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.net(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Counting(Dataset):
    """Sequences that count on in steps of one to nine: there is something to learn."""

    def __init__(self, size: Size, length: int) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        start, stride = torch.randint(self.size.vocabulary, (1,), generator=generator), 1 + index % 9
        return (start + stride * torch.arange(self.size.sequence + 1)) % self.size.vocabulary


class Clock(pl.Callback):
    """Times steps from start to start, and reads the memory of those that are timed."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.peak_bytes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.is_cuda:
            torch.cuda.synchronize()
            if batch_idx == WARMUP_STEPS:
                torch.cuda.reset_peak_memory_stats()
        self.starts.append(time.perf_counter())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()

    @property
    def step_ms(self) -> list[float]:
        times = [1000 * (b - a) for a, b in zip(self.starts, self.starts[1:], strict=False)]
        return times[WARMUP_STEPS:]


def highest(value: float, device: torch.device) -> float:
    """The highest of all processes."""
    there = torch.tensor(value, device=device, dtype=torch.float64)
    torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MAX)
    return float(there)


def run(way: str, size: Size, steps: int, device: str) -> dict[str, Any]:
    clock, module = Clock(), Model(size)
    compiler = None if way == EAGER else InductorCompile(way, None, baseline_steps=0)
    trainer = pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=PROCESSES,
        strategy=ModelParallelStrategy(data_parallel_size=PROCESSES, tensor_parallel_size=1),
        max_steps=steps,
        callbacks=[clock, *([compiler] if compiler else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Counting(size, steps * size.batch * PROCESSES)
    sampler = DistributedSampler(data, PROCESSES, trainer.local_rank, shuffle=False)
    started = time.perf_counter()
    trainer.fit(module, DataLoader(data, size.batch, sampler=sampler))
    step_ms = highest(statistics.median(clock.step_ms), module.device)
    row = {
        "way": way,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "step_ms": step_ms,
        "samples": len(clock.step_ms),
        "tokens_per_second": PROCESSES * size.batch * size.sequence / step_ms * 1000,
        "peak_memory_mb": highest(clock.peak_bytes, module.device) / 2**20,
        "first_step_seconds": highest(clock.starts[1] - clock.starts[0], module.device),
        "fit_seconds": time.perf_counter() - started,
        "losses": torch.stack(module.losses).tolist(),
    }
    if compiler is not None:
        train = compiler.report.train
        row |= {name: getattr(train, name) for name in ("graphs", "graph_breaks", "recompiles", "fallbacks")}
        row |= {"targets": len(train.targets), "compile_seconds": train.compile_seconds, "verified": train.verified}
    return row


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each way against eager: speed by the mean of both eager fits, memory by the smaller, losses by the first."""
    eager = [row for row in rows if row["way"] == EAGER]
    eager_ms = statistics.mean(row["step_ms"] for row in eager)
    memory_mb = min(row["peak_memory_mb"] for row in eager)
    for row in rows:
        row["speedup"] = eager_ms / row["step_ms"]
        row["memory_ratio"] = row["peak_memory_mb"] / memory_mb if memory_mb else None
        apart = [abs(a - b) for a, b in zip(row["losses"], rows[0]["losses"], strict=True)]
        row["losses_apart"] = max(apart)
        row["losses_apart_relative"] = max(a / b for a, b in zip(apart, rows[0]["losses"], strict=True))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| way | step ms | tokens/s | over eager | peak MiB | of eager's | first step s | last loss | losses apart |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        memory = f"{row['memory_ratio']:.2f}" if row["memory_ratio"] else "-"
        lines.append(
            f"| {row['way']} | {row['step_ms']:.2f} | {row['tokens_per_second']:,.0f} | {row['speedup']:.2f}x "
            f"| {row['peak_memory_mb']:.0f} | {memory} | {row['first_step_seconds']:.1f} | {row['losses'][-1]:.4f} "
            f"| {row['losses_apart']:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of no use, to see that it works")
    parser.add_argument("--modes", nargs="+", default=["default"], help="train modes of InductorCompile")
    parser.add_argument("--steps", type=int, default=40, help=f"of each way, {WARMUP_STEPS} of them not timed")
    for name, value in vars(Size()).items():
        parser.add_argument(f"--{name}", type=int, help=f"default {value}")
    parser.add_argument("--json", type=Path, help="where to write the figures; after each way")
    arguments = parser.parse_args()
    if arguments.steps < WARMUP_STEPS + 2:
        parser.error(f"--steps must be {WARMUP_STEPS + 2} or more")
    given = {name: getattr(arguments, name) for name in vars(Size()) if getattr(arguments, name) is not None}
    size = Size(**{**vars(TINY if arguments.tiny else Size()), **given})
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    rows: list[dict[str, Any]] = []
    for way in (EAGER, *arguments.modes, EAGER):
        rows.append(run(way, size, arguments.steps, arguments.device))
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        if torch.distributed.get_rank() == 0:
            shown = {name: value for name, value in rows[-1].items() if name != "losses"}
            print(json.dumps(shown), file=sys.stderr, flush=True)
            if arguments.json:
                versions = {"torch": torch.__version__, "lightning": pl.__version__}
                device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
                figures = {"size": vars(size), "device": device, **versions, "rows": compared(rows)}
                arguments.json.write_text(json.dumps(figures, indent=1))
    if torch.distributed.get_rank() == 0:
        print(table(compared(rows)))


if __name__ == "__main__":
    main()
