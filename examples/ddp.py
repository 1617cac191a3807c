"""Train in several processes with DDP, on CPUs or GPUs. The callback needs no other setting.

In each process, the callback compiles the module inside DDP's wrapper, in place. All processes end with equal weights.
The checkpoint has the keys of the original model, and one process without DDP can load it.

    python examples/ddp.py --devices 2 --accelerator cpu
    python examples/ddp.py --devices 8 --accelerator gpu
"""

import argparse
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from digits import DigitClassifier, check, loaders, make_trainer

from compile_callbacks import InductorCompile


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--max-epochs", type=int, default=4)
    args = parser.parse_args()

    pl.seed_everything(0)
    model, compiler = DigitClassifier(), InductorCompile()
    trainer = make_trainer(
        compiler,
        accelerator=args.accelerator,
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.max_epochs,
    )
    trainer.fit(model, *loaders())

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    weights = weights.to(trainer.strategy.root_device)  # fit leaves the module on the CPU, and NCCL needs GPU tensors
    everyones = trainer.strategy.all_gather(weights).reshape(trainer.world_size, -1)
    accuracy = float(trainer.callback_metrics["accuracy"])
    checkpoint = Path(tempfile.gettempdir(), "compile_callbacks_ddp.ckpt")
    trainer.save_checkpoint(checkpoint)  # every process calls this, and the first process writes the file
    if not trainer.is_global_zero:
        return
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    checkpoint.unlink()
    alone = DigitClassifier()
    alone.load_state_dict(state)
    check(bool((everyones == everyones[0]).all()), f"{trainer.world_size} processes end with equal weights")
    check(state.keys() == DigitClassifier().state_dict().keys(), "the checkpoint has the keys of the eager model")
    check(compiler.report.train.graphs > 0 and compiler.report.train.fallbacks == 0, "training ran compiled")
    check(accuracy > 0.85, "it learns to read digits")


if __name__ == "__main__":
    main()
