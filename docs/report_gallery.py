"""Make nine runs on a CPU, one for each kind of outcome, and write their reports into docs/reference/report_gallery.md.

    python docs/report_gallery.py                    # all runs, about five minutes on an idle machine
    python docs/report_gallery.py --only "slower"    # print the report of one run

Each run starts in a new process with an empty compiler cache. If its verdict is not the expected one or asks to measure
again, because other programs use the machine, the run is repeated, at most twice.
tests/lightning/test_report_gallery.py makes the same runs with fixed step times.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from compile_callbacks import CompileReport, CompileWarning, InductorCompile
from compile_callbacks.report.sentences import describe_verdict

PAGE = Path(__file__).parent / "reference" / "report_gallery.md"
WIDTH = 1024


class Pointwise(nn.Module):
    """A chain of elementwise operations, which Inductor fuses into one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.linspace(0.9, 1.1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the chain."""
        for scale in self.scales:
            x = torch.relu(x * scale) + x * 0.1
        return x


class WithGraphBreak(Pointwise):
    """The same with a ``print``, which torch does not trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the chain twice."""
        x = super().forward(x)
        print(end="")  # noqa: T201
        return super().forward(x)


class Step(pl.LightningModule):
    """Trains ``net``; ``head`` is never called."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.head = nn.Linear(2, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Example:
    """A run.

    Attributes:
        title: What happens in the run.
        verdict: The verdict of the train phase.
        net: Makes the trained module.
        steps: Number of steps.
        arguments: Arguments of `InductorCompile`, by default ``train_mode="default"``.
        rows: The batch size, by the number of the batch.
        features: Size of a row; by default `WIDTH`.
    """

    title: str
    verdict: str
    net: Callable[[], nn.Module]
    steps: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rows: Callable[[int], int] = lambda number: WIDTH
    features: int | None = None

    def run(self) -> CompileReport:
        """Train, and return the report."""
        pl.seed_everything(0, verbose=False)
        callback = InductorCompile(**{"train_mode": "default", "infer_mode": None, **self.arguments})
        trainer = pl.Trainer(
            max_epochs=1,
            callbacks=[callback],
            logger=False,
            accelerator="cpu",
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        batches = [torch.randn(self.rows(number), self.features or WIDTH) for number in range(self.steps)]
        trainer.fit(Step(self.net()), DataLoader(batches, batch_size=None))
        return callback.report


EXAMPLES = (
    Example("Faster", "faster", Pointwise, 700),
    Example("No difference", "no difference", lambda: nn.Linear(WIDTH, WIDTH), 40),
    Example(
        "Slower: the mode has no effect on this device",
        "slower",
        lambda: nn.Linear(2, 2),
        300,
        {"train_mode": "reduce-overhead", "baseline_steps": 100},
        rows=lambda number: 2,
        features=2,
    ),
    Example("Too few samples", "too few samples", Pointwise, 12),
    Example("Compile time not repaid", "compile time not repaid", Pointwise, 40),
    Example(
        "A recompile: the batch size changes",
        "compile time not repaid",
        Pointwise,
        60,
        {"train_mode": {"dynamic": False}},
        rows=lambda number: WIDTH // (1 + number // 40),
    ),
    Example("A graph break", "compile time not repaid", WithGraphBreak, 40),
    Example(
        "A fallback: there is no C++ compiler",
        "not compiled",
        Pointwise,
        40,
        {"train_mode": {"options": {"cpp.cxx": ("no-such-compiler",)}}},
    ),
    Example("The target is never called", "not compiled", Pointwise, 40, {"targets": ["head"]}),
)

_HEAD = """\
# Nine runs and their reports

`docs/report_gallery.py` made these runs with one CPU thread and an empty compiler cache. Each run shows one outcome. A
run that had another outcome or step times that varied too much, because other programs used the machine, was repeated.
"""


def run_alone(example: Example) -> str:
    """Run an example in a new process with an empty compiler cache; return the printed report."""
    for attempt in range(3):
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--only", example.title]
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, check=attempt == 2, stdout=subprocess.PIPE, text=True)
        if done.returncode == 0:
            break
    return done.stdout


def main(argv: Sequence[str] | None = None) -> None:
    """Run one example and print its report, or run all and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=[example.title for example in EXAMPLES], help="print the report of one run")
    args = parser.parse_args(argv)
    if args.only is None:
        texts = [f"## {example.title}\n\n```text\n{run_alone(example).strip()}\n```\n" for example in EXAMPLES]
        PAGE.write_text("\n".join([_HEAD, *texts]))
        return
    example = next(example for example in EXAMPLES if example.title == args.only)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileWarning)  # the page shows the report
        report = example.run()
    if "measure again" in describe_verdict("train", report.train):
        raise SystemExit(f"{example.title}: step times vary too much\n{report}")
    if report.train.verdict != example.verdict:
        raise SystemExit(f"{example.title}: the verdict is {report.train.verdict!r}, not {example.verdict!r}\n{report}")


if __name__ == "__main__":
    main()
