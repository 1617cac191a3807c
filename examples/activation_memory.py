"""Twice the batch in the same memory: `activation_memory_budget` recomputes activations in the backward pass.

The example trains a deep network three times: with a batch of 256, with a batch of 512, and with a batch of 512 and a
budget. The report contains the memory in MiB that each graph saves for its backward pass, also on a CPU. On a GPU, the
example also prints the peak memory of the training steps. Compare the peaks before you choose a budget, because a
smaller budget can have a higher peak.

    python examples/activation_memory.py --budget 0.3
"""

import argparse
import tempfile

import lightning.pytorch as pl
import torch
from digits import check, digits, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from compile_callbacks import InductorCompile, InductorConfig, PhaseReport

BATCH = 256


class Block(nn.Module):
    """A residual block whose activations take more memory than its weights."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class DeepClassifier(pl.LightningModule):
    """A classifier of digits with three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(3)), nn.LayerNorm(64), nn.Linear(64, 10))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(batch_size: int, budget: float | None) -> tuple[list[float], PhaseReport]:
    """Train for two epochs. Return the losses and the report of the train phase."""
    pl.seed_everything(0, verbose=False)
    module, mode = DeepClassifier(), InductorConfig(activation_memory_budget=budget)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # otherwise, a peak below that of an earlier fit is unknown
    with tempfile.TemporaryDirectory() as cache:  # empty, because graphs from the cache do not count
        callback = InductorCompile(mode, None, targets=["net"], baseline_steps=0, cache_dir=cache)
        make_trainer(callback, max_epochs=2).fit(module, DataLoader(digits()[0], batch_size, drop_last=True))
    return module.losses, callback.report.train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=0.3, help="from 1.0, keep all, to 0.0, recompute (default 0.3)")
    budget = parser.parse_args().budget
    _, small = fit(BATCH, None)
    losses, large = fit(2 * BATCH, None)
    same_losses, budgeted = fit(2 * BATCH, budget)
    for name, report in {"small": small, "large": large, f"large, budget {budget}": budgeted}.items():
        found = report.diagnostics
        peak = f", peak {found.peak_memory_mib:.0f} MiB" if found.peak_memory_mib else ""
        print(f"{name:18} saved for backward {found.saved_for_backward_mib or 0:6.2f} MiB{peak}")
    saved = [report.diagnostics.saved_for_backward_mib or 0.0 for report in (small, large, budgeted)]
    check(saved[1] > 1.8 * saved[0] > 0, "twice the batch saves about twice the memory for backward")
    check(saved[2] <= saved[0], "with the budget, twice the batch saves no more than the batch did before")
    torch.testing.assert_close(same_losses, losses, rtol=1e-3, atol=1e-4)
    check(True, "the losses are the same")


if __name__ == "__main__":
    main()
