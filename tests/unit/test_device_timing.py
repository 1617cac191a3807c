"""Step times on an accelerator, by the events of its stream."""

from __future__ import annotations

import types

import pytest
import torch

from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.profiling.workload import Workload

pytestmark = pytest.mark.all_versions

WORK = Workload("train", "", ())


class Stream:
    """An accelerator's stream: workload is queued at once, and takes milliseconds to run."""

    def __init__(self):
        self.queued_ms = self.synchronized = 0.0

    def synchronize(self):
        self.synchronized = self.queued_ms

    def event(self, enable_timing=False):
        assert enable_timing
        stream, event = self, types.SimpleNamespace(at_ms=None)
        event.record = lambda: setattr(event, "at_ms", stream.queued_ms)
        event.query = lambda: stream.synchronized >= event.at_ms
        event.synchronize = lambda: setattr(stream, "synchronized", max(stream.synchronized, event.at_ms))
        event.elapsed_time = lambda end: end.at_ms - event.at_ms
        return event


@pytest.fixture(params=["mps", "xpu", "cuda"])
def device(request, monkeypatch):
    stream = Stream()
    module = types.SimpleNamespace(Event=stream.event, synchronize=stream.synchronize)
    monkeypatch.setattr(torch, request.param, module)
    return torch.device(request.param), stream


def test_a_step_is_timed_by_the_device_without_a_synchronization(device):
    device, stream = device
    timer = StepTimer(clock=lambda: 0.0)  # no time passes on the CPU
    for _ in range(5):
        timer.start(device)
        stream.queued_ms += 4
        timer.stop("train", compiled=True, workload=WORK, disturbed=False)
    assert timer.samples("train", compiled=True) == {}
    assert stream.synchronized == 0
    timer.synchronize()
    assert timer.samples("train", compiled=True) == {WORK: (4.0, 4.0, 4.0)}
