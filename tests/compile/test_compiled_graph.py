"""How torch calls compiled graphs: the frames around one, threads, `torch.compiler.reset()`, and DDP's optimizer."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo.symbolic_convert
from torch import nn

import compile_callbacks
from compile_callbacks import report_of
from tests.cases.case import Case, check
from tests.cases.zoo import Calls
from tests.support.models import FEATURES, Classifier, mlp

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

OURS = str(Path(compile_callbacks.__file__).parent)
X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


def is_ours(frame):
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


def frames_around_the_compiled_code(call):
    """Return the longest chain of our functions between torch's code for a target and the compiled function."""
    chains: list[list[str]] = [[]]

    def look(frame, event, _):
        chain = []
        if event == "call" and not is_ours(frame):
            while is_ours(frame := frame.f_back):
                chain.append(frame.f_code.co_qualname)
        # Dynamo's code for the target has the name of our function, which is beneath the dispatcher. The check for a
        # failed first run has returned before the compiled function is called.
        if chain and chain[-1].startswith(("CompiledGraph", "CudaGraph")) and chain[0] != "end_failed_warmup":
            chains.append(chain)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return max(chains, key=len)


@pytest.mark.parametrize(("with_batch_norm", "grad", "verify"), [(1, 1, 1), (1, 0, 0), (0, 1, 0)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_later_call_adds_one_frame_and_another_one_for_cuda_graphs(compiled, with_batch_norm, grad, verify, device):
    mode = "reduce-overhead" if device == "cuda" else "default"
    module = (mlp() if with_batch_norm else nn.Linear(FEATURES, 3)).to(device)
    compiled(module, train_mode=mode, infer_mode=mode, verify="warn" if verify else "off")
    x = X.to(device)
    with torch.set_grad_enabled(bool(grad)):
        for _ in range(3):
            module(x)
        frames = frames_around_the_compiled_code(lambda: module(x))
    assert frames == ["CudaGraph.__call__"] * (device == "cuda") + ["CompiledGraph.__call__"]


def calls_in_the_middle(net, x):
    """Call a function of the network between two graphs."""
    x = net(x)
    torch._dynamo.disable(net.function)()
    return x * 2


@torch.no_grad()
def test_overlapping_calls_of_two_threads_leave_the_users_own_compiles_uncounted(compiled):
    net = mlp()
    net.function = lambda: None
    module = compiled(Calls(net, calls_in_the_middle), train_mode=None, verify="off")
    module(X)
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    sets_and_waits = {"first": (first_in, second_in), "second": (second_in, first_out)}

    def call():
        with torch.no_grad():
            module(X)

    def function():
        sets, waits = sets_and_waits[threading.current_thread().name]
        sets.set()
        assert waits.wait(60)

    net.function = function
    first, second = (threading.Thread(target=call, name=name) for name in sets_and_waits)
    first.start()
    assert first_in.wait(60)
    second.start()
    first.join()
    first_out.set()
    second.join()
    seconds = report_of(module).infer.compile_seconds
    torch.compile(lambda x: torch.sin(x) * 2)(X)
    assert report_of(module).infer.compile_seconds == seconds > 0


class Resets(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 5:
            torch.compiler.reset()


def test_a_compile_after_reset_is_counted_and_is_no_sample():
    settings = {"infer_mode": None, "targets": ["net"], "verify": "off"}
    expect = {"train.graphs": 2}
    callback = check(Case(name="reset", make=Resets, train=(4,) * 12, callback=settings, expect=expect))
    series_of_train = callback.report.train.diagnostics.series
    assert [series["steps"] for series in series_of_train if series["kind"] == "compiling"] == [[1, 7]]
