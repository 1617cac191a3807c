"""Write, test and use a graph pass that replaces GELU by its tanh approximation in inference, but not in training.

Inductor computes GELU as x / 2 * (1 + erf(x / sqrt(2))). The pass replaces erf in inference graphs.
The test records the operators before and after the pass, and compares the results with eager. The report has an entry
for each graph.

    python examples/custom_pass.py
"""

import copy

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from compile_callbacks import InductorCompile, compile_phases, graph_pass
from compile_callbacks.passes import RecordGraphs, call_before, find_nodes, replace_node

aten = torch.ops.aten


@graph_pass
def fast_gelu(graph, is_inference):
    if is_inference:
        for node in find_nodes(graph, aten.erf.default):
            # erf(z) is about tanh(2 / sqrt(pi) * (z + 0.08943 * z**3)), as in gelu(approximate="tanh").
            z = node.args[0]
            square = call_before(node, aten.mul.Tensor, z, z)
            factor = call_before(node, aten.add.Tensor, call_before(node, aten.mul.Tensor, square, 0.08943), 1)
            cubic = call_before(node, aten.mul.Tensor, call_before(node, aten.mul.Tensor, z, factor), 1.12838)
            replace_node(node, aten.tanh.default, cubic)


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


def test_fast_gelu():
    """The pass changes the inference graph with a result close to eager, and no training graph."""
    net, x, before, after = Net().net, torch.randn(8, 16), RecordGraphs(), RecordGraphs()
    compiled = compile_phases(copy.deepcopy(net), passes=[before, fast_gelu, after], on_error="raise", verify="off")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), rtol=0, atol=1e-3)
    assert (before.graphs[0].ops["aten.erf.default"], after.graphs[0].ops["aten.erf.default"]) == (1, 0)
    compiled(x)
    assert [graph.text for graph in before.graphs[1:]] == [graph.text for graph in after.graphs[1:]]


def main():
    test_fast_gelu()

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
