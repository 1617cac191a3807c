"""Writes the figures of the README, the docs and benchmarks/results/*.md, and the chart, from benchmarks/results:

python benchmarks/pages.py [--check]

In a page, figures stand between ``<!-- figures: MACHINE/NAME -->`` and ``<!-- end of figures -->``. MACHINE is a folder
in benchmarks/results, and NAME one of `TABLES` or of `summaries.SUMMARIES`. Without a name, a section for each of
`TABLES` stands there. A table is left out, with its heading, if the machine has no file of it. With --check, the script
writes nothing, and fails if a page or the chart differs from the files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import background
import chart
import ddp
import duels
import false_verdicts
import fsdp2
import inference
import memory
import tiny_steps
import verification
import verification_cost
import warm_start
from summaries import SUMMARIES
from tables import Row, origins, print_columns, read

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(path for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")) if path.name != "README.md"),
]
FIGURES = re.compile(r"(<!-- figures: (\w+)(?:/(\w+))? -->)(.*?)(<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A section of the page of a machine: its files, what prints their rows, and its words."""

    files: str
    show: Callable[[list[Row]], None]  # each row has the title of its file, too
    heading: str
    text: str


def show_background(rows: list[Row]) -> None:
    of_file = itertools.groupby(rows, key=lambda row: row["title"])
    compared = [background.compared(title, {row["way"]: row for row in ways}) for title, ways in of_file]
    print_columns(background.COMPARED, compared)
    if any(row["lost_seconds"] is not None for row in compared):
        print("*Lost seconds* is the time of the first 100 steps in the background minus the shorter one of eager and "
              "by hand. It is negative if the background was faster than both.")  # fmt: skip


TABLES = {
    "duels": Table(
        "duel_*", duels.show, "Training: `InductorCompile()` against other ways",
        """The ways of a model run in one process, in alternating blocks of steps, in bf16 autocast, channels last, with
fused SGD with momentum. *Step ms* is the median of the blocks. *Over* another way is the median of the ratios of the
blocks of one round, with the 95% interval. *Mode* is what `"fast"` became, or what `"auto"` chose. *Bare* is
`InductorCompile()` without an argument. The *graph of the step* is a hand-made CUDA graph of forward pass, backward
pass and fused optimizer, in a loop without a Trainer.""",
    ),
    "inference": Table(
        "inference", inference.show, "ResNet-50, inference",
        """The ways of a batch size run in one process, in alternating blocks. *Over eager* is the median of the ratios
of the blocks of one round. *Frozen* weights are constants of the compiled code. A *loop* calls the network without a
Trainer, in one context of autocast. A step of `trainer.predict` includes the work of Lightning and of the callback for
each batch.""",
    ),
    "background": Table(
        "background_*", show_background, "Compiling in the background",
        """Each way is a process with an empty cache. *By hand* is `net.compile(mode=...)`, and *meanwhile* are the
steps while the helper process compiles. The longest step in the background is the capture, or the first compiled step
with its comparison. *Step ms* are medians of the last steps. In the background, they include the blocks of eager steps
with which the callback compares. On a GPU, all models train in bf16.""",
    ),
    "tiny_steps": Table(
        "tiny_steps", partial(print_columns, tiny_steps.COLUMNS), "The CPU time that a step takes in addition",
        """The model is a tiny MLP (32 to 32 to 10, batch 8), so that almost all time is CPU time around the compiled
code. Each figure is the median of rounds that alternate between the rows. An *empty callback* is a Lightning callback
without hooks: Lightning takes time to call the hooks of each callback. In the loop *infer*, *callback* is
`InductorBackend.infer`.""",
    ),
    "false_verdicts": Table(
        "false_verdicts", false_verdicts.show, "False verdicts",
        """The simulation runs the timer and the rule of the report, and a `Tune` of one candidate, on step times with
4% noise: 10 eager steps, and 2,000 compiled steps of 50 ms. In bursts of 1 to 4 s, steps take 10% to 50% longer; drift
makes the machine 5% faster or slower during the run. The table shows the share of runs that call compiled steps faster,
by their true speedup. At a true speedup of 1.00, each such claim is false. The last row compares eager steps with eager
steps of a small network, while other processes keep all cores busy.""",
    ),
    "verification": Table(
        "verification", verification.show, "Wrong gradients that verification calls equal",
        """The gradients are random, and wrong in the way of the row. Eager's result and the compiled one are within one
rounding of the truth. The table shows the share of the gradients that are called equal, for each precision.""",
    ),
    "verification_cost": Table(
        "verification_cost", partial(print_columns, verification_cost.COLUMNS), "The comparison with eager",
        """The median time of the first compiled forward and backward pass, with and without the comparison. Both load
the compiled code from torch's cache.""",
    ),
    "memory": Table(
        "memory*", partial(print_columns, memory.COLUMNS), "Memory",
        """*Last* means the last five steps, *reserved* is the most that torch's allocator held, and *of default* is the
peak relative to that of the mode `default`. A row without a model is of a model like GPT-2, whose 40 steps are too few
for `"auto"` to compile. The workloads with models ran three at a time on each of two GPUs. This changes their times,
and what `"auto"` chose, but not the memory of a mode.""",
    ),
    "warm_start": Table(
        "warm_start*", partial(print_columns, warm_start.COLUMNS), "Warm start",
        """*Seconds* is the duration of the first compiled step of a ResNet-18 in a new process: the median of *samples*
runs. The ways are `cache_dir`, and torch's own cache folders, which are set by hand. *Cold* is a run with an empty
folder, *warm* is a run with the folder of an earlier run, and *moved* with this folder at another path. *Rank seconds*
are all runs, in lists of the ranks.""",
    ),
    "ddp": Table(
        "ddp*", partial(print_columns, ddp.COLUMNS), "ResNet-50 under DDP",
        """NCCL connects the GPUs of one machine. *Batch size* is the number of images for each GPU. *By hand* is
`net.compile(mode=...)`, whose graphs Dynamo splits at DDP's buckets, and *ours* keeps graphs whole. *Round* counts the
repetitions of the ways, in turn. The rows of the second command follow those of the first one.""",
    ),
    "fsdp2": Table(
        "fsdp2", partial(print_columns, fsdp2.COLUMNS), "A billion parameters under FSDP2",
        """The model has 28 blocks of width 1,536. Each process gets 12 sequences of 2,048 tokens, in bf16. The way
*default* is `InductorCompile("default")`. Eager runs before and after it. *Losses apart* is the largest difference from
the losses of the first row.""",
    ),
}  # fmt: skip


