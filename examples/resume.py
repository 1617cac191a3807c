"""Resume: a run that ends goes on from its checkpoint, compiled, and ends where one that never stopped ends.

What it teaches: checkpoints look as if nothing had been compiled (they load where this library is not installed); the
callback's report is in them, so the run that goes on measures no eager baseline again; and `cache_dir` spares it the
compile too.

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
    """Train up to so many epochs; the trainer, the module and the report."""
    pl.seed_everything(0)
    model = DigitClassifier()
    # With a named target, the resumed run is compiled from its first step. Otherwise that step is eager and rounds
    # differently, and Adam makes whole steps of rounding errors in the bias before the batch norm.
    compiler = InductorCompile(cache_dir=cache_dir, targets=["forward"])
    trainer = make_trainer(compiler, max_epochs=epochs)
    # In the same order in each run, so that weights can be compared.
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
        check(difference < 1e-3, "the run that was resumed ends where the one that never stopped ends")
        check(second.verified == f"equal {second.graphs}", "what goes on compiled computes what eager would")
        check("eager_step_ms" in second.diagnostics.restored, "the eager baseline is that of the first run")
        check(second.diagnostics.cache_misses == 0 < second.cache_hits, "what the first run compiled was loaded")
        print(f"compile seconds  {first.compile_seconds:.1f}, resumed {second.compile_seconds:.1f}")


if __name__ == "__main__":
    main()
