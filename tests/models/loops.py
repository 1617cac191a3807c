"""Loops and data of unusual form: packed sequences, a gradient penalty, reinforcement learning, and graphs of PyG."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.models.trial import Trained, Trial


class Packed(Trained):
    """An LSTM on a `PackedSequence` of sequences of varying length."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM(8, 32, batch_first=True))
        self.head = nn.Linear(32, 3)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.net(packed)
        return self.head(hidden[-1])

    def training_step(self, batch, batch_idx):
        x, lengths, y = batch
        return F.cross_entropy(self(x, lengths), y)

    def validation_step(self, batch, batch_idx):
        return self(*batch[:2])


def sequences(batches: int, seed: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)

    def batch():
        lengths = torch.randint(4, 20, (4,), generator=generator)
        x = torch.randn(4, int(lengths.max()), 8, generator=generator)
        return x, lengths, torch.randint(3, (4,), generator=generator)

    return DataLoader([batch() for _ in range(batches)], batch_size=None)


class WGAN(pl.LightningModule):
    """Two optimizers, five critic steps for each generator step, and a penalty on gradients of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        of_generator, of_critic = self.optimizers()
        real = batch
        noise = torch.randn(len(real), 8)
        if batch_idx % 5:
            fake = self.generator(noise).detach()
            mixed = (real + torch.rand(len(real), 1) * (fake - real)).requires_grad_(True)
            (gradient,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
            loss = self.critic(fake).mean() - self.critic(real).mean() + 10 * (gradient.norm(dim=1) - 1).pow(2).mean()
            optimizer = of_critic
        else:
            loss, optimizer = -self.critic(self.generator(noise)).mean(), of_generator
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}

    def validation_step(self, batch, batch_idx):
        return self.critic(batch)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]


def points(batches: int, seed: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader([torch.randn(16, 4, generator=generator) for _ in range(batches)], batch_size=None)


class _Replay(IterableDataset):
    """Plays episodes of an environment with the module's current weights, and yields what it remembers."""

    def __init__(self, agent: DQN, steps: int) -> None:
        self.agent = agent
        self.steps = steps

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        memory, state = [], torch.zeros(4)
        for _ in range(self.steps):
            for _ in range(8):
                with torch.no_grad():
                    values = self.agent.net(state[None])
                explores = float(torch.rand((), generator=generator)) < 0.3
                action = int(torch.randint(2, (), generator=generator)) if explores else int(values.argmax())
                push = torch.tensor([0.0, 1.0, 0.0, -1.0]) * (2 * action - 1)
                after = 0.9 * state + 0.1 * push + 0.05 * torch.randn(4, generator=generator)
                memory.append((state, action, float(-after.abs().sum()), after))
                state = after
            chosen = torch.randint(len(memory), (16,), generator=generator)
            states, actions, rewards, nexts = zip(*(memory[i] for i in chosen), strict=True)
            yield torch.stack(states), torch.tensor(actions), torch.tensor(rewards), torch.stack(nexts)


class DQN(Trained):
    """Q-learning with a target network, which is copied every eight steps."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)))
        self.slow_net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.slow_net.load_state_dict(self.net.state_dict())

    def training_step(self, batch, batch_idx):
        states, actions, rewards, nexts = batch
        if batch_idx % 8 == 0:
            self.slow_net.load_state_dict(self.net.state_dict())
        values = self.net(states).gather(1, actions[:, None])[:, 0]
        with torch.no_grad():
            wanted = rewards + 0.9 * self.slow_net(nexts).max(1).values
        return F.mse_loss(values, wanted)

    def train_dataloader(self):
        return DataLoader(_Replay(self, 24), batch_size=None)


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
    Trial(
        name="LSTM on packed sequences", make=Packed, train=lambda: sequences(24), validate=lambda: sequences(8, seed=1)
    ),
    Trial(
        name="WGAN-GP",
        make=WGAN,
        train=lambda: points(25),
        validate=lambda: points(8, seed=1),
        eager_targets=1,  # the critic: its gradients are differentiated
    ),
    Trial(name="RL on an IterableDataset", make=DQN, train=lambda: None),
    Trial(name="PyG GCN", make=lambda: Graphs(_GCN()), train=lambda: graphs(30), validate=lambda: graphs(10, seed=1)),
]