def printed(show: Callable[..., None], *args: Any) -> str:
    """The text that a function prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        show(*args)
    return text.getvalue().strip()


def table(machine: str, name: str) -> str:
    """The words and the rows of a table, in groups of the same origin; nothing if the machine has no file of it."""
    of_table, parts = TABLES[name], []
    found: dict[str, list[dict[str, Any]]] = {}
    for result in read(f"{machine}/{of_table.files}"):
        found.setdefault(origins([result]), []).append(result)
    for origin, results in found.items():
        commands = "\n".join(result["command"] for result in results)
        rows = [{"title": result["title"], **row} for result in results for row in result["rows"]]
        failed = [
            f"- {row.get('model', '')}, batch {row.get('batch_size')}, {row['way']}: {row['failure'].splitlines()[-1]}"
            for row in rows
            if row.get("failure")
        ]
        parts += [f"{origin}:", f"```sh\n{commands}\n```", printed(of_table.show, rows)]
        parts += ["These rows failed:", "\n".join(failed)] if failed else []
    return "\n\n".join([of_table.text, *parts] if parts else [])


def figures(machine: str, name: str | None) -> str:
    """The text between the two comments."""
    for summary in SUMMARIES:
        if summary.__name__ == name:
            return printed(summary, machine)
    if name is not None:
        return table(machine, name)
    sections = {of.heading: table(machine, name) for name, of in TABLES.items()}
    return "\n\n".join(f"## {heading}\n\n{text}" for heading, text in sections.items() if text)


def filled(page: str) -> str:
    """A page with the figures of the files."""

    def replaced(found: re.Match[str]) -> str:
        text = figures(found[2], found[3])
        text = f"\n\n{text}\n\n" if "\n" in text else text or "\n"  # a sentence stays in its line
        return f"{found[1]}{text}{found[5]}"

    if page.count("<!-- figures: ") != page.count("<!-- end of figures -->"):
        raise ValueError("a comment <!-- figures: ... --> has no <!-- end of figures -->, so text would be deleted")
    return FIGURES.sub(replaced, page)


def main() -> None:
    """Write the figures of all pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for page in PAGES:
        text = page.read_text()
        if (new := filled(text)) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not args.check:
                page.write_text(new)
    if chart.drawn() != chart.bars():
        stale.append(str(chart.CHART.relative_to(ROOT)))
        if not args.check:
            chart.draw()
    if stale and args.check:
        sys.exit(f"python benchmarks/pages.py changes these files: {stale}")


if __name__ == "__main__":
    main()
