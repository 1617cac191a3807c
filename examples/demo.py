"""Train a radial basis function network on scikit-learn's handwritten digits, and print the report of compiling it.

`make demo` runs this script twice, in one thread. The first run compiles, and the second one loads the compiled code
from the folder --cache-dir. Both together take about a minute and a half on two idle CPU cores, and download nothing.

The network compares each image with 2,048 learned centers. Eager execution writes the differences, one for each image,
center and pixel, to memory in each operation. The compiler fuses these operations into kernels that write only the
results, so this network gains more on a CPU than most. `resnet_digits.py` trains a ResNet, which gains about 2x.

    python examples/demo.py
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from compile_callbacks import InductorCompile


class Centers(nn.Module):
    """Scores classes by the distances of an image to learned centers."""

    def __init__(self, pixels: int = 64, centers: int = 2048) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.rand(centers, pixels))
        self.head = nn.Sequential(nn.Linear(centers, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, 10) of images (N, 64)."""
        differences = images.unsqueeze(1) - self.centers
        return self.head(torch.exp(-8 * differences.square().mean(dim=-1)))


class DigitClassifier(LightningModule):
    """Trains `Centers`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Centers()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("val/accuracy", accuracy, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits with InductorCompile.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--max-epochs", type=int, default=20, help="epochs to train")
    add("--cache-dir", type=Path, default=Path("runs/compiled"), help="folder for compiled code, for the next run")
    add("--logdir", type=Path, default=Path("runs"), help="folder for logs")
    add("--min-accuracy", type=float, default=0.0, help="exit with status 1 if the validation accuracy is lower")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    seed_everything(0)
    # The data are tensors in memory, so worker processes would make the example slower.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    train, val = random_split(digits, [1280, 517])
    trainer = Trainer(
        max_epochs=args.max_epochs,
        devices=1,
        callbacks=[InductorCompile(cache_dir=args.cache_dir)],
        logger=TensorBoardLogger(args.logdir, name="demo"),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    # prints the report at the end
    trainer.fit(DigitClassifier(), DataLoader(train, 64, shuffle=True), DataLoader(val, 64, drop_last=True))
    accuracy = float(trainer.callback_metrics["val/accuracy"])
    tensorboard = Path(sys.executable).with_name("tensorboard")
    print(f"validation accuracy {accuracy:.3f}")
    print(f"To see the step times of all runs: {tensorboard} --logdir {args.logdir}")
    return 0 if accuracy >= args.min_accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
