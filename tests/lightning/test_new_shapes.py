"""`new_shapes`: what an input shape does that was not seen before."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from compile_callbacks import CompileError, InductorCompile
from compile_callbacks.runtime.target_settings import RETURNING_SHAPE_CALLS
from tests.support.models import FEATURES, seeded, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")


def ragged(rows=11):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, FEATURES, generator=generator)
    return DataLoader(TensorDataset(x, torch.arange(rows) % 3), 4)


def fit(*callbacks, epochs=2):
    module = seeded()
    trainer(*callbacks, max_epochs=epochs).fit(module, ragged(), ragged(6))
    return module


@pytest.mark.parametrize(("new_shapes", "graphs"), [("recompile", 2), ("eager", 1)])
def test_a_ragged_last_batch(new_shapes, graphs):
    callback = InductorCompile({"dynamic": False}, {"dynamic": False}, new_shapes=new_shapes, baseline_steps=0)
    torch.testing.assert_close(fit(callback).losses, fit().losses, rtol=1e-4, atol=1e-6)
    assert (callback.report.train.graphs, callback.report.infer.graphs) == (graphs, graphs)
    assert callback.report.train.recompiles == graphs - 1


def test_a_shape_that_keeps_coming_back_is_compiled_after_all():
    callback = InductorCompile({"dynamic": False}, None, new_shapes="eager", baseline_steps=0)
    fit(callback, epochs=RETURNING_SHAPE_CALLS - 1)
    assert callback.report.train.graphs == 1
    callback = InductorCompile({"dynamic": False}, None, new_shapes="eager", baseline_steps=0)
    fit(callback, epochs=RETURNING_SHAPE_CALLS)
    assert callback.report.train.graphs == 2


def test_a_dynamic_graph_takes_new_shapes_as_they_come():
    callback = InductorCompile({"dynamic": True}, {"dynamic": True}, new_shapes="raise", baseline_steps=0)
    fit(callback)
    assert (callback.report.train.graphs, callback.report.infer.graphs) == (1, 1)


def test_raise_names_target_phase_and_shapes():
    callback = InductorCompile({"dynamic": False}, None, new_shapes="raise", baseline_steps=0)
    with pytest.raises(CompileError, match=r"'net' was called in the train phase .*\(3, 8\).*new_shapes='raise'"):
        fit(callback)
