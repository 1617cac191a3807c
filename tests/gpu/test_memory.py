"""The user's own peak of GPU memory, and steps under CUDA graphs that skip a batch after `torch.OutOfMemoryError`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import get_manager

from compile_callbacks import InductorCompile
from tests.support.models import CLASSES, FEATURES, Classifier, Cosines, loader, seeded, trainer

pytestmark = pytest.mark.gpu

WARMUP_STEPS = 2
FIRST_COMPILED = WARMUP_STEPS + 1
"""The index of the first compiled step with ``baseline_steps=1``."""


class SkipsBatches(Classifier):
    """Leaves too little memory for the first compiled step: for its forward or its backward pass."""

    def __init__(self, where):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 8192), nn.ReLU(), nn.Linear(8192, CLASSES)))
        self.automatic_optimization = False
        self.where, self.skipped, self.graphs = where, [], []

    def training_step(self, batch, batch_idx):
        x, y = (part.repeat_interleave(4096, 0) for part in batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        where = self.where if batch_idx == FIRST_COMPILED else None
        try:
            if where == "forward" and any(isinstance(other, InductorCompile) for other in self.trainer.callbacks):
                callback_handler.register_end_callback(self.limit_memory)
            elif where == "forward":
                self.limit_memory()
            loss = nn.functional.cross_entropy(self.net(x), y)
            if where == "backward":
                self.limit_memory()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())
        except torch.OutOfMemoryError:
            self.skipped.append(batch_idx)
        finally:
            if self.limit_memory in callback_handler.end_callbacks:
                callback_handler.remove_end_callback(self.limit_memory)
            torch.cuda.set_per_process_memory_fraction(1.0)
            self.graphs.append(counters["stats"]["unique_graphs"])

    def limit_memory(self, *_):
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.01)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_skips_a_batch_without_memory_goes_on(where):
    # If memory is too short for torch's tree of CUDA graphs, torch 2.11 ends the process with SIGABRT.
    get_manager(torch.cuda.current_device())

    def train(*callbacks):
        module = seeded(lambda: SkipsBatches(where))
        trainer(*callbacks, accelerator="cuda").fit(module, loader(8))
        return module

    eager = train()
    ours = InductorCompile("reduce-overhead", None, targets=["net"], baseline_steps=1, verify="off")
    compiled = train(ours)
    assert compiled.skipped == eager.skipped == [FIRST_COMPILED]
    assert (ours.report.train.graphs, ours.report.train.fallbacks) == (1, 0)
    # torch counts the graphs of all tests of the process.
    before, *later = [count - compiled.graphs[0] for count in compiled.graphs[FIRST_COMPILED - 1 :]]
    assert before == 0
    assert later == [1] * len(later)
    torch.testing.assert_close(compiled.losses, eager.losses, rtol=1e-3, atol=1e-3)
    again = seeded(Classifier)
    trainer(ours, accelerator="cuda").fit(again, loader(8))  # and so does the next fit with this callback
    assert len(again.losses) == 8


class Reserved(Classifier):
    """Keeps the memory that torch's allocator has reserved at the end of each step."""

    def __init__(self):
        super().__init__(Cosines(4096))
        self.reserved = []

    def training_step(self, batch, batch_idx):
        return super().training_step([part.repeat_interleave(1024, 0) for part in batch], batch_idx)

    def on_train_batch_end(self, *_):
        self.reserved.append(torch.cuda.memory_reserved())


def test_memory_that_only_eager_steps_need_is_freed_after_the_first_compiled_step():
    torch.cuda.empty_cache()
    module = seeded(Reserved)
    trainer(InductorCompile("default", targets=["net"], baseline_steps=3), accelerator="cuda").fit(module, loader(12))
    eager, compiled = module.reserved[WARMUP_STEPS + 2], module.reserved[WARMUP_STEPS + 3 :]
    assert eager > 16 * 4096 * 4096 * 4  # sixteen values
    assert max(compiled) < eager / 2
