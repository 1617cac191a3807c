"""A small convolutional LightningModule, its data, and its eager predictions."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Convolutional(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        self.outputs = []

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.net(batch[0]))

    def test_step(self, batch, batch_idx):
        self.outputs.append(self.net(batch[0]))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


def images(batches=2):
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(4 * batches, 3, 8, 8, generator=generator)), 4)


def eager(module):
    module = copy.deepcopy(module).eval()
    with torch.no_grad():
        return torch.cat([module.net(batch) for (batch,) in images()])
