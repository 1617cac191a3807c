"""The first step of a training run without a Trainer, compiling included, and the steps after it.

Each measurement is a process with its own folders for the caches of torch, Triton and the C++ compiler. The time
is that from `compile_phases` to the end of the first step, forward and backward, after one eager step that initializes
the device; imports are excluded. The ways:

- cold: with an empty `cache_dir`;
- warm: with the `cache_dir` that the cold run left, and everything else empty;
- regional cold: with nothing cached, and one graph for all repeated blocks (targets="repeated").

``transformer`` is an encoder of ViT-L's width on embeddings; --depth, --width, --heads and --length are its size.
`warm_start.py` compares with torch's own cache folder, in a Trainer.

python benchmarks/start.py [--model resnet18] [--device cpu] [--batch-size 4] [--image-size 64] [--mode default]
                           [--precision fp32] [--ways "cold,warm"] [--steps 20] [--repeats 3] [--json FILE]
python benchmarks/start.py --model transformer --depth 24 --ways "cold,regional cold" --device cuda --precision bf16
                           --batch-size 32
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from models import make
from tables import Row, parser_for, print_columns, save, say
from torch import Tensor, nn
from trainer import synchronize

from compile_callbacks import compile_phases, report_of
from compile_callbacks.cli.bench_measure import summarize
from compile_callbacks.report.file import environment

# The folder of all other caches, that of `cache_dir`, and the targets.
WAYS = {"cold": ("cold", "kept", None), "warm": ("warm", "kept", None), "regional cold": ("regional", None, "repeated")}
WARMUP_STEPS = 5
COLUMNS = {
    "way": "{}", "first_step_seconds": "{:.1f}", "of_cold": "{:.0%}", "step_ms": "{:.2f}", "spread_ms": "{:.2f}",
    "eager_ms": "{:.2f}", "graphs": "{}", "cache_hits": "{}", "cache_misses": "{}",
}  # fmt: skip


def transformer(args: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """An encoder with a linear embedding and head, and a batch for it."""
    layer = nn.TransformerEncoderLayer(
        args.width, args.heads, 4 * args.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, args.depth, enable_nested_tensor=False)
    module = nn.Sequential(nn.Linear(args.width, args.width), encoder, nn.Linear(args.width, 1000))
    return module.to(args.device), torch.randn(args.batch_size, args.length, args.width, device=args.device)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The first step and those after it, in this process."""
    warnings.simplefilter("ignore")
    importlib.import_module("torch._inductor.compile_fx")  # seconds of the first compile otherwise
    torch.set_float32_matmul_precision("high")
    if args.model == "transformer":
        module, inputs = transformer(args)
    else:
        module, inputs, _ = make(args.model, args.batch_size, args.image_size, args.device)

    def step_ms() -> float:
        if args.device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        started = time.perf_counter()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            out = module(inputs)
        out.float().sum().backward()
        module.zero_grad(set_to_none=True)
        synchronize()
        return (time.perf_counter() - started) * 1000

    eager_ms = [step_ms() for _ in range(1 + WARMUP_STEPS + args.steps)][1 + WARMUP_STEPS :]
    started = time.perf_counter()
    modes = {"train_mode": args.mode, "infer_mode": None}
    compile_phases(module, **modes, targets=args.targets, verify="off", cache_dir=args.cache_dir)
    step_ms()
    first_step_seconds = time.perf_counter() - started
    compiled_ms = [step_ms() for _ in range(WARMUP_STEPS + args.steps)][WARMUP_STEPS:]
    report = report_of(module).train
    names = ("compile_seconds", "graphs", "cache_hits", "cache_misses")
    row = {"first_step_seconds": first_step_seconds, **{name: getattr(report, name) for name in names}}
    return {"row": row, "eager_ms": eager_ms, "compiled_ms": compiled_ms, "environment": environment()}


def in_new_process(folder: Path, cache_dir: Path | None, targets: str | None) -> dict[str, Any]:
    """The same in a new process, with all caches but ``cache_dir`` in ``folder``."""
    folder.mkdir()
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TMPDIR": str(folder),  # of precompiled C++ headers
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--measure"]
    command += ["--cache-dir", str(cache_dir)] if cache_dir else []
    command += ["--targets", targets] if targets else []
    result = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = parser_for(__doc__)
    parser.set_defaults(device="cpu")
    add = parser.add_argument
    add("--model", default="resnet18", help="a torchvision model, or transformer")
    add("--batch-size", type=int, default=4)
    add("--image-size", type=int, default=64)
    add("--depth", type=int, default=24)
    add("--width", type=int, default=1024)
    add("--heads", type=int, default=16)
    add("--length", type=int, default=197)
    add("--mode", default="default", help="the train_mode")
    add("--precision", choices=["fp32", "bf16"], default="fp32")
    add("--ways", default="cold,warm", help=f"cold, and any of {', '.join(WAYS)}")
    add("--steps", type=int, default=20, help="timed steps after the first")
    add("--repeats", type=int, default=1, help="processes of each way; the table has their medians")
    add("--measure", action="store_true", help=argparse.SUPPRESS)
    add("--cache-dir", help=argparse.SUPPRESS)
    add("--targets", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args)))
        return
    ways = args.ways.split(",")
    if not set(ways) <= set(WAYS) or "cold" not in ways:
        parser.error(f"--ways {args.ways}: give names of {', '.join(WAYS)}, with 'cold'")
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS if way in ways}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as top:
            for way, of_way in runs.items():
                folder, cache_dir, targets = WAYS[way]
                of_way.append(in_new_process(Path(top, folder), Path(top, cache_dir) if cache_dir else None, targets))
                say(f"{way}: {of_way[-1]['row']}")
    rows: list[Row] = []
    for way, of_way in runs.items():
        seconds = statistics.median(run["row"]["first_step_seconds"] for run in of_way)
        of_cold = seconds / rows[0]["first_step_seconds"] if rows else 1.0
        summary = summarize([step_ms for run in of_way for step_ms in run["compiled_ms"]])
        eager_ms = summarize([step_ms for run in of_way for step_ms in run["eager_ms"]])["step_ms"]
        rows.append({"way": way, **of_way[-1]["row"], "first_step_seconds": seconds, "of_cold": of_cold, **summary})
        rows[-1]["eager_ms"] = eager_ms
    print_columns(COLUMNS, rows)
    save(args.json, f"First step of {args.model}, mode {args.mode}", rows, runs["cold"][0]["environment"])


if __name__ == "__main__":
    main()
