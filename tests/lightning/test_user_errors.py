"""Errors of the user's own code come through as they are: never swallowed, never compiled away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile_callbacks import CompileError, InductorCompile
from tests.support.faults import PLACES, RAGGED, RAGGED_BATCHES, Net
from tests.support.models import Classifier, fit

pytestmark = pytest.mark.usefixtures("no_codegen")


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
    assert caught.traceback[-1].path.name == "test_user_errors.py"  # where it was raised
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
