"""Create `InductorCompile` from a YAML file with LightningCLI.

In YAML, a config is a mode or a mapping of `InductorConfig`'s fields, and a pass has a `class_path`.

    python examples/cli/main.py fit --config examples/cli/config.yaml

The command line overrides `config.yaml`, and `--print_config` prints the complete configuration:

    python examples/cli/main.py fit --config examples/cli/config.yaml --trainer.max_epochs 2 --print_config
    python examples/cli/main.py fit --trainer.callbacks.help compile_callbacks.InductorCompile
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from compile_callbacks import GraphPass


class CountNodes(GraphPass):
    """A minimal graph pass, which `config.yaml` names by its `class_path`."""

    def __call__(self, graph, is_inference):
        print(f"compiling {'an inference' if is_inference else 'a training'} graph of {len(graph.nodes)} nodes")


class Digits(pl.LightningDataModule):
    """Scikit-learn's handwritten digits: 1,797 images of 8x8 pixels.

    Args:
        batch_size: The number of images in a batch.
    """

    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str):
        images, labels = load_digits(return_X_y=True)
        digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
        sizes = [len(digits) - 256, 256]
        self.train, self.val = random_split(digits, sizes, torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)


class Classifier(pl.LightningModule):
    """Two linear layers.

    Args:
        width: The number of features between the layers.
        lr: Learning rate of Adam.
    """

    def __init__(self, width: int = 128, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        correct = self.net(batch[0]).argmax(dim=1) == batch[1]
        self.log("val_accuracy", correct.float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)


class CheckedCLI(LightningCLI):
    def after_fit(self):
        accuracy = float(self.trainer.callback_metrics["val_accuracy"])
        print(f"validation accuracy  {accuracy:.4f}")
        if accuracy < 0.85:
            raise SystemExit("the classifier did not learn")


if __name__ == "__main__":
    CheckedCLI(Classifier, Digits)
