"""Fine-tuning: train a new head on a frozen body first, then thaw the body, with both compiled.

What it teaches: a freeze or a thaw changes what has gradients, so torch compiles the targets concerned anew, once, and
the report counts it as a recompile with its reason; nothing is to be done about it, and the frozen body does not move.

    python examples/finetune.py
"""

import lightning.pytorch as pl
import torch
from digits import DigitClassifier, check, loaders, make_trainer
from lightning.pytorch.callbacks import BackboneFinetuning

from compile_callbacks import InductorCompile

THAW_AT_EPOCH = 2


class Watch(pl.Callback):
    """Looks whether the body moves, epoch by epoch."""

    def __init__(self):
        self.moved = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.before = pl_module.backbone[0].weight.detach().clone()

    def on_train_epoch_end(self, trainer, pl_module):
        self.moved.append(not torch.equal(self.before, pl_module.backbone[0].weight))


def main():
    pl.seed_everything(0)
    model = DigitClassifier()  # a real run would load a trained body here
    compiler, watch = InductorCompile(), Watch()
    finetuning = BackboneFinetuning(THAW_AT_EPOCH, lambda epoch: 1.0, backbone_initial_lr=3e-3, train_bn=False)
    trainer = make_trainer(compiler, finetuning, watch, max_epochs=5)
    trainer.fit(model, *loaders())

    for event in compiler.report.train.diagnostics.events:
        if event["kind"] == "recompile":
            print(f"recompiled {event['target']}: {event['reason']}")
    check(watch.moved == [False, False, True, True, True], "the body stands still until it is thawed, and moves then")
    check(compiler.report.train.fallbacks == 0, "all of it ran compiled")
    check(
        str(compiler.report.train.verified).startswith("equal"),
        "the first step's outputs and gradients are those of eager",
    )
    check(float(trainer.callback_metrics["accuracy"]) > 0.85, "it learns to read digits")


if __name__ == "__main__":
    main()
