"""Workarounds for torch: each test fails if torch no longer needs the workaround."""

from __future__ import annotations

import inspect
import random
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from compile_callbacks import _torch, compile_phases, report_of, restore
from tests.compile.test_saved_inputs import ReadsAndWrites
from tests.support.models import FEATURES
from tests.support.passes import Uncached

NO_PUBLIC_FUNCTION = "look in the release notes for a public function"
PARAMETERS = {
    *("model", "fullgraph", "dynamic", "backend", "mode", "options", "disable"),
    *("name", "isolate_recompiles", "recompile_limit", "dynamic_shapes"),
}
"""The parameters of ``torch.compile`` in torch 2.11 to 2.15."""

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


def backward(retain_graph=False):
    """Run a backward pass of a compiled network, and return what verification found."""
    # The one writes a buffer that its backward pass needs, and the backward pass of the other has buffers to donate.
    net = nn.Sequential(ReadsAndWrites("buffer"), nn.LayerNorm(FEATURES))
    compile_phases(net, "default", None, passes=[Uncached()])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net(X).square().mean().backward(retain_graph=retain_graph)
        return report_of(net).train.verified
    finally:
        restore(net)


def written_inputs_are_saved(monkeypatch):
    monkeypatch.setattr(_torch.autograd, "save_copies", lambda *args: None)
    return backward() != "equal 1"


def donated_buffers_refuse_a_second_backward(monkeypatch):
    monkeypatch.setattr(_torch.autograd, "overwrite_no_saved_tensors", lambda: None)
    with pytest.raises(RuntimeError, match="donated"):
        backward(retain_graph=True)
    return True


def draws_are_constant(monkeypatch):
    of_module = torch.compile(lambda x, _: x + random.sample(range(10**6), 1)[0], backend="eager")
    of_object = torch.compile(lambda x, source: x + source.sample(range(10**6), 1)[0], backend="eager")
    source, x = random.Random(7), torch.zeros((), dtype=torch.float64)
    return any(len({float(draw(x, source)) for _ in range(4)}) == 1 for draw in (of_module, of_object))


def eager_checkpoints_draw_again(monkeypatch):
    net = torch.compile(
        lambda x: checkpoint(nn.functional.dropout, x, use_reentrant=False), backend=lambda graph, _: graph.forward
    )
    x = torch.ones(100, requires_grad=True)
    output = net(x)
    output.sum().backward()
    return not torch.equal(x.grad, output.detach())  # the derivative of a linear function


NEEDED = {
    "autograd.save_copies": written_inputs_are_saved,
    "autograd.graph_is_kept": NO_PUBLIC_FUNCTION,
    "autograd.overwrite_no_saved_tensors": donated_buffers_refuse_a_second_backward,
    "autograd.restored_after_error": NO_PUBLIC_FUNCTION,
    "inductor.without_cuda_graphs": "tests/gpu/test_verification.py",
    "inductor.end_failed_warmup": "tests/gpu/test_memory.py",
    "inductor.begin_marks": "tests/lightning/test_stopwatch.py",
    "dynamo.compile_function": lambda _: set(inspect.signature(torch.compile).parameters) <= PARAMETERS,
    "dynamo.transform_checks": NO_PUBLIC_FUNCTION,
    "dynamo.without_odd_gradients": lambda _: hasattr(torch.distributed.fsdp, "FullyShardedDataParallel"),
    "dynamo.frames_with_constant_draws": draws_are_constant,
    "graphs._call_checkpoint": eager_checkpoints_draw_again,
}
"""By workaround: whether torch needs it, the test that would fail otherwise, or what to do by hand."""


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="the newest torch decides")
@pytest.mark.parametrize("name", [name for name, needed in NEEDED.items() if callable(needed)])
def test_torch_still_needs_the_workaround(name, monkeypatch, no_codegen):
    assert NEEDED[name](monkeypatch), f"delete {name}"


def test_each_workaround_has_an_entry():
    """The text of a workaround is in the docstring of a function or a class, or below an assignment."""
    top_level, found = re.compile(r"^(?:def |class )?(\w+)(?:\(|:| =)", re.MULTILINE), []
    for path in Path(_torch.__file__).parent.glob("[!_]*.py"):
        before, *texts = path.read_text().split("Workaround (until ")
        for text in texts:
            found.append(f"{path.stem}.{top_level.findall(before)[-1]}")
            before += text
    assert sorted(found) == sorted(NEEDED)
