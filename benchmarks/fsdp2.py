"""A transformer of a billion parameters under FSDP2: eager steps against steps with compiled blocks, in one run.

    python benchmarks/fsdp2.py --json fsdp2.json              # two GPUs; Lightning starts the second process
    python benchmarks/fsdp2.py --tiny --device cpu            # two processes on the CPU, to test the script

The blocks are those of Hugging Face's Llama: RMS norms in float32, rotary embeddings, attention by
`scaled_dot_product_attention`, a gated MLP; depth and width are those of Qwen2.5-1.5B. Each block is sharded
(`fully_shard`), then the rest; weights are gathered in bfloat16 and gradients reduced in float32. The ways run one
after another, each a `Trainer.fit` from the same seed on the same batches, eager first and last. A step lasts from the
start of a batch to the start of the next one, synchronized. The losses are those of the first process; those of the two
eager fits show the effect of rounding alone.
"""

from __future__ import annotations

import gc
import logging
import statistics
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from tables import Row, parser_for, print_columns, save, say
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from trainer import BlockClock, make_trainer

from compile_callbacks import InductorCompile

PROCESSES = 2
WARMUP_STEPS = 5  # not timed; compiles happen in the first one
EAGER = "eager"
COLUMNS = {
    "way": "{}", "step_ms": "{:.2f}", "tokens_per_second": "{:,.0f}", "speedup": "{:.2f}x",
    "peak_memory_mib": "{:.0f}", "memory_ratio": "{:.2f}", "first_step_seconds": "{:.1f}", "last_loss": "{:.4f}",
    "losses_apart": "{:.4f}",
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    layers: int = 28
    width: int = 1536
    heads: int = 12
    hidden: int = 5120
    vocabulary: int = 32000
    sequence: int = 2048
    batch: int = 12  # sequences of each process; with 4, compiling gained nothing on H200s


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
        torch.manual_seed(0)  # the same weights in each process, and in each fit
        with self.trainer.strategy.root_device:
            self.net = Transformer(self.size)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*self.net.layers, self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"], mp_policy=policy)  # type: ignore[index]

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.net(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Counting(Dataset):
    """Sequences that count in steps of one to nine, so that there is something to learn."""

    def __init__(self, size: Size, length: int) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        start, stride = torch.randint(self.size.vocabulary, (1,), generator=generator), 1 + index % 9
        return (start + stride * torch.arange(self.size.sequence + 1)) % self.size.vocabulary


class Clock(BlockClock):
    """Times steps from start to start, and reads the peak memory of the timed ones."""

    peak_bytes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if batch.is_cuda and batch_idx == WARMUP_STEPS:
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()


def highest(value: float, device: torch.device) -> float:
    """The highest value of all processes."""
    tensor = torch.tensor(value, device=device, dtype=torch.float64)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return float(tensor)


def run(way: str, size: Size, steps: int, device: str) -> Row:
    clock, module = Clock(), Model(size)
    compiler = None if way == EAGER else InductorCompile(way, None, baseline_steps=0)
    strategy = ModelParallelStrategy(data_parallel_size=PROCESSES, tensor_parallel_size=1)
    trainer = make_trainer(
        device, clock, *([compiler] if compiler else []), devices=PROCESSES, strategy=strategy, precision=None,
        max_epochs=None, max_steps=steps,
    )  # fmt: skip
    data = Counting(size, steps * size.batch * PROCESSES)
    sampler = DistributedSampler(data, PROCESSES, trainer.local_rank, shuffle=False)
    trainer.fit(module, DataLoader(data, size.batch, sampler=sampler))
    timed_ms = clock.block_ms[WARMUP_STEPS:]
    step_ms = highest(statistics.median(timed_ms), module.device)
    row = {
        "way": way,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "step_ms": step_ms,
        "samples": len(timed_ms),
        "tokens_per_second": PROCESSES * size.batch * size.sequence / step_ms * 1000,
        "peak_memory_mib": highest(clock.peak_bytes, module.device) / 2**20,
        "first_step_seconds": highest(clock.block_ms[0] / 1000, module.device),
        "losses": torch.stack(module.losses).tolist(),
    }
    if compiler is not None:
        train = compiler.report.train
        row |= {name: getattr(train, name) for name in ("graphs", "graph_breaks", "recompiles", "fallbacks")}
        row |= {"targets": len(train.targets), "compile_seconds": train.compile_seconds, "verified": train.verified}
    return row


def compare(rows: list[Row]) -> None:
    """Compare with eager: speed with the mean of both eager fits, memory with the smaller, losses with the first."""
    eager = [row for row in rows if row["way"] == EAGER]
    eager_ms = statistics.mean(row["step_ms"] for row in eager)
    memory_mib = min(row["peak_memory_mib"] for row in eager)
    for row in rows:
        row["speedup"] = eager_ms / row["step_ms"]
        row["memory_ratio"] = row["peak_memory_mib"] / memory_mib if memory_mib else None
        row["last_loss"] = row["losses"][-1]
        row["losses_apart"] = max(abs(a - b) for a, b in zip(row["losses"], rows[0]["losses"], strict=True))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test the script")
    parser.add_argument("--modes", nargs="+", default=["default"], help="train modes of InductorCompile")
    parser.add_argument("--steps", type=int, default=40, help=f"of each way, {WARMUP_STEPS} of them not timed")
    args = parser.parse_args()
    if args.steps < WARMUP_STEPS + 2:
        parser.error(f"--steps must be {WARMUP_STEPS + 2} or more")
    size = TINY if args.tiny else Size()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    rows: list[Row] = []
    for way in (EAGER, *args.modes, EAGER):
        rows.append(run(way, size, args.steps, args.device))
        compare(rows)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        if torch.distributed.get_rank() == 0:
            say(str({name: value for name, value in rows[-1].items() if name != "losses"}))
            save(args.json, f"A transformer under FSDP2: {size}", rows)
    if torch.distributed.get_rank() == 0:
        print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
