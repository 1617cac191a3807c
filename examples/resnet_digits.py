"""Train a small ResNet on scikit-learn's handwritten digits, with separate compiled code for training and inference.

scikit-learn contains the data (1,797 images of 8x8 pixels, which are enlarged to 32x32), so the example downloads
nothing. It takes about a minute and a half on two idle CPU cores. `InductorCompile` in the Trainer's callbacks is the
only addition to a normal Lightning script. A second run loads the compiled code from the folder --cache-dir.

On a CPU, an eager step of a ResNet with few channels spends much of its time in batch norm, ReLU and addition, which
the compiler fuses. A wide ResNet spends it in convolutions, for which compiled code calls the same library. In
channels-last memory format, eager convolutions of this network are faster, and about 1.2x remains.

    python examples/resnet_digits.py --train-mode default --infer-mode default
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.models.resnet import Bottleneck
from torchvision.transforms.v2 import RandomCrop, Transform

from compile_callbacks import InductorCompile, export

SIZE = 32  # of an image, in pixels
HELD_OUT = 256  # images for validation, and for test: a multiple of the batch size, so that all batches have one shape


def make_resnet(width: int = 16) -> nn.Sequential:
    """Return a ResNet with bottleneck blocks (https://arxiv.org/abs/1512.03385, section 4.1), for small grey images."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(Bottleneck(width, width // 4))
    for channels in (width, 2 * width):
        shortcut = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 1, stride=2, bias=False), nn.BatchNorm2d(2 * channels)
        )
        layers.append(Bottleneck(channels, channels // 2, stride=2, downsample=shortcut))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


class DigitClassifier(LightningModule):
    """A ResNet for small grey images."""

    def __init__(self, lr: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = make_resnet()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, 10) of images (N, 1, 32, 32)."""
        return self.net(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def on_train_epoch_end(self) -> None:
        if not sys.stdout.isatty():  # the Trainer shows no progress bar then
            epoch, accuracy = self.current_epoch + 1, self.trainer.callback_metrics["val/accuracy"]
            print(f"epoch {epoch} of {self.trainer.max_epochs}, val accuracy {accuracy:.2f}", flush=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    def _evaluate(self, batch: list[Tensor], split: str) -> None:
        images, labels = batch
        logits = self(images)
        self.log(f"{split}/loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        self.log(f"{split}/accuracy", accuracy, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        lr = self.hparams["lr"]
        optimizer = torch.optim.SGD(self.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Digits(Dataset[tuple[Tensor, int]]):
    """Images (1, 32, 32) with values from 0 to 1, and their labels."""

    def __init__(self, images: Tensor, labels: list[int], transform: Transform | None = None) -> None:
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        return (self.transform(image) if self.transform else image), self.labels[index]


def make_splits() -> tuple[Digits, Digits, Digits]:
    """Split the digits into train (1,285), validation (256) and test (256) sets, the same in every run."""
    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=HELD_OUT, stratify=y, random_state=0)
    x, x_val, y, y_val = train_test_split(x, y, test_size=HELD_OUT, stratify=y, random_state=0)

    def split(pixels: np.ndarray, labels: np.ndarray, transform: Transform | None = None) -> Digits:
        images = torch.from_numpy(pixels).float().div(16).reshape(-1, 1, 8, 8)
        return Digits(F.interpolate(images, SIZE, mode="bilinear"), labels.tolist(), transform)

    shift = RandomCrop(SIZE, padding=4)
    return split(x, y, shift), split(x_val, y_val), split(x_test, y_test)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small ResNet on scikit-learn's handwritten digits with InductorCompile.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    modes = "a torch.compile mode, 'auto' to have it measured, or 'eager' for not compiled"
    add = parser.add_argument
    add("--train-mode", default="fast", help=f"settings for training: {modes}")
    add("--infer-mode", default="fast", help=f"settings for validation, test and predict: {modes}")
    add("--max-epochs", type=int, default=30, help="epochs to train")
    add("--batch-size", type=int, default=128, help="images in a batch, in every stage")
    add("--accelerator", default="auto", help="Lightning's accelerator: auto, cpu, gpu, ...")
    add("--cache-dir", type=Path, default=Path("runs/compiled"), help="folder for compiled code, for the next run")
    add("--logdir", type=Path, default=Path("runs"), help="folder for logs and checkpoints")
    add("--seed", type=int, default=0, help="seed of the weights and of the order of the batches")
    add("--export", type=Path, nargs="?", const="digits.pt2", help="leave a package of the best weights here")
    add("--min-accuracy", type=float, default=0.0, help="exit with status 1 if the test accuracy is lower")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    seed_everything(args.seed)
    # The data are tensors in memory, so worker processes would make the example slower.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")

    train, val, test = make_splits()
    # drop_last, because torch would compile a second time for a smaller last batch.
    train_loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val, args.batch_size)
    test_loader = DataLoader(test, args.batch_size)

    compiler = InductorCompile(args.train_mode, args.infer_mode, cache_dir=args.cache_dir)
    checkpoint = ModelCheckpoint(monitor="val/loss", filename="best")
    logger = TensorBoardLogger(args.logdir, name="resnet_digits")
    trainer = Trainer(
        max_epochs=args.max_epochs,
        accelerator=args.accelerator,
        devices=1,
        callbacks=[compiler, checkpoint],
        logger=logger,
        enable_model_summary=False,
        log_every_n_steps=10,
        enable_progress_bar=sys.stdout.isatty(),
    )
    model = DigitClassifier()
    trainer.fit(model, train_loader, val_loader)  # prints the report at the end
    [metrics] = trainer.test(model, test_loader, ckpt_path="best", verbose=False)
    few = Subset(test, range(min(args.batch_size, len(test))))  # one batch of a compiled shape
    if args.export:
        export(model, (val[0][0][None],), args.export)  # the test has loaded the best weights
    predictions = trainer.predict(model, DataLoader(few, args.batch_size)) or []

    print(f"predicted      {torch.as_tensor(predictions[0])[:16].tolist()}")
    print(f"true digits    {test.labels[:16]}")
    print(f"test accuracy  {metrics['test/accuracy']:.4f}")
    print(f"checkpoint     {checkpoint.best_model_path}")
    print(f"TensorBoard    tensorboard --logdir {args.logdir}")
    return 0 if metrics["test/accuracy"] >= args.min_accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
