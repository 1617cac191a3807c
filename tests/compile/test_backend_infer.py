"""`InductorBackend`: what infer takes and gives, and the weights that it computes with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_callbacks import CompileError, CompileWarning, InductorBackend
from tests.support.backend_models import SAMPLES, Model, batch, eagerly, linear
from tests.support.models import CLASSES

pytestmark = pytest.mark.usefixtures("dropped_backends_go")


def test_infer_takes_tensors_of_any_kind_without_a_new_graph():
    x, kwargs = batch(), {"scale": torch.tensor(2.0), "more": [{"bias": torch.ones(CLASSES)}]}
    backend = InductorBackend().build(Model(), [((x,), kwargs)])
    expected, graphs = eagerly(x, **kwargs), backend.report.infer.graphs
    with torch.enable_grad():
        out = backend.infer(x.clone().requires_grad_(), **kwargs)
        assert not out.requires_grad
        torch.testing.assert_close(out, expected)
    with torch.inference_mode():
        made_there = batch().t().contiguous().t().contiguous()
        out = backend.infer(made_there, scale=torch.tensor(2.0), more=[{"bias": torch.ones(CLASSES)}])
    assert not out.is_inference()
    torch.testing.assert_close(out, expected)
    assert backend.report.infer.graphs == graphs

    with torch.inference_mode():  # its memory does not hold all of its value
        conjugated = torch.complex(batch(), batch()).conj()
    torch.testing.assert_close(InductorBackend().build(Parts(), [((conjugated,), {})]).infer(conjugated), -batch())


class Parts(nn.Module):
    def forward(self, x):
        return x.imag


def test_infer_evaluates_whatever_mode_the_module_was_put_into():
    module = Model()
    backend = InductorBackend().build(module, SAMPLES)
    module.train()
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()))
    assert not any(part.training for part in module.modules())
    assert module(batch()).requires_grad  # with grad enabled the module itself runs eagerly
    assert backend.report.infer.graphs == 1


def test_hooks_within_the_module_run():
    seen = []

    def halve(module, args, output):
        seen.append(output.shape[0])
        return output / 2

    module = Model()
    handle = module.net[0][3].register_forward_hook(halve)
    backend = InductorBackend().build(module, SAMPLES)
    assert seen == [4]
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()) / 2)
    handle.remove()
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()))
    module.register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()) + 1)
    assert seen == [4, 4]


@pytest.mark.parametrize("new_shapes", ["eager", "raise"])
def test_new_shapes_are_those_of_no_sample(new_shapes):
    backend = InductorBackend({"dynamic": False}, new_shapes=new_shapes)
    backend.build(Model(), [((batch(size),), {}) for size in (2, 3)])
    assert backend.report.infer.graphs == 2
    for size in (2, 3):
        torch.testing.assert_close(backend.infer(batch(size)), eagerly(batch(size)))
    if new_shapes == "eager":
        torch.testing.assert_close(backend.infer(batch(5)), eagerly(batch(5)))
    else:
        with pytest.raises(CompileError, match=r"\(5, 8\)"):
            backend.infer(batch(5))
    assert backend.report.infer.graphs == 2


def test_cuda_graphs_on_a_cpu_are_warned_about():
    with pytest.warns(CompileWarning, match="not on a GPU"):
        InductorBackend("reduce-overhead").build(linear(), SAMPLES)
