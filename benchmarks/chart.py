"""Draw the chart of the README from the recorded rows of ResNet-50: docs/images/benchmark_resnet50.png.

python benchmarks/chart.py [--rows FILE ...] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BARS = {  # the label and color of each configuration, by the names of its rows
    "eager": ("eager", "#9aa5b1"),
    "child compiled by hand, default": ("torch.compile, default", "#7fb3d5"),
    "bare loop, torch.compile, default": ("torch.compile, default", "#7fb3d5"),
    "child compiled by hand, reduce-overhead": ("torch.compile by hand, same mode", "#2e86c1"),
    "bare loop, reduce-overhead, frozen by hand": ("torch.compile by hand, same mode", "#2e86c1"),
    'InductorCompile("reduce-overhead")': ("compile_callbacks", "#e67e22"),
    "InductorBackend, reduce-overhead, frozen": ("compile_callbacks", "#e67e22"),
}
MODES = {"train": "training, reduce-overhead", "infer": "inference, reduce-overhead, frozen"}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows that the chart shows."""
    return [row for row in json.loads(path.read_text())["rows"] if row["way"] in BARS and row["step_ms"]]


def draw(files: list[Path], output: Path) -> None:
    """Draw one panel for each phase and batch size: bars from zero, with the milliseconds at each."""
    rows = [row for path in files for row in rows_of(path)]
    panels = sorted({(row["phase"], row["batch_size"]) for row in rows}, key=lambda panel: (panel[0] != "train", panel))
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.6), squeeze=False)
    handles: dict[str, Any] = {}
    for axis, (phase, batch_size) in zip(axes[0], panels, strict=True):
        shown = [row for row in rows if (row["phase"], row["batch_size"]) == (phase, batch_size)]
        shown.sort(key=lambda row: list(BARS).index(row["way"]))
        for position, row in enumerate(shown):
            label, color = BARS[row["way"]]
            handles[label] = axis.bar(position, row["step_ms"], color=color, width=0.8)
            axis.annotate(
                f"{row['step_ms']:.3g}",
                (position, row["step_ms"]),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
        axis.set_title(f"batch {batch_size}\n{MODES[phase]}", fontsize=9)
        axis.set_xticks([])
        axis.margins(y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("ms for each step (lower is better)")
    order = [label for label in dict.fromkeys(label for label, _ in BARS.values()) if label in handles]
    figure.legend([handles[label] for label in order], order, loc="lower center", ncols=len(order), frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(output, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded = [RESULTS / f"resnet50_{name}.json" for name in ("train", "infer", "default")]
    parser.add_argument("--rows", type=Path, nargs="+", default=recorded)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "benchmark_resnet50.png")
    args = parser.parse_args()
    draw(args.rows, args.output)


if __name__ == "__main__":
    main()
