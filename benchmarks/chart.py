"""Draws the chart of the README, docs/images/benchmark_resnet50.png, from the rows of ResNet-50.

`pages.py` draws it if the bars of the files differ from those in the comment of the picture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image
from tables import Row, read

CHART = Path(__file__).parents[1] / "docs" / "images" / "benchmark_resnet50.png"
FILES = "h200/resnet50_*"
BARS = {  # the label and color of each way, by the names of its rows
    "eager": ("eager", "#9aa5b1"),
    "child compiled by hand, default": ("torch.compile, default", "#7fb3d5"),
    "bare loop, torch.compile, default": ("torch.compile, default", "#7fb3d5"),
    "child compiled by hand, reduce-overhead": ("torch.compile by hand, same mode", "#2e86c1"),
    "bare loop, reduce-overhead, frozen by hand": ("torch.compile by hand, same mode", "#2e86c1"),
    'InductorCompile("reduce-overhead")': ("compile_callbacks", "#e67e22"),
    "InductorBackend, reduce-overhead, frozen": ("compile_callbacks", "#e67e22"),
}
MODES = {"train": "training, reduce-overhead", "infer": "inference, reduce-overhead, frozen"}


def bars() -> list[Row]:
    """The bars, in their order: of training, then of inference, each from small to large batches."""
    rows = [row for result in read(FILES) for row in result["rows"] if row["way"] in BARS and row["step_ms"]]
    rows.sort(key=lambda row: (row["phase"] != "train", row["batch_size"], list(BARS).index(row["way"])))
    return [{name: row[name] for name in ("phase", "batch_size", "way", "step_ms")} for row in rows]


def drawn() -> list[Row] | None:
    """The bars of the picture, which its comment contains."""
    if not CHART.exists():
        return None
    with Image.open(CHART) as picture:
        return json.loads(picture.info.get("Comment", "null"))


def draw() -> None:
    """Draw one panel for each phase and batch size: bars from zero, with the milliseconds at each."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = bars()
    panels = list(dict.fromkeys((bar["phase"], bar["batch_size"]) for bar in shown))
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.6), squeeze=False)
    handles: dict[str, Any] = {}
    for axis, (phase, batch_size) in zip(axes[0], panels, strict=True):
        of_panel = [bar for bar in shown if (bar["phase"], bar["batch_size"]) == (phase, batch_size)]
        for position, bar in enumerate(of_panel):
            label, color = BARS[bar["way"]]
            handles[label] = axis.bar(position, bar["step_ms"], color=color, width=0.8)
            axis.annotate(
                f"{bar['step_ms']:.3g}",
                (position, bar["step_ms"]),
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
    figure.savefig(CHART, dpi=130, metadata={"Comment": json.dumps(shown)})
