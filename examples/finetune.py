"""Fine-tuning: train a new head on a frozen backbone, then unfreeze the backbone. Both are compiled.

When the example unfreezes the backbone, torch recompiles each target that uses its parameters once. The report counts
the recompile and shows the reason. You do not need to change anything for this. While the backbone is frozen, its
weights do not change.

    python examples/finetune.py
"""

import lightning.pytorch as pl
import torch
from digits import DigitClassifier, check, loaders, make_trainer
from lightning.pytorch.callbacks import BackboneFinetuning

from compile_callbacks import InductorCompile

THAW_AT_EPOCH = 2


class Watch(pl.Callback):
    """Records for each epoch whether the weights of the backbone changed."""

    def __init__(self):
        self.moved = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.before = pl_module.backbone[0].weight.detach().clone()

    def on_train_epoch_end(self, trainer, pl_module):
        self.moved.append(not torch.equal(self.before, pl_module.backbone[0].weight))


def main():
    pl.seed_everything(0)
    model = DigitClassifier()  # a real run would load a trained backbone here
    compiler, watch = InductorCompile(), Watch()
    finetuning = BackboneFinetuning(THAW_AT_EPOCH, lambda epoch: 1.0, backbone_initial_lr=3e-3, train_bn=False)
    trainer = make_trainer(compiler, finetuning, watch, max_epochs=5)
    trainer.fit(model, *loaders())

    for event in compiler.report.train.diagnostics.events:
        if event["kind"] == "recompile":
            print(f"recompiled {event['target']}: {event['reason']}")
    check(watch.moved == [False, False, True, True, True], "the backbone's weights change only after it is unfrozen")
    check(compiler.report.train.fallbacks == 0, "all of it ran compiled")
    check(
        str(compiler.report.train.verified).startswith("equal"),
        "the first step's outputs and gradients are those of eager",
    )
    check(float(trainer.callback_metrics["accuracy"]) > 0.85, "it learns to read digits")


if __name__ == "__main__":
    main()
