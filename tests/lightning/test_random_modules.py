"""Random small modules, trained with the callback and without: the same results, and counts that are torch's own.

``make test-random`` tries 200 modules; ``COMPILE_CALLBACKS_EXAMPLES`` sets their number.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch._dynamo import utils

from compile_callbacks import CompileReport, InductorCompile, InductorConfig
from compile_callbacks.testing import assert_same_training
from tests.support.models import QUIET, trainer
from tests.support.random_modules import KINDS, Model, Spec, batches

EXAMPLES = os.environ.get("COMPILE_CALLBACKS_EXAMPLES")
SPECS = st.builds(
    Spec,
    blocks=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2).map(tuple),
    target=st.sampled_from(["net", "net.encode", "forward"]),
    inputs=st.sampled_from(["one", "same", "view"]),
    writes=st.booleans(),
    output=st.sampled_from(["tensor", "dict", "dataclass"]),
    hooks=st.frozensets(st.sampled_from(["pre", "post", "count", "gradient"]), max_size=2),
    shared=st.booleans(),
    ragged=st.booleans(),
    validates=st.booleans(),
    accumulate=st.sampled_from([1, 2]),
    twice=st.booleans(),
    event=st.sampled_from(["", "", "replaced", "raises"]),
    mode=st.sampled_from(["lite", "default"] if EXAMPLES else ["lite"]),
    dynamic=st.sampled_from([None, False, True]),
)


def reset_torch() -> None:
    torch._dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    utils.graph_break_reasons.clear()  # torch 2.11 does not in its reset


def settings_of(spec: Spec) -> dict[str, Any]:
    """Of the Trainer."""
    limits = {"limit_val_batches": int(spec.validates), "num_sanity_val_steps": 0}
    epochs = {"max_epochs": 2} if spec.event == "replaced" else {}
    return {"accumulate_grad_batches": spec.accumulate, **limits, **epochs}


def data_of(spec: Spec) -> pl.LightningDataModule:
    data = pl.LightningDataModule()
    data.train_dataloader = lambda: batches(6, ragged=spec.ragged)
    data.val_dataloader = lambda: batches(1, seed=1)
    return data


def fit(spec: Spec, *callbacks: pl.Callback, by_hand: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train for six steps, perhaps with `torch.compile`; return what the run computed, counted and drew."""
    reset_torch()
    pl.seed_everything(1, verbose=False)
    model = Model(spec)
    if by_hand is not None:
        model.compile_by_hand(**by_hand)
    trainer(*callbacks, **settings_of(spec)).fit(model, data_of(spec))
    return model.state()


def assert_counts_are_torchs(report: CompileReport) -> None:
    train, infer = report.train, report.infer
    assert train.graphs + infer.graphs == utils.counters["stats"]["unique_graphs"] > 0
    traces = [metrics for metrics in utils.get_compilation_metrics() if metrics.recompile_reason]
    recompiles = [metrics for metrics in traces if "recompile limit exceeded" not in (metrics.fail_reason or "")]
    assert train.recompiles + infer.recompiles == len(recompiles)
    # Torch counts a break again for each frame that is traced through it, and for each recompile.
    breaks = {(found.reason, found.user_stack[-1].lineno) for found in utils.graph_break_reasons}
    for phase in (train, infer):
        found = {(e["reason"], e["line"], e["target"]) for e in phase.diagnostics.events if e["kind"] == "graph_break"}
        assert len(found) == phase.graph_breaks
        assert phase.graphs == 0 or {(reason, line) for reason, line, _ in found} == breaks


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # torch 2.11 of random.random
@pytest.mark.filterwarnings(
    "ignore:target .* reached torch's recompile limit"
)  # torch 2.11 counts both phases together
# torch runs a frame whose loop contains a graph break eagerly, and a warning tells that few weights are compiled.
@pytest.mark.filterwarnings("ignore:the compiled graphs of target .* use . of its")
# In torch 2.15, a lookup in the cache of graphs can raise ``KeyError: '___stack0'``, by hand too: with dynamic shapes,
# the guards of a cached graph name the inputs of another frame.
@pytest.mark.filterwarnings("ignore:.*training_step.*returned.*None")
@torch._inductor.config.patch(fx_graph_cache=False)
@torch._functorch.config.patch(enable_autograd_cache=False)
@settings(
    max_examples=int(EXAMPLES or 22),  # next to the five below
    deadline=None,
    derandomize=EXAMPLES is None,  # new examples find new faults of torch too, which must not fail an unrelated change
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@example(Spec(blocks=("dropout", "uncompiled_numpy"), hooks=frozenset({"count"})), True, 0)
@example(Spec(blocks=("python_random", "noise"), target="net.encode", output="dataclass", validates=True), False, 2)
@example(Spec(blocks=("plain",), inputs="view", writes=True, mode="lite"), False, 0)
@example(Spec(blocks=("batch_norm", "plain"), twice=True, event="replaced", mode="lite"), False, 2)
@example(Spec(blocks=("batch_norm", "python_counter"), event="raises", validates=True, mode="lite"), False, 0)
@given(SPECS, st.booleans(), st.sampled_from([0, 2]))
def test_a_random_module_trains_as_it_does_without_the_callback(spec, by_hand, baseline_steps):
    """The other run is by `torch.compile`, or eager; eager's random numbers are drawn by ``fallback_random``."""
    by_hand = by_hand and not spec.event  # torch.compile does not compile the new network, or skips the code
    # By hand, the smaller last batch is compiled. Here it runs eagerly, with the numbers of eager.
    same_numbers = spec.draws_torch and (spec.ragged or not by_hand)
    options = {"fallback_random": True} if same_numbers else {}
    given = {"dynamic": spec.dynamic, "options": {**torch._inductor.list_mode_options(spec.mode), **options}}
    mode = InductorConfig(**given)
    callback = InductorCompile(
        mode,
        mode,
        targets=spec.targets,
        baseline_steps=0 if by_hand else baseline_steps,
        on_error="raise",
        verify="raise",
    )
    if not by_hand:
        reset_torch()
        kwargs = {**QUIET, **settings_of(spec)}
        runs = functools.partial(Model, spec), functools.partial(data_of, spec)
        assert_same_training(*runs, steps=-1, callback=callback, trainer_kwargs=kwargs, tolerance=1e-4)
        assert_counts_are_torchs(callback.report)
        return
    ours = fit(spec, callback)
    assert_counts_are_torchs(callback.report)
    with warnings.catch_warnings(action="ignore"):  # torch's own
        theirs = fit(spec, by_hand=given)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
