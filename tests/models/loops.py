"""A model on graphs of PyG."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.trial import Trained, Trial


class _GCN(nn.Module):
    def __init__(self) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.first, self.second = GCNConv(8, 32), GCNConv(32, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x, edge_index, batch):
        from torch_geometric.nn import global_mean_pool

        x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index).relu()
        return self.head(global_mean_pool(x, batch))


class Graphs(Trained):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch.x, batch.edge_index, batch.batch), batch.y)

    def validation_step(self, batch, batch_idx):
        return self.net(batch.x, batch.edge_index, batch.batch)


def graphs(batches: int, seed: int = 0):
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    generator = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(batches * 4):
        nodes = int(torch.randint(5, 30, (), generator=generator))
        edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        x, y = torch.randn(nodes, 8, generator=generator), torch.randint(3, (1,), generator=generator)
        data.append(Data(x=x, edge_index=edges, y=y))
    return DataLoader(data, batch_size=4)


TRIALS = [
    Trial(name="PyG GCN", make=lambda: Graphs(_GCN()), train=lambda: graphs(30), validate=lambda: graphs(10, seed=1)),
]
