"""The fault matrix: each failure of the compiler, wherever and whenever it strikes, costs speed and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.symbolic_convert
from torch import nn

from compile_callbacks import CompileError, CompileWarning, InductorCompile, InductorConfig
from tests.support.against_eager import assert_fits_as_eager
from tests.support.faults import FAULTS, MATRIX, PLACES, Fault, Net, run_of
from tests.support.models import batches_of, fit

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.mark.parametrize(("fault", "place"), MATRIX)
def test_a_failure_costs_speed_and_nothing_else(fault, place):
    callback = fault.callback(place)
    with pytest.warns(CompileWarning) as caught, fault.strike(place):
        assert_fits_as_eager(callback, **run_of(lambda: fault.net(place)))

    said = [str(w.message) for w in caught if issubclass(w.category, CompileWarning)]
    assert len(said) == 1
    if fault.skipped:
        assert said[0].startswith(f"graph pass 'BrokenPass' at post_grad_post in the {place.phase} phase raised")
    else:
        assert said[0].startswith(f"target 'net' runs eagerly in the {place.phase} phase")
        assert "explain CC301" in said[0]
    hit = callback.report.phase(place.phase)
    spared = callback.report.phase("infer" if place.phase == "train" else "train")
    failures = 2 if place.shape == "first" else 1  # the compiler is tried once for each shape, in both epochs
    assert (hit.fallbacks, hit.diagnostics.skipped_passes) == ((0, failures) if fault.skipped else (failures, 0))
    assert (spared.fallbacks, spared.diagnostics.skipped_passes) == (0, 0)
    assert hit.graphs == (2 if fault.skipped else 2 - failures)
    reasons = [event["reason"] for event in hit.diagnostics.events if event["kind"] in ("fallback", "pass_skipped")]
    assert len(reasons) == failures
    for reason in reasons:
        assert any(cause in reason for cause in fault.cause.split("|"))
    assert " ".join(reasons[0].split())[:100] in said[0]


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("fault", "place"),
    [*zip(FAULTS, [PLACES[i] for i in (2, 4, 1)], strict=True)],
    ids=lambda value: value.name if isinstance(value, Fault) else str(value),
)
def test_raise_names_target_and_phase_of_a_failure(fault, place):
    with (
        fault.strike(place),
        pytest.raises(CompileError, match=f"target 'net' for the {place.phase} phase failed") as caught,
    ):
        fit(fault.callback(place, on_error="raise"), **run_of(lambda: fault.net(place)))
    assert caught.value.__cause__ is not None
    assert any(cause in str(caught.value) for cause in fault.cause.split("|"))
    assert ("graph pass 'BrokenPass' at post_grad_post in the infer phase" in str(caught.value)) == fault.skipped


# ------------------------------------------------------------------------------------------ no compiler at all

WITHOUT_COMPILER = """
import json, sys, warnings
from tests.support.models import fit
from compile_callbacks import CompileWarning, InductorCompile

def run(*callbacks):
    return fit(*callbacks, accelerator=sys.argv[1], max_epochs=2).losses

callback = InductorCompile(targets=["net"], baseline_steps=0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    losses = run(callback)
said = [str(w.message) for w in caught if issubclass(w.category, CompileWarning)]
report = callback.report
events = report.infer.diagnostics.events
print(json.dumps([losses, run(), said, report.train.fallbacks, report.infer.fallbacks, events]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_machine_without_a_compiler_trains_eagerly(accelerator, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "PATH")}
    environment |= {
        "PATH": "",
        "CC": str(tmp_path / "cc"),
        "CXX": str(tmp_path / "g++"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER, accelerator],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses, eager, said, train, infer, events = json.loads(done.stdout.splitlines()[-1])
    assert losses == eager
    assert len(said) == 2  # one a phase
    assert all("compiler" in text and "explain CC301" in text for text in said)
    assert (train, infer) == (1, 1)
    (reason,) = [event["reason"] for event in events if event["kind"] == "fallback"]
    assert "ompiler" in reason or environment["CC"] in reason  # Triton's reason names the file alone


# ------------------------------------------------------------------------------------------ behind a graph break


class Broken(Net):
    """A graph break between a batch norm and dropout, and the rest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.first(x), 0.5, self.training)
        torch._dynamo.graph_break()
        return self.last(x)


@contextlib.contextmanager
def failing_behind_the_break() -> Iterator[None]:
    translator = torch._dynamo.symbolic_convert.InstructionTranslator
    real = translator.run

    def run(self: Any) -> Any:
        if self.f_code.co_name.startswith("torch_dynamo_resume"):
            raise MemoryError("no memory")
        return real(self)

    with mock.patch.object(translator, "run", run):
        yield


@pytest.mark.all_versions
def test_a_failure_behind_a_graph_break_does_not_run_what_ran_before_it_again():
    callback = InductorCompile(
        InductorConfig(options={"fallback_random": True}), None, targets=["net"], baseline_steps=0
    )
    with pytest.warns(CompileWarning, match="'net' .*train phase.*MemoryError"), failing_behind_the_break():
        assert_fits_as_eager(callback, **run_of(lambda: Broken(PLACES[0])))
    assert callback.report.train.fallbacks >= 1


# ------------------------------------------------------------------------------------------ too many recompiles


@pytest.mark.all_versions
def test_shapes_beyond_the_recompile_limit_are_reported_as_eager():
    callback = InductorCompile(InductorConfig(dynamic=False), None, targets=["net"], baseline_steps=0)
    with (
        torch._dynamo.config.patch(recompile_limit=3),
        pytest.warns(CompileWarning, match="'net'.*recompile.limit") as caught,
    ):
        assert_fits_as_eager(callback, train=batches_of(2, 3, 4, 5, 6, 7), validation=None)
    assert len([w for w in caught if issubclass(w.category, CompileWarning)]) == 1
    assert callback.report.train.graphs == 3
    assert callback.report.train.fallbacks >= 1
