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
    allowed = accuracy.tolerance([torch.zeros(1)])
    weight, noise = torch.ones(16), 2**-14 * torch.ones(16)
    gradients = {
        "eager": {"weight": weight, "bias": true * noise},
        "compiled": {"weight": weight, "bias": error * noise},
        "float64": {"weight": weight.double(), "bias": true * noise.double()},
    }

    def rerun(which, names):
        return accuracy.Results({}, gradients={name: gradients[which][name] for name in names})

    eager, compiled = (
        accuracy.Results({}, sketches=accuracy.sketches(gradients[which])) for which in ("eager", "compiled")
    )
    assert accuracy.compare_results(eager, compiled, allowed, rerun).verdict == verdict
