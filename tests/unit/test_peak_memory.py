"""The peak memory of a step, measured without a reset of torch's counters."""

from __future__ import annotations

import pytest
import torch

from compile_callbacks.profiling.memory import Peak, PeakMemory

pytestmark = pytest.mark.all_versions

MIB = 2**20


class Allocator:
    """The two counters of torch's CUDA allocator, in MiB."""

    peak = 0

    def uses(self, mib):
        self.peak = max(self.peak, mib)

    def max_memory_allocated(self):
        return self.peak * MIB

    def reset_peak_memory_stats(self):
        raise AssertionError("the user's own code may read the peak")


@pytest.fixture
def allocator(monkeypatch):
    fake = Allocator()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", fake.max_memory_allocated)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fake.reset_peak_memory_stats)
    return fake


def step(memory, allocator, mib, *, compiled, traced=False):
    memory.start("train", compiled=compiled)
    allocator.uses(mib)
    memory.stop(traced=traced)


def test_a_peak_is_measured_only_if_a_step_raises_it(allocator):
    memory = PeakMemory()
    allocator.uses(100)
    assert memory.peak("train", compiled=False) == Peak()
    for mib in (300, 938, 700):
        step(memory, allocator, mib, compiled=False)
    step(memory, allocator, 950, compiled=True, traced=True)  # the compiler used this memory
    step(memory, allocator, 207, compiled=True)
    assert memory.peak("train", compiled=False) == Peak(mib=938)
    assert memory.peak("train", compiled=True) == Peak(at_most_mib=950)
    step(memory, allocator, 1000, compiled=True)
    assert memory.peak("train", compiled=True) == Peak(mib=1000)
