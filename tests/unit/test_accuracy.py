"""The comparison of compiled results with eager results."""

from __future__ import annotations

import pytest
import torch

from compile_callbacks.graphs import accuracy


@pytest.mark.parametrize(
    ("true", "error", "verdict"), [(1e-9, 0.5, "equal"), (1e-9, 2.0, "differs"), (1e-3, 0.5, "differs")]
)
def test_a_gradient_whose_terms_cancel_out_consists_of_rounding_errors(true, error, verdict):
    """For example, the bias of a convolution before a batch norm, whose eager gradient may be exact by chance."""
    weight, noise = torch.ones(16), 2**-14 * torch.ones(16)

    def results(bias, dtype=torch.float32):
        return {"the gradient of weight": weight.to(dtype), "the gradient of bias": (bias * noise).to(dtype)}

    allowed = accuracy.tolerance([torch.float32], torch.device("cpu"))
    found = accuracy.compare_results(results(true), results(error), allowed, lambda: results(true, torch.float64))
    assert found.result == verdict


@pytest.mark.parametrize(("right", "verdict"), [("compiled", "equal"), ("eager", "differs")])
def test_integers_are_exact_or_float64_decides(right, verdict):
    values = {"eager": torch.arange(1000), "compiled": torch.arange(1000).index_fill(0, torch.tensor([5]), 7)}
    eager, compiled, truth = ({"output 0": values[name]} for name in ("eager", "compiled", right))
    assert accuracy.compare_results(eager, compiled, 3.5e-4, lambda: truth).result == verdict


@pytest.mark.parametrize(
    ("eager_error", "compiled", "verdict", "noisy"),
    [
        (1.3, lambda truth: truth + 1.3 * torch.randn_like(truth), "equal", 1),
        (0.3, torch.neg, "differs", 0),
        (0.1, lambda truth: truth + 0.2 * torch.randn_like(truth), "equal", 0),
        (0.1, lambda truth: truth * (torch.arange(4096) > 256), "differs", 0),  # its norm alone could be rounding
    ],
)
def test_a_tensor_that_rounding_alone_decides_is_counted_as_not_compared(eager_error, compiled, verdict, noisy):
    torch.manual_seed(0)
    truth = torch.randn(4096).double()
    expected = {"output 0": torch.ones(8), "the gradient of x": truth + eager_error * torch.randn(4096)}
    actual = {"output 0": torch.ones(8), "the gradient of x": compiled(truth)}
    truths = {"output 0": torch.ones(8), "the gradient of x": truth}
    found = accuracy.compare_results(expected, actual, 0.03, lambda: truths)
    assert (found.result, found.noisy_tensors, found.tensors) == (verdict, noisy, 2)
    assert (found.reason or "").startswith("rounding alone moves the gradient of x by 13") == bool(noisy)
