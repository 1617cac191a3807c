"""A failure of the compiler costs speed and nothing else. An error of the user's own code is raised unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_callbacks import CompileError, CompileWarning, InductorCompile
from tests.support.against_eager import assert_fits_as_eager
from tests.support.faults import FAULTS, MATRIX, PLACES, RAGGED, RAGGED_BATCHES, Fault, Net, run_of
from tests.support.models import Classifier, fit

pytestmark = pytest.mark.usefixtures("no_codegen", "recompiles_at_once")


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


# ------------------------------------------------------------------------------------------ errors of the user's code


class UserError(Exception):
    """What only the user's code raises."""


raised: list[UserError] = []


def check(x: torch.Tensor) -> None:
    """Raise an error for a ragged batch, and keep it."""
    if x.shape[0] == RAGGED:
        raised.append(UserError())
        raise raised[-1]


@torch.library.custom_op("compile_callbacks_tests::user_kernel", mutates_args=())
def user_kernel(x: torch.Tensor) -> torch.Tensor:
    check(x)
    return x.clone()


@torch.library.custom_op("compile_callbacks_tests::user_kernel_backward", mutates_args=())
def user_kernel_backward(gradient: torch.Tensor) -> torch.Tensor:
    check(gradient)
    return gradient.clone()


@torch.library.custom_op("compile_callbacks_tests::sound_kernel", mutates_args=())
def sound_kernel(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


for kernel in (user_kernel, user_kernel_backward, sound_kernel):
    kernel.register_fake(torch.empty_like)
user_kernel.register_autograd(lambda ctx, gradient: gradient)
sound_kernel.register_autograd(lambda ctx, gradient: user_kernel_backward(gradient))


class UserFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        check(gradient)
        return gradient


def in_forward(x: torch.Tensor) -> torch.Tensor:
    check(x)
    return x


class Guilty(Net):
    def __init__(self, does: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(PLACES[0])
        self.does = does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.does(self.first(x)))


class GuiltyStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        check(batch[0])
        return loss


@pytest.mark.parametrize(
    ("make", "on_error"),
    [
        (lambda: Classifier(Guilty(in_forward)), "eager"),
        (lambda: Classifier(Guilty(user_kernel)), "raise"),
        (lambda: Classifier(Guilty(sound_kernel)), "eager"),
        pytest.param(
            lambda: Classifier(Guilty(UserFunction.apply)),
            "raise",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.13",
                reason="torch < 2.13 fails while it traces that backward, which is a failure of the compiler",
            ),
        ),
        (lambda: GuiltyStep(Net(PLACES[0])), "eager"),
    ],
    ids=["forward", "kernel", "backward kernel", "backward of a function", "training step"],
)
def test_an_error_of_the_users_comes_through_as_it_is(make, on_error):
    module = make()
    callback = InductorCompile(targets=["net"], baseline_steps=0, on_error=on_error)
    with pytest.raises(UserError) as caught:
        fit(callback, make=lambda: module, **RAGGED_BATCHES)
    assert caught.value in raised
    assert caught.traceback[-1].path.name == "test_faults.py"  # the file that raised it
    assert caught.traceback[-1].name == "check"
    assert (callback.report.train.fallbacks, callback.report.infer.fallbacks) == (0, 0)
    assert "_compiled_call_impl" not in vars(module.net)


class WrongShape(Classifier):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0][:, :3]).sum()


@pytest.mark.parametrize("on_error", ["eager", "raise"])
def test_an_error_that_dynamo_meets_first_is_the_users_all_the_same(on_error):
    callback = InductorCompile(on_error=on_error, baseline_steps=0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        fit(callback, make=WrongShape, train=2)
    assert not isinstance(caught.value, CompileError)
    assert callback.report.train.fallbacks == 0
    assert "training_step" in [entry.name for entry in caught.traceback]
