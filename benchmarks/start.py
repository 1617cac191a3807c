"""The first step of a training run, compiling included: cold, with torch's cache folder warm, and with kept artifacts.

Each measurement is a process of its own, with folders of its own for everything that torch, Triton and the compilers
keep. The time is that from `compile_phases` to the end of the first step, forward and backward, after one eager step
that wakes the device; imports are not in it. A run starts

- cold: with nothing, and leaves artifacts behind;
- warm folder: with the cache folders that a cold run left, as on the same machine;
- artifacts: with empty cache folders and the artifacts, as on another machine, or in a fresh container.

python benchmarks/start.py [--model resnet18] [--device cpu] [--batch-size 4] [--image-size 64] [--mode default]
                           [--precision fp32] [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import argparse
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

WAYS = ("cold", "warm folder", "artifacts")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One first step, in this process."""
    import torch
    import torchvision

    from compile_callbacks import compile_phases, report_of

    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    layout = torch.channels_last if args.device == "cuda" else torch.contiguous_format
    module = torchvision.models.get_model(args.model).to(args.device, memory_format=layout)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=args.device)
    images = images.to(memory_format=layout)

    def step_seconds() -> float:
        started = time.perf_counter()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            out = module(images)
        out.float().sum().backward()
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    step_seconds()
    eager_seconds = step_seconds()
    started = time.perf_counter()
    compile_phases(module, train_mode=args.mode, infer_mode=None, verify="off", cache_dir=args.kept)
    loaded_seconds = time.perf_counter() - started
    first_seconds = step_seconds()
    report = report_of(module)
    return {
        "seconds": loaded_seconds + first_seconds, "load_seconds": loaded_seconds, "eager_step_seconds": eager_seconds,
        "cache_hits": report.train.cache_hits, "cache_misses": report.train.cache_misses,
        "artifacts": report.artifacts, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
    }  # fmt: skip


def in_a_new_process(folder: Path, kept: Path | None) -> dict[str, Any]:
    """The same with everything that is cached in ``folder``."""
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TMPDIR": str(folder),  # where C++ headers are kept that are compiled once
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", *(["--kept", str(kept)] if kept else [])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18", help="a name of torchvision's")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--mode", default="default", help="as train_mode takes it")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--repeats", type=int, default=1, help="medians of so many are shown")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kept", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args)))
        return

    measured: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for repeat in range(args.repeats):
        with tempfile.TemporaryDirectory() as temporary:
            top = Path(temporary)
            runs = {"cold": ("cold", "kept"), "warm folder": ("cold", None), "artifacts": ("other", "kept")}
            for way, (folder, kept) in runs.items():
                measured[way].append(in_a_new_process(top / folder, top / kept if kept else None))
                print(f"{repeat + 1}/{args.repeats} {way}: {measured[way][-1]['seconds']:.1f} s", file=sys.stderr)

    cold = statistics.median(run["seconds"] for run in measured["cold"])
    print("| start | first step s | of cold | loading s | cache hits / misses | artifacts MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for way, runs_of_way in measured.items():
        last = runs_of_way[-1]
        seconds, load_seconds = (
            statistics.median(run[of] for run in runs_of_way) for of in ("seconds", "load_seconds")
        )
        kept = last["artifacts"] or {"loaded_mb": 0, "saved_mb": 0}
        print(
            f"| {way} | {seconds:.1f} | {seconds / cold:.0%} | {load_seconds:.2f} "
            f"| {last['cache_hits']} / {last['cache_misses']} | {max(kept['loaded_mb'], kept['saved_mb']):.1f} |"
        )
    first = measured["cold"][0]
    shape = f"batch {args.batch_size}, {args.image_size}x{args.image_size}, {args.precision}, mode {args.mode}"
    print(f"\n{args.model}, {shape}, eager step {first['eager_step_seconds'] * 1000:.0f} ms")
    print(f"torch {first['torch']}, {first['device']}")
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args), "runs": measured}, indent=1, default=str))


if __name__ == "__main__":
    main()
