"""Resume a compiled run from its checkpoint. It ends with the weights of an uninterrupted run.

Checkpoints have the keys of the original model. With `cache_dir`, the resumed run loads the compiled code.

    python examples/resume.py
"""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from digits import DigitClassifier, check, digits, make_trainer
from torch.utils.data import DataLoader

from compile_callbacks import InductorCompile


def fit(epochs, cache_dir, resume_from=None):
    """Train until the given epoch. Return the trainer, the module and the report."""
    pl.seed_everything(0)
    model = DigitClassifier()
    compiler = InductorCompile(cache_dir=cache_dir, targets=["forward"])  # compiled from the first step
    trainer = make_trainer(compiler, max_epochs=epochs)
    # The order of batches is the same in each run, so that the weights can be compared.
    trainer.fit(model, DataLoader(digits()[0], 64), ckpt_path=resume_from)
    return trainer, model, compiler.report.train


def main():
    with tempfile.TemporaryDirectory() as folder:
        cache_dir, checkpoint = Path(folder, "compiled"), Path(folder, "half.ckpt")
        trainer, _, first = fit(2, cache_dir)
        trainer.save_checkpoint(checkpoint)
        _, resumed, second = fit(4, cache_dir, resume_from=checkpoint)
        _, straight, _ = fit(4, cache_dir)

        keys = torch.load(checkpoint, weights_only=True)["state_dict"].keys()
        check(keys == DigitClassifier().state_dict().keys(), "the checkpoint has the keys of the eager model")
        pairs = zip(resumed.parameters(), straight.parameters(), strict=True)
        difference = max((a - b).abs().max().item() for a, b in pairs)
        print(f"largest difference of a weight  {difference:.1e}")
        check(difference < 1e-3, "the resumed run ends with the weights of the uninterrupted run")
        check(second.verified == f"equal {second.graphs}", "the resumed run computes the same as eager")
        check(second.diagnostics.cache_misses == 0 < second.cache_hits, "the compiled code of the first run was loaded")
        print(f"compile seconds  {first.compile_seconds:.1f}, resumed {second.compile_seconds:.1f}")


if __name__ == "__main__":
    main()
