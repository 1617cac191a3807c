"""Make the pictures of TensorBoard in docs/images: two short fits, then a headless Chromium looks at their logs.

Needs Chromium with chromedriver, selenium, and scikit-learn for its handwritten digits.

    python docs/screenshots.py              # fits anew, about two minutes on two CPU cores
    python docs/screenshots.py LOGDIR       # pictures of logs that are there already
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from compile_callbacks import InductorCompile
from compile_callbacks.tensorboard import PLOT_TAG

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import browser  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MODES = ("default", "max-autotune-no-cudagraphs")
HELD_OUT = 512


class GatedCell(nn.Module):
    """A recurrent cell written out in plain operations: many small ones, which the compiler fuses."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(features, 3 * hidden)
        self.state = nn.Linear(hidden, 3 * hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """The next state (N, hidden) after the inputs (N, features)."""
        reset, update, new = self.inputs(x).chunk(3, dim=-1)
        reset_state, update_state, new_state = self.state(state).chunk(3, dim=-1)
        update = torch.sigmoid(update + update_state)
        candidate = torch.tanh(new + torch.sigmoid(reset + reset_state) * new_state)
        return self.norm(update * state + (1 - update) * candidate)


class RowByRow(nn.Module):
    """Reads an image row by row."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = GatedCell(8, hidden)
        self.head = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 8, 8)."""
        state = images.new_zeros(len(images), self.hidden)
        for row in images.unbind(dim=1):
            state = self.cell(row, state)
        return self.head(state)


class DigitReader(pl.LightningModule):
    """Classifies digits by their rows."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = RowByRow()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        accuracy = (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("val/accuracy", accuracy, batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, all parameters at once."""
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, fused=True)


def fit(mode: str, logdir: Path) -> None:
    """Train once."""
    torch.set_num_threads(1)  # so small a model gains nothing by two, and would be slowed by what else runs
    pl.seed_everything(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div(16).reshape(-1, 8, 8)
    data = TensorDataset(images, torch.from_numpy(labels).long())
    train, val = torch.utils.data.random_split(data, [len(data) - HELD_OUT, HELD_OUT])
    trainer = pl.Trainer(
        max_epochs=12,
        callbacks=[InductorCompile(mode, mode)],
        logger=TensorBoardLogger(logdir, name="", version=mode),
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=10,
        accelerator="cpu",
    )
    trainer.fit(DigitReader(), DataLoader(train, 64, shuffle=True, drop_last=True, num_workers=0), DataLoader(val, 64))


def fit_all(logdir: Path) -> None:
    """Train with each mode, each in a process and with a compiler cache of its own."""
    for mode in MODES:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--fit", mode, str(logdir)]
            subprocess.run(command, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}, check=True)


def take_pictures(logdir: Path) -> None:
    """Look at each tab, and keep what it shows."""
    IMAGES.mkdir(exist_ok=True)
    with browser.tensorboard(logdir) as address, browser.chromium() as driver:

        def show(tab: str, ready: Any, width: int, height: int) -> None:
            driver.set_window_size(width, height)
            driver.get("about:blank")
            driver.get(f"{address}#{tab}")
            browser.wait_for(driver, ready, tab)

        def keep(name: str) -> None:
            driver.execute_async_script("setTimeout(arguments[0], 2500)")  # charts are drawn with a transition
            driver.save_screenshot(str(IMAGES / f"tensorboard-{name}.png"))

        def some(selector: str, count: int) -> Any:
            return lambda: len(browser.visible(driver, selector)) >= count

        show("custom_scalars", some("path.line", 8), 1520, 1100)
        for legend in browser.visible(driver, ".toggle-matches-button")[:1]:
            legend.click()
        keep("custom-scalars")
        show("scalars&tagFilter=step%2F", some("path.line", 8), 1440, 1240)
        keep("scalars")
        show("text", some("td", 20), 1200, 880)
        keep("text")
        show("hparams", some("vaadin-grid-cell-content", 10), 1720, 640)
        keep("hparams")


def keep_steps(logdir: Path) -> None:
    """Keep the picture of step times that the first run left in its log."""
    log = EventAccumulator(str(logdir / MODES[0]))
    log.Reload()
    (IMAGES / "steps.png").write_bytes(log.Images(PLOT_TAG)[-1].encoded_image_string)


def main(argv: Sequence[str] | None = None) -> None:
    """Fit if need be, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logdir", type=Path, nargs="?", help="logs that are there already; without it: fit anew")
    parser.add_argument("--fit", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.fit:
        fit(args.fit, args.logdir)
    elif args.logdir:
        keep_steps(args.logdir)
        take_pictures(args.logdir)
    else:
        with tempfile.TemporaryDirectory() as folder:
            fit_all(Path(folder, "runs"))
            keep_steps(Path(folder, "runs"))
            take_pictures(Path(folder, "runs"))


if __name__ == "__main__":
    main()
