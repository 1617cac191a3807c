"""Make runs on a CPU, one for each kind of outcome, and write lines of four reports into docs/reference/report.md.

    python docs/report_gallery.py                    # the four runs of the page, a few minutes on an idle machine
    python docs/report_gallery.py --only "slower"    # print the report of one run
    python docs/report_gallery.py --readme FILE      # show the run of a compile_report.json in the README

Each run starts in a new process with an empty compiler cache. If its verdict is not the expected one or asks to measure
again, because other programs use the machine, the run is repeated, at most twice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from compile_callbacks import CompileReport, CompileWarning, InductorCompile
from compile_callbacks.report.declaration import Group
from compile_callbacks.report.sentences import describe_verdict

PAGE = Path(__file__).parent / "reference" / "report.md"
README = Path(__file__).parents[1] / "README.md"
README_RUN = Path(__file__).parent / "readme_report.json"
README_ROWS = ("eager step ms", "compiled step ms", "break-even steps", "compared with eager")
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

SHOWN = {  # on the page, by title: a sentence, and the rows of the table that differ
    "Faster": ("Compiled steps saved the compile time:", ()),
    "Compile time not repaid": ("The same model in a run of 40 steps:", ()),
    "A graph break": ("A `print` in the forward breaks the graph:", ("graphs", "graph breaks")),
    "A fallback: there is no C++ compiler": ("The machine has no C++ compiler:", ("fallbacks",)),
}


def shortened(report: str, rows: Collection[str]) -> str:
    """Return the verdict, some rows and the advice of a printed report."""
    lines = report.strip().splitlines()
    return "\n".join(
        line
        for line in lines
        if line.startswith(("train   ", "next: ")) or re.split(r"\s{2,}", line.strip())[0] in rows
    )


def readme_report() -> str:
    """Return the printed report of the README's run. An ellipsis stands for the rows that are left out."""
    (record,) = json.loads(README_RUN.read_text())
    head, _, table = str(CompileReport.from_dict(record["report"])).partition("---\n")
    lines = ["torch.compile report", *f"{head}---".splitlines()]
    for line in table.splitlines():
        if not line.startswith("  "):
            lines += [] if line in get_args(Group) else [line]
        elif re.split(r"\s{2,}", line.strip())[0] in README_ROWS:
            lines.append(line)
        elif lines[-1] != "  …":
            lines.append("  …")
    return "\n".join(lines)


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
    """Run one example and print its report, or run those of the page and write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=[example.title for example in EXAMPLES], help="print the report of one run")
    parser.add_argument("--readme", type=Path, help="the compile_report.json of a run, for the README")
    args = parser.parse_args(argv)
    if args.readme is not None:
        README_RUN.write_text(json.dumps(json.loads(args.readme.read_text())[-1:]) + "\n")
        pattern = r"(?<=```text\n)torch.compile report.*?(?=\n```)"
        README.write_text(re.sub(pattern, lambda _: readme_report(), README.read_text(), count=1, flags=re.DOTALL))
        return
    if args.only is None:
        texts = []
        for example in EXAMPLES:
            if example.title in SHOWN:
                sentence, rows = SHOWN[example.title]
                texts.append(f"{sentence}\n\n```text\n{shortened(run_alone(example), rows)}\n```\n\n")
        pattern = r"(?<=<!-- runs -->\n\n).*?(?=<!-- end of runs -->)"
        PAGE.write_text(re.sub(pattern, lambda _: "".join(texts), PAGE.read_text(), flags=re.DOTALL))
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
