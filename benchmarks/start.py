"""The first step of a training run, compiling included: cold, warm, with kept artifacts, and with repeated blocks.

Each measurement is a process of its own, with folders of its own for everything that torch, Triton and the compilers
keep. The time is that from `compile_phases` to the end of the first step, forward and backward, after one eager step
that wakes the device; imports are not in it, Inductor's included. A run starts

- cold: with nothing, and leaves artifacts behind;
- warm folder: with the cache folders that a cold run left, as on the same machine;
- artifacts: with empty cache folders and the artifacts, as on another machine, or in a fresh container;
- regional cold: with nothing, and one graph for all repeated blocks (targets="repeated").

The steps that follow are timed too, each way for itself: what regional compile saves at the start it may cost in every
step. ``transformer`` is an encoder of ViT-L's width on embeddings; the options of its size are for it alone.

python benchmarks/start.py [--model resnet18] [--device cpu] [--batch-size 4] [--image-size 64] [--mode default]
                           [--precision fp32] [--ways "cold,warm folder,artifacts"] [--steps 20] [--repeats 3]
                           [--json FILE]
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What each way starts with: the folder of its caches, that of its artifacts, and the targets.
WAYS: dict[str, tuple[str, str | None, str | None]] = {
    "cold": ("cold", "kept", None),
    "warm folder": ("cold", None, None),
    "artifacts": ("other", "kept", None),
    "regional cold": ("regional", None, "repeated"),
}
_DEFAULT_WAYS = "cold,warm folder,artifacts"
_WARMUP_STEPS = 5


def transformer(args: argparse.Namespace) -> tuple[Any, Any]:
    """An encoder with a linear embedding and head, and a batch for it."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(
        args.width, args.heads, 4 * args.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, args.depth, enable_nested_tensor=False)
    module = nn.Sequential(nn.Linear(args.width, args.width), encoder, nn.Linear(args.width, 1000))
    return module.to(args.device), torch.randn(args.batch_size, args.length, args.width, device=args.device)


