"""Write, test and use a graph pass that replaces GELU by its tanh approximation in inference, but not in training.

`pattern_pass` creates a pass from two functions, a pattern and its replacement. Its argument `where` limits the pass to
inference graphs. `check_pass` returns the operators before and after the pass, and compares the results with eager. The
report has an entry for each graph.

    python examples/custom_pass.py
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from compile_callbacks import InductorCompile
from compile_callbacks.passes import pattern_pass
from compile_callbacks.passes.testing import check_pass


def exact_gelu(x):
    return nn.functional.gelu(x)


def tanh_gelu(x):
    return nn.functional.gelu(x, approximate="tanh")


fast_gelu = pattern_pass(exact_gelu, tanh_gelu, [torch.ones(2, 3)], where=lambda match: match.is_inference)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def main():
    # The pass must change the inference graph with a result close to eager. It must not change training graphs.
    result = check_pass(fast_gelu, Net().net, torch.randn(8, 16))
    assert (result.ops_before["aten.erf.default"], result.ops_after["aten.erf.default"]) == (1, 0)
    result.assert_close(rtol=0, atol=1e-3)
    assert not check_pass(fast_gelu, Net().net, torch.randn(8, 16), phase="train").changed

    # The use.
    x = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 32)
    callback = InductorCompile(passes=[fast_gelu], baseline_steps=0)
    trainer = pl.Trainer(
        max_epochs=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(Net(), loader, loader)
    for run in (*callback.report.train.diagnostics.passes, *callback.report.infer.diagnostics.passes):
        if "from_cache" in run:
            print(f"{run['name']} did not run: torch's cache had the graph as the pass left it")
        else:
            print(f"{run['name']} {'changed' if run['changed'] else 'left alone'}: the {run['graph']} graph")


if __name__ == "__main__":
    main()
