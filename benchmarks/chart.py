"""Draws the chart of the README, docs/images/speedup.png: the speedup of `InductorCompile()` over eager.

`pages.py` draws it if the bars of the files differ from those in the comment of the picture.
"""

from __future__ import annotations

import json
from pathlib import Path

from duels import WAYS
from PIL import Image
from tables import Row, compare_pairs, find, read

CHART = Path(__file__).parents[1] / "docs" / "images" / "speedup.png"
FILES = "h200/duel_*"
NAMES = {
    "bert": "BERT",
    "convnext_tiny": "ConvNeXt-T",
    "efficientnet_b0": "EfficientNet-B0",
    "gpt2": "GPT-2",
    "resnet50": "ResNet-50",
    "unet": "U-Net",
    "vit_b_16": "ViT-B/16",
}


def bars() -> list[Row]:
    """The bars, from the largest speedup to the smallest."""
    found = []
    for result in read(FILES):
        eager, ours = (find(result["rows"], WAYS[name]) for name in ("eager", "bare"))
        work = {name: ours[name] for name in ("model", "batch_size")}
        found.append({**work, "speedup": compare_pairs(eager, ours)["speedup"]})
    return sorted(found, key=lambda bar: bar["speedup"], reverse=True)


def drawn() -> list[Row] | None:
    """The bars of the picture, which its comment contains."""
    if not CHART.exists():
        return None
    with Image.open(CHART) as picture:
        return json.loads(picture.info.get("Comment", "null"))


def draw() -> None:
    """Draw horizontal bars from zero, with the speedup at the end of each, and a line at eager's speed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = bars()
    figure, axis = plt.subplots(figsize=(9, 3.7))
    labels = [f"{NAMES[bar['model']]}, batch {bar['batch_size']}" for bar in shown]
    axis.barh(labels, [bar["speedup"] for bar in shown], color="#e4572e", height=0.68)
    for position, bar in enumerate(shown):
        text = f"{bar['speedup']:.2f}x"
        axis.annotate(text, (bar["speedup"], position), xytext=(5, 0), textcoords="offset points", va="center")
    axis.plot([1, 1], [-0.5, len(shown) - 0.5], color="#3a3550", linewidth=1.2)
    axis.annotate("eager", (1, -0.55), ha="center", va="bottom", color="#3a3550")
    axis.set_ylim(len(shown) - 0.5, -1)
    axis.set_xticks([])
    axis.tick_params(axis="y", length=0, labelsize=10.5)
    axis.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axis.margins(x=0.08)
    figure.tight_layout(pad=0.4)
    figure.savefig(CHART, dpi=150, metadata={"Comment": json.dumps(shown)})