def convolutional(args: argparse.Namespace) -> tuple[Any, Any]:
    """A model of torchvision's, and a batch for it."""
    import torch
    import torchvision

    layout = torch.channels_last if args.device == "cuda" else torch.contiguous_format
    module = torchvision.models.get_model(args.model).to(args.device, memory_format=layout)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=args.device)
    return module, images.to(memory_format=layout)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One first step, and those after it, in this process."""
    import torch

    from compile_callbacks import compile_phases, report_of

    warnings.simplefilter("ignore")
    started = time.perf_counter()
    importlib.import_module("torch._inductor.compile_fx")  # else the first compile does, for seconds
    import_seconds = time.perf_counter() - started
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    module, inputs = (transformer if args.model == "transformer" else convolutional)(args)

    def step_seconds() -> float:
        if args.device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        started = time.perf_counter()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            out = module(inputs)
        out.float().sum().backward()
        module.zero_grad(set_to_none=True)
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def steady_ms() -> list[float]:
        taken = [step_seconds() * 1000 for _ in range(_WARMUP_STEPS + args.steps)]
        return taken[_WARMUP_STEPS:]

    step_seconds()
    eager_ms = steady_ms()
    started = time.perf_counter()
    compile_phases(
        module, train_mode=args.mode, infer_mode=None, targets=args.targets, verify="off", cache_dir=args.kept
    )
    loaded_seconds = time.perf_counter() - started
    first_seconds = step_seconds()
    compiled_ms = steady_ms()
    report = report_of(module)
    return {
        "seconds": loaded_seconds + first_seconds, "load_seconds": loaded_seconds, "import_seconds": import_seconds,
        "eager_ms": eager_ms, "compiled_ms": compiled_ms,
        "compile_seconds": report.train.compile_seconds, "graphs": report.train.graphs,
        "targets": list(report.train.targets),
        "cache_hits": report.train.cache_hits, "cache_misses": report.train.cache_misses,
        "artifacts": report.artifacts, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
    }  # fmt: skip


def in_a_new_process(folder: Path, kept: Path | None, targets: str | None) -> dict[str, Any]:
    """The same with everything that is cached in ``folder``."""
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TMPDIR": str(folder),  # where C++ headers are kept that are compiled once
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", *(["--kept", str(kept)] if kept else [])]
    command += ["--targets", targets] if targets else []
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def step_ms(runs: Sequence[Mapping[str, Any]], of: str) -> str:
    """The median of all steps, and half of their interquartile range."""
    taken = [ms for run in runs for ms in run[of]]
    if len(taken) < 4:
        return f"{statistics.median(taken):.2f}" if taken else "-"
    first, median, third = statistics.quantiles(taken, n=4, method="inclusive")
    return f"{median:.2f} ± {(third - first) / 2:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18", help="a name of torchvision's, or transformer")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--depth", type=int, default=24, help="layers of the transformer")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=197, help="of its sequences")
    parser.add_argument("--mode", default="default", help="as train_mode takes it")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--ways", default=_DEFAULT_WAYS, help=f"cold, and of {', '.join(WAYS)} those wanted")
    parser.add_argument("--steps", type=int, default=20, help="steps timed after the first")
    parser.add_argument("--repeats", type=int, default=1, help="medians of so many are shown")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kept", help=argparse.SUPPRESS)
    parser.add_argument("--targets", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args)))
        return

    ways = args.ways.split(",")
    if not set(ways) <= set(WAYS) or "cold" not in ways:
        parser.error(f"--ways {args.ways}: give names out of {', '.join(WAYS)}, 'cold' among them")

    measured: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS if way in ways}
    for repeat in range(args.repeats):
        with tempfile.TemporaryDirectory() as temporary:
            top = Path(temporary)
            for way, runs_of_way in measured.items():
                folder, kept, targets = WAYS[way]
                runs_of_way.append(in_a_new_process(top / folder, top / kept if kept else None, targets))
                print(f"{repeat + 1}/{args.repeats} {way}: {runs_of_way[-1]['seconds']:.1f} s", file=sys.stderr)

    cold = statistics.median(run["seconds"] for run in measured["cold"])
    print("| start | first step s | of cold | loading s | step ms | graphs | cache hits / misses | artifacts MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for way, runs_of_way in measured.items():
        last = runs_of_way[-1]
        seconds = statistics.median(run["seconds"] for run in runs_of_way)
        load_seconds = statistics.median(run["load_seconds"] for run in runs_of_way)
        kept_mb = last["artifacts"] or {"loaded_mb": 0, "saved_mb": 0}
        print(
            f"| {way} | {seconds:.1f} | {seconds / cold:.0%} | {load_seconds:.2f} "
            f"| {step_ms(runs_of_way, 'compiled_ms')} | {last['graphs']} "
            f"| {last['cache_hits']} / {last['cache_misses']} | {max(kept_mb['loaded_mb'], kept_mb['saved_mb']):.1f} |"
        )
    first = measured["cold"][0]
    shape = f"batch {args.batch_size}, {args.image_size}x{args.image_size}"
    if args.model == "transformer":
        shape = f"{args.depth} layers of width {args.width}, batch {args.batch_size}, length {args.length}"
    eager = step_ms([run for runs_of_way in measured.values() for run in runs_of_way], "eager_ms")
    print(f"\n{args.model}, {shape}, {args.precision}, mode {args.mode}, eager step {eager} ms")
    import_seconds = statistics.median(
        run["import_seconds"] for runs_of_way in measured.values() for run in runs_of_way
    )
    print(f"torch {first['torch']}, {first['device']}; before that, Inductor is imported in {import_seconds:.1f} s")
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args), "runs": measured}, indent=1, default=str))


if __name__ == "__main__":
    main()
