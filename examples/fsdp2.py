"""Train a small transformer with sharded weights (FSDP2): `fully_shard` shards its blocks over several processes.

The callback needs no other setting. It compiles the `forward` of each sharded block, which runs between FSDP's hooks.
All blocks share one graph. Each process has its own shard of the weights. The model without FSDP can load the
checkpoint.

    python examples/fsdp2.py --devices 2 --accelerator cpu
    python examples/fsdp2.py --devices 8 --accelerator gpu
"""

import argparse
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from digits import DigitClassifier, check, loaders, make_trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from compile_callbacks import InductorCompile

ROWS, WIDTH, DEPTH = 8, 64, 4


class RowReader(DigitClassifier):
    """A transformer that reads the eight rows of an image as tokens."""

    def __init__(self):
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.embedding = nn.Linear(ROWS, WIDTH)
        self.positions = nn.Parameter(torch.zeros(ROWS, WIDTH))
        self.backbone = nn.TransformerEncoder(block, DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embedding(images.unflatten(1, (ROWS, ROWS))) + self.positions
        return self.head(self.backbone(tokens).mean(dim=1))


class Sharded(RowReader):
    """The classifier. `configure_model` shards each block, and then the rest of the model."""

    def configure_model(self):
        assert self.device_mesh is not None  # set by the strategy
        mesh = self.device_mesh["data_parallel"]
        for block in self.backbone.get_submodule("layers").children():
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--max-epochs", type=int, default=4)
    args = parser.parse_args()

    pl.seed_everything(0)
    model, compiler = Sharded(), InductorCompile()
    trainer = make_trainer(
        compiler,
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=ModelParallelStrategy(
            data_parallel_size=args.devices, tensor_parallel_size=1, save_distributed_checkpoint=False
        ),
        max_epochs=args.max_epochs,
    )
    trainer.fit(model, *loaders(32))

    parameters = model.backbone.parameters()
    held = sum(parameter.to_local().numel() for parameter in parameters if isinstance(parameter, DTensor))
    accuracy = float(trainer.callback_metrics["accuracy"])
    checkpoint = Path(tempfile.gettempdir(), "compile_callbacks_fsdp2.ckpt")
    trainer.save_checkpoint(checkpoint)  # every process calls this, and the first process writes the file
    if not trainer.is_global_zero:
        return
    alone = RowReader()
    alone.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    checkpoint.unlink()
    share = held / sum(parameter.numel() for parameter in alone.backbone.parameters())
    check(
        share < 1.1 / args.devices,
        f"each process holds its share of the blocks' weights ({share:.0%})",
    )
    check(compiler.report.train.graphs == 3, f"three graphs: the embedding, the head, and one for {DEPTH} blocks")
    check(compiler.report.train.fallbacks == 0, "nothing fell back to eager code")
    check(accuracy > 0.8, "it learns to read digits, and its checkpoint loads without FSDP")


if __name__ == "__main__":
    main()
