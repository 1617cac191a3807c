"""GPU memory of training: a model like GPT-2 with settings for less memory, or another model in several modes.

    python benchmarks/memory.py --json memory.json            # each way in its own process
    python benchmarks/memory.py --model resnet50 --batch-size 16 --steps 400  # long enough for the choice of "auto"
    python benchmarks/memory.py --tiny --device cpu --steps 20  # without figures of memory, to test the script

By default, the model has the size of GPT-2 (12 layers, width 768, 1,024 tokens), computes its loss itself and trains
with AdamW. Another model trains with SGD and momentum. Each way is one `Trainer.fit` in bf16. The script reads the
statistics of torch's allocator: the largest allocated and reserved memory of the whole run, and of its last steps.
Lightning's sanity check and validation are off.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from models import make
from tables import Row, in_own_process, parser_for, print_columns, save, say, write_row
from torch import Tensor, nn
from trainer import BlockClock, Classifier, make_trainer

from compile_callbacks import InductorCompile
from compile_callbacks.report.file import environment

LAST_STEPS = 5
LESS: dict[str, Any] = {"train_mode": "default", "baseline_steps": 0, "verify": "off"}
BY_HAND = {"torch.compile by hand": "default", "reduce-overhead by hand": "reduce-overhead"}
CALLBACKS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "torch.compile by hand": None,
    'InductorCompile("default")': {"train_mode": "default"},
    "baseline_steps=0": {"train_mode": "default", "baseline_steps": 0},
    'baseline_steps=0, verify="off"': LESS,
    'baseline_steps=0, verify="off", budget': LESS,
    "InductorCompile()": {},
    'InductorCompile("auto")': {"train_mode": "auto"},
}
"""The arguments of the callback, for each way that has one."""
MODES = 'InductorCompile("default")', "reduce-overhead by hand", "InductorCompile()", 'InductorCompile("auto")'
"""The ways of another model."""
MEMORY = "peak_memory_mib", "reserved_mib", "last_peak_memory_mib", "last_reserved_mib"
COLUMNS = {
    "model": "{}", "batch_size": "{}", "way": "{}", "mode": "{}", "peak_memory_mib": "{:,.0f}",
    "reserved_mib": "{:,.0f}", "last_peak_memory_mib": "{:,.0f}", "last_reserved_mib": "{:,.0f}",
    "of_default": "{:.2f}", "step_ms": "{:.1f}", "compared": "{}",
}  # fmt: skip


class Layer(nn.Module):
    """A pre-norm transformer layer with causal attention; shapes (N, T, C) in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm_2(x))


class LanguageModel(nn.Module):
    """Returns the loss of the next tokens, as GPT-2 of Hugging Face does if it gets labels."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.token.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Trained(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=True)


class LastPeak(pl.Callback):
    """Resets the peaks of the allocator before the last steps, and keeps the earlier peaks."""

    def __init__(self, first: int) -> None:
        self.first, self.earlier = first, (0.0, 0.0)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.first and torch.cuda.is_initialized():
            self.earlier = peaks()
            torch.cuda.reset_peak_memory_stats()


def peaks() -> tuple[float, float]:
    """The largest allocated and the largest reserved memory in MiB; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20


def measure(way: str, args: argparse.Namespace) -> Row:
    """Train, and return the row of a way."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    size = (2, 64, 2, 500, 32) if args.tiny else (12, 768, 12, 50257, 1024)
    net: nn.Module
    module: pl.LightningModule
    batches: list[Any]
    if args.model:
        net, *batch = make(args.model, args.batch_size, args.image_size, args.device)
        module, batches = Classifier(net), [batch] * args.steps
    else:
        net = LanguageModel(*size)
        module, batches = Trained(net), [torch.randint(size[3], (args.batch_size, size[4])) for _ in range(args.steps)]
    if way in BY_HAND:
        net.compile(mode=BY_HAND[way])
    callbacks: list[pl.Callback] = []
    arguments = CALLBACKS.get(way)
    if arguments is not None:
        budget = {"train_mode": {"activation_memory_budget": args.budget}} if way.endswith("budget") else {}
        callbacks.append(InductorCompile(infer_mode=None, **(arguments | budget)))
    clock, peak = BlockClock(), LastPeak(args.steps - LAST_STEPS)
    trainer = make_trainer(args.device, *callbacks, clock, peak, num_sanity_val_steps=0)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    train = next((call.report.train for call in callbacks if isinstance(call, InductorCompile)), None)
    memory = *map(max, peak.earlier, last := peaks()), *last
    return {
        "model": args.model,
        "mode": train and train.mode,
        "way": way.replace("budget", f"activation_memory_budget={args.budget}"),
        "batch_size": args.batch_size,
        **{name: mib or None for name, mib in zip(MEMORY, memory, strict=True)},
        "step_ms": statistics.median(clock.block_ms[-LAST_STEPS:]),
        "compared": train and train.verified,
        "environment": environment(),
    }


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=40, help="steps of each way; the first 12 are eager with the defaults")
    add("--model", help="a name of models.py; by default a model like GPT-2")
    add("--batch-size", type=int, default=8)
    add("--image-size", type=int, default=224)
    add("--budget", type=float, default=0.5, help="activation_memory_budget of the last way")
    add("--tiny", action="store_true", help="a tiny model, to test the script")
    add("--run-way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.run_way:
        write_row(measure(args.run_way, args))
        return
    rows = []
    for way in MODES if args.model else CALLBACKS:
        say(way)
        rows.append(in_own_process(way, empty_cache=not args.model))
        found = rows[-1].pop("environment")
    before = next(row["peak_memory_mib"] for row in rows if row["way"] == MODES[0])
    for row in rows if before else ():
        row["of_default"] = row["peak_memory_mib"] / before
    model = args.model or f"a {'tiny ' if args.tiny else ''}model like GPT-2"
    title = f"{model}, training, batch {args.batch_size}"
    save(args.json, title, rows, found)
    print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
