"""EMA: validate with averaged weights. Needs Lightning 2.6 or newer.

Lightning's `EMAWeightAveraging` copies the module and swaps its weights before and after validation. The callback does
not compile the copy, and torch does not recompile after the swap. Validation uses the averaged weights, also with
`infer_mode="freezing"`.

    python examples/ema.py
"""

import lightning.pytorch as pl
import torch
from digits import DigitClassifier, check, loaders, make_trainer
from lightning.pytorch.callbacks import EMAWeightAveraging

from compile_callbacks import InductorCompile


def validate_eagerly(model, loader):
    model.eval()
    with torch.no_grad():
        return torch.stack([(model(x).argmax(dim=1) == y).float().mean() for x, y in loader]).mean().item()


def main():
    pl.seed_everything(0)
    model = DigitClassifier()
    train_loader, val_loader = loaders()
    compiler = InductorCompile("default", "freezing")
    trainer = make_trainer(compiler, EMAWeightAveraging(decay=0.9), max_epochs=4)
    trainer.fit(model, train_loader, val_loader)

    # After the fit, the module has the averaged weights.
    validated, eager = float(trainer.callback_metrics["accuracy"]), validate_eagerly(model, val_loader)
    print(f"accuracy of averaged weights  {validated:.4f} in the run's last validation, {eager:.4f} eagerly after it")
    check(abs(validated - eager) < 1e-6, "validation ran with the averaged weights of that moment")
    check(validated > 0.9, "they read digits")
    check(compiler.report.infer.recompiles == 0, "no swap cost a recompile")
    check(compiler.report.infer.fallbacks == 0, "all of it ran compiled")


if __name__ == "__main__":
    main()
