"""Train a torchvision ResNet on a folder of images, with separate compiled code for training and inference.

DATA contains `train/CLASS/*.jpg` and `val/CLASS/*.jpg`, as `torchvision.datasets.ImageFolder` reads them:

    python examples/resnet_imagefolder.py DATA --max-epochs 90 --batch-size 256

To measure the cost and the gain of compiling without a data set, use random images. The second command is small enough
for a machine without a GPU:

    python examples/resnet_imagefolder.py --fake-data
    python examples/resnet_imagefolder.py --fake-data --arch resnet18 --image-size 64
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import FakeData, ImageFolder
from torchvision.models import get_model
from torchvision.transforms import v2

from compile_callbacks import InductorCompile

CUDA = torch.cuda.is_available()


class ImageClassifier(LightningModule):
    """A torchvision classification model in channels_last, trained with SGD and a one-cycle schedule."""

    def __init__(self, arch: str, num_classes: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = get_model(arch, num_classes=num_classes)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, 3, H, W)."""
        return self.net(images.contiguous(memory_format=torch.channels_last))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        self.log("val/loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        self.log("val/accuracy", accuracy, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        lr = self.hparams["lr"]
        optimizer = torch.optim.SGD(self.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_datasets(args: argparse.Namespace) -> tuple[Dataset, Dataset, int]:
    """Return the train set, the validation set and the number of classes."""
    size = args.image_size
    to_tensor = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ]
    if args.fake_data:
        fake = {"image_size": (3, size, size), "num_classes": 10, "transform": v2.Compose(to_tensor)}
        return FakeData(32 * args.batch_size, **fake), FakeData(16 * args.batch_size, **fake), 10
    augment = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *to_tensor])
    center = v2.Compose([v2.Resize(size * 256 // 224), v2.CenterCrop(size), *to_tensor])
    train = ImageFolder(args.data / "train", augment)
    val = ImageFolder(args.data / "val", center)
    if train.classes != val.classes:
        raise ValueError(f"{args.data}/train and {args.data}/val do not hold the same class folders")
    return train, val, len(train.classes)


def make_loader(dataset: Dataset, args: argparse.Namespace, *, train: bool) -> DataLoader:
    return DataLoader(
        dataset,
        args.batch_size,
        shuffle=train,
        drop_last=train,  # because torch would compile a second time for a smaller last batch
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=CUDA,
    )


def batch_limit(text: str) -> int | float:
    """Parse a limit as Lightning does: an integer is a number of batches, and a fraction is a share of the batches."""
    return float(text) if "." in text else int(text)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a torchvision ResNet on a folder of images with InductorCompile.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    workers = min(8, os.cpu_count() or 1)
    add = parser.add_argument
    add("data", type=Path, nargs="?", default=Path("data"), help="folder with train/CLASS/* and val/CLASS/*")
    add("--fake-data", action="store_true", help="random images of 10 classes; DATA is not needed")
    add("--arch", default="resnet50", help="a torchvision classification model")
    add("--image-size", type=int, default=224, help="height and width in pixels")
    add("--train-mode", default="fast", help="torch.compile mode for training, or 'eager'")
    add("--infer-mode", default="fast", help="torch.compile mode for validation, or 'eager'")
    add("--precision", default="bf16-mixed", help="Lightning's precision")
    add("--batch-size", type=int, default=128 if CUDA else 16, help="images in a batch")
    add("--workers", type=int, default=workers, help="processes that load images")
    add("--lr", type=float, default=0.1, help="highest learning rate, for each 256 images in a batch")
    add("--max-epochs", type=int, default=1, help="epochs to train")
    add("--limit-train-batches", type=batch_limit, default=1.0, help="batches, or a share as in 0.1")
    add("--limit-val-batches", type=batch_limit, default=1.0, help="batches, or a share as in 0.1")
    add("--accelerator", default="auto", help="Lightning's accelerator: auto, cpu, gpu, ...")
    add("--logdir", type=Path, default=Path("runs"), help="folder for logs and checkpoints")
    add("--seed", type=int, default=0, help="seed of the weights and of the order of the batches")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    seed_everything(args.seed, workers=True)
    if CUDA:
        torch.set_float32_matmul_precision("high")

    train, val, num_classes = make_datasets(args)
    model = ImageClassifier(args.arch, num_classes, lr=args.lr * args.batch_size / 256)
    compiler = InductorCompile(train_mode=args.train_mode, infer_mode=args.infer_mode)
    checkpoint = ModelCheckpoint(monitor="val/accuracy", mode="max", filename="best", save_last=True)
    trainer = Trainer(
        max_epochs=args.max_epochs,
        accelerator=args.accelerator,
        devices=1,
        precision=args.precision,
        callbacks=[compiler, checkpoint],
        logger=TensorBoardLogger(args.logdir, name="resnet_imagefolder"),
        log_every_n_steps=10,
        limit_train_batches=args.limit_train_batches,
        limit_val_batches=args.limit_val_batches,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    trainer.fit(model, make_loader(train, args, train=True), make_loader(val, args, train=False))

    print(f"val accuracy  {trainer.callback_metrics['val/accuracy']:.4f}")
    print(f"checkpoint    {checkpoint.best_model_path}")
    print(f"TensorBoard   tensorboard --logdir {args.logdir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
