"""ResNet-50 training in Lightning on one GPU and on several under DDP: eager, and compiled, in whole graphs and split.

Each number of GPUs is a run of processes of its own, one a GPU, in which the ways follow one another:

- eager: without the callback;
- whole: `InductorCompile`; gradients are reduced when the backward pass is over;
- split: the same with `torch._dynamo.config.optimize_ddp = "ddp_optimizer"`: Dynamo splits graphs at DDP's buckets, so
  that gradients are reduced while the backward pass of the splits before runs.

Every process has the same batch size, and the same batch on its device each time: data loading is not what is measured.
Times are medians of blocks of steps, synchronised at both ends. "scaling" is images/s over those of one GPU done in the
same way, times the number of GPUs. The last line has what a meeting of the processes costs, of which there is one a
step: a wait on the host, while the GPU works.

python benchmarks/ddp.py [--gpus 1 2] [--batch-size 256] [--steps 80] [--mode default] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

WAYS = ("eager", "whole", "split")
BLOCK_STEPS = 10


def work(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All ways in this process, one of ``args.world``."""
    import lightning.pytorch as pl
    import torch
    import torchvision
    from lightning.pytorch.strategies import DDPStrategy

    from compile_callbacks import InductorCompile
    from compile_callbacks.processes.ranks import Ranks

    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torchvision.models.get_model(args.model).to(memory_format=torch.channels_last)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, fused=on_gpu)

    class Fixed(torch.utils.data.Dataset):
        def __init__(self) -> None:
            images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
            images = images.to(memory_format=torch.channels_last)
            self.batch = images, torch.randint(1000, (args.batch_size,), device=device)

        def __len__(self) -> int:
            return args.steps

        def __getitem__(self, index):
            return self.batch

    class Stopwatch(pl.Callback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx % args.block == 0:
                self.mark()

        def on_train_end(self, trainer, pl_module):
            self.mark()

        def mark(self) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

        def median_ms(self) -> float:
            times = [(b - a) / args.block * 1000 for a, b in zip(self.marks, self.marks[1:], strict=False)]
            return statistics.median(times[len(times) // 2 :])  # what compiles does so in the first half

    def train(way: str) -> dict[str, Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        watch = Stopwatch()
        ours = InductorCompile(args.mode, None, baseline_steps=0, verify="off")
        strategy = DDPStrategy(gradient_as_bucket_view=True) if args.world > 1 else "auto"
        trainer = pl.Trainer(
            accelerator=args.device, devices=args.world, strategy=strategy, precision="bf16-mixed", max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, callbacks=[watch] if way == "eager" else [ours, watch],
        )  # fmt: skip
        torch._dynamo.config.optimize_ddp = "ddp_optimizer" if way == "split" else True
        trainer.fit(Classifier(), torch.utils.data.DataLoader(Fixed(), batch_size=None))
        report = ours.report.train
        row = {"gpus": args.world, "way": way, "step_ms": watch.median_ms()}
        row["images_per_second"] = args.batch_size * args.world / row["step_ms"] * 1000
        if way != "eager":
            row |= {
                "compile_seconds": report.compile_seconds,
                "graphs": report.graphs,
                "failures": [event["reason"] for event in report.events if event["kind"] == "fallback"],
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                "torch": torch.__version__,
            }
        if on_gpu:
            torch.cuda.empty_cache()
        return row

    rows = []
    for way in args.ways:
        if args.world == 1 and way == "split":
            continue  # without DDP nothing is split
        rows.append(train(way))
        if os.environ["LOCAL_RANK"] == "0":
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if args.world > 1:
        ranks, times = Ranks(str(device)), []
        for _ in range(300):
            started = time.perf_counter()
            ranks.meet()
            times.append((time.perf_counter() - started) * 1e6)
        rows.append({"gpus": args.world, "meeting_us": statistics.median(times)})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return rows


def launch(args: argparse.Namespace, world: int, folder: Path) -> list[dict[str, Any]]:
    """One process a GPU; what the first of them measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = folder / f"{world}.json"
    command = [sys.executable, __file__, *sys.argv[1:], "--world", str(world), "--rows", str(path)]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    processes = [
        subprocess.Popen(command, env={**environment, "LOCAL_RANK": str(rank)}, stdout=subprocess.DEVNULL)
        for rank in range(world)
    ]
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        time.sleep(0.2)
    if any(process.poll() for process in processes):  # the others would wait for it
        for process in processes:
            process.kill()
        raise SystemExit(f"a process of {world} failed")
    return json.loads(path.read_text())


def table(rows: list[dict[str, Any]]) -> str:
    timed = [row for row in rows if "way" in row]
    one = {row["way"]: row["images_per_second"] for row in timed if row["gpus"] == 1}
    lines = [
        "| GPUs | way | step ms | images/s | scaling | compile s | graphs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in timed:
        alone = one.get("whole" if row["way"] == "split" else row["way"])
        scaling = f"{row['images_per_second'] / alone / row['gpus']:.3f}" if alone else "-"
        compiled = f"{row['compile_seconds']:.1f} | {row['graphs']}" if "graphs" in row else "- | -"
        way = "compiled" if row["gpus"] == 1 and row["way"] == "whole" else row["way"]
        speed = f"{row['step_ms']:.2f} | {row['images_per_second']:.0f}"
        lines.append(f"| {row['gpus']} | {way} | {speed} | {scaling} | {compiled} |")
    lines += [f"a meeting of {row['gpus']}: {row['meeting_us']:.0f} us" for row in rows if "meeting_us" in row]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--mode", default="default")
    parser.add_argument("--batch-size", type=int, default=256, help="of each process")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--block", type=int, default=BLOCK_STEPS, help="steps that are timed together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.world is not None:
        rows = work(args)
        if os.environ["LOCAL_RANK"] == "0":
            args.rows.write_text(json.dumps(rows))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in args.gpus:
            rows += launch(args, world, Path(folder))
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
