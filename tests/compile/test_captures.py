"""Graphs that torch captures wrongly, values that are grossly wrong, and comparisons that fail within a transform."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vmap
from torch.testing._internal.two_tensor import TwoTensor

from compile_callbacks import CompileError, CompileWarning, InductorBackend, report_of
from compile_callbacks._torch import modes
from tests.support.against_eager import assert_same_gradients
from tests.support.models import FEATURES, mlp
from tests.support.wrong_passes import Doubling, WrongBackward

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

CAPTURES_WRONGLY = torch.__version__ < "2.13"


# ---------------------------------------------------------------------------------------------- autograd functions


def multiply(x, w, how):
    product = torch.zeros_like(x)
    if how == "add in place":
        product += x * w
    elif how == "out":
        torch.mul(x, w, out=product)
    elif how == "relu in place":
        return torch.nn.functional.relu(product.add(x * w), True)
    elif how == "index":
        product[:] = x * w
    else:
        product = x * w
    return product


def function_that(how):
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return multiply(x, w, how)

        @staticmethod
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            return gradient * w, (gradient * x).sum(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(FEATURES, FEATURES), nn.Parameter(torch.ones(FEATURES))

        def forward(self, x):
            return Multiply.apply(self.layer(x), self.scale)

    return Net()


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.mul_(3))
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class MarksDirty(nn.Module):
    """Does not use the result of the function, which is the changed input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        y = self.layer(x)
        Triple.apply(y)
        return y * y


WRONG = {how: lambda how=how: function_that(how) for how in ("add in place", "out", "relu in place")} | {
    "mark_dirty": MarksDirty
}
RIGHT = {how: lambda how=how: function_that(how) for how in ("index", "new tensor")}


@pytest.mark.parametrize("name", WRONG)
def test_autograd_function_that_torch_captures_wrongly_runs_eagerly(compiled, name):
    eager = WRONG[name]()
    module = compiled(copy.deepcopy(eager))
    x = torch.randn(5, FEATURES)
    if CAPTURES_WRONGLY:
        with pytest.warns(CompileWarning, match=r"computes wrong gradients if it captures a torch.autograd.Function"):
            assert_same_gradients(module, eager, x)
    assert_same_gradients(module, eager, x)
    train = report_of(module).train
    assert (train.graphs > 0, train.fallbacks) == ((False, 1) if CAPTURES_WRONGLY else (True, 0))


@pytest.mark.parametrize("name", RIGHT)
def test_autograd_function_that_torch_captures_rightly_is_compiled(compiled, name):
    eager = RIGHT[name]()
    module = compiled(copy.deepcopy(eager), verify="raise")
    assert_same_gradients(module, eager, torch.randn(5, FEATURES))
    assert (report_of(module).train.graphs, report_of(module).train.fallbacks) == (1, 0)


# ---------------------------------------------------------------------------------------------- wrong values


@pytest.mark.parametrize(
    "graph_pass", [Doubling(torch.ops.aten.relu.default), WrongBackward()], ids=["output", "gradient"]
)
@pytest.mark.parametrize("phase", ["train", "infer"])
def test_grossly_wrong_values_are_never_handed_out(compiled, graph_pass, phase):
    if phase == "infer" and isinstance(graph_pass, WrongBackward):
        pytest.skip("inference has no gradients")
    eager = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU())
    module = compiled(copy.deepcopy(eager), passes=[graph_pass])
    x = torch.randn(5, FEATURES)
    with torch.set_grad_enabled(phase == "train"):
        with pytest.warns(CompileWarning, match="the graph runs eagerly from here on, because rounding errors"):
            first = module(x)
        for output in (first, module(x)):
            torch.testing.assert_close(output, eager(x))
    if phase == "train":
        assert_same_gradients(module, eager, x)
    report = report_of(module).phase(phase)
    assert (report.verified, report.fallbacks) == ("differs 1", 1)


# ---------------------------------------------------------------------------------------------- transforms


class Derivatives(nn.Module):
    """Differentiates its network with respect to the input, as physics-informed networks do."""

    def __init__(self, derivative):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.derivative = derivative

    def forward(self, points):
        return self.derivative(lambda point: self.net(point)[0], points)


def laplacian(function, points):
    return vmap(hessian(function))(points).diagonal(dim1=1, dim2=2).sum(1)


def second_derivative(function, points):
    return vmap(lambda point: jvp(grad(function), (point,), (torch.ones_like(point),))[1])(points)


def jacobian(function, points):
    return vmap(jacfwd(function))(points)


@pytest.mark.filterwarnings("ignore:target 'forward' runs eagerly")  # the Hessian on torch 2.11
@pytest.mark.parametrize("derivative", [laplacian, second_derivative, jacobian])
def test_derivatives_within_a_target_are_compared_and_leave_no_transform_active(compiled, derivative):
    eager = Derivatives(derivative)
    module = compiled(copy.deepcopy(eager))
    points = torch.randn(5, 2)
    torch.testing.assert_close(module(points), eager(points))
    module(points).square().sum().backward()
    train = report_of(module).train
    assert train.verified == "equal 1" or train.fallbacks == 1
    assert torch._C._functorch.peek_interpreter_stack() is None


@pytest.mark.parametrize("levels", [0, 1])
def test_modes_are_restored_after_an_error(levels):
    def enter():
        torch._C._functorch._vmap_increment_nesting(2, "error")
        torch._C._functorch._grad_increment_nesting()
        torch._C._functorch._jvp_increment_nesting()
        if not levels:
            torch._C._enter_dual_level()
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.autocast_increment_nesting()
        raise KeyError("between two operators")

    def check(_):
        with pytest.raises(KeyError), modes.restored_after_error():
            enter()
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == levels
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
        return _

    if levels:
        with forward_ad.dual_level():
            vmap(check)(torch.ones(2))
    else:
        check(None)
    jvp(torch.sin, (torch.ones(2),), (torch.ones(2),))  # fails if a level of forward AD is active


# ---------------------------------------------------------------------------------------------- autocast


def test_frozen_backend_built_under_autocast_is_compared_and_returns_real_tensors():
    torch.manual_seed(0)
    net = mlp().eval()
    x = torch.randn(4, FEATURES)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
        backend = InductorBackend({"options": {"freezing": True}}, verify="raise").build(net, x)
        outputs = [net(x), backend.infer(x), backend.infer(torch.randn(6, FEATURES)), net(x)]
        assert {type(output) for output in outputs} == {torch.Tensor}
        torch.testing.assert_close(outputs[:2], [expected, expected], rtol=0.02, atol=0.02)
        assert "not compared" not in backend.report.infer.verified
        assert backend.report.infer.verified.startswith("equal")


class WritesSubclass(nn.Module):
    """Writes a tensor subclass, of which a comparison makes no copy."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", TwoTensor(torch.ones(4), torch.ones(4)))

    def forward(self, x):
        self.state.add_(1)
        return x * 2


@torch.no_grad()
def test_verify_raise_raises_if_a_comparison_fails_with_an_error(compiled):
    with pytest.raises(CompileError, match=r"could not be compared with eager in the infer phase: error: RuntimeError"):
        compiled(WritesSubclass(), verify="raise")(torch.randn(4))
    module = compiled(WritesSubclass())
    module(torch.randn(4))
    assert report_of(module).infer.verified == "not compared 1 (error)"
