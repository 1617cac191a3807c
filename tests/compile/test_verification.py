"""`verify`: each captured graph is compared with its eager execution at its first call."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives
from torch import nn

from compile_callbacks import CompileError, CompileWarning, InductorBackend, report_of
from tests.cases.zoo import Calls, Parts, dropout, in_checkpoint
from tests.support.models import FEATURES, Wrapper
from tests.support.passes import Doubling, WrongForward, WrongRows

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

RANDOM = {"options": {"fallback_random": True}}


def plain():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 3))


def train_step(module, *args):
    output = module(*args)
    output.float().square().mean().backward()
    return output


def inputs(batch=8):
    return torch.randn(batch, FEATURES)


def verified(module, phase="train"):
    return report_of(module).phase(phase).verified


# ---------------------------------------------------------------------------------------------- finding differences


@pytest.mark.parametrize(("phase", "tolerance"), [("train", r"\(tolerance 0.00035\)"), ("infer", "")])
def test_verification_finds_a_wrong_graph_and_names_target_output_phase_and_tolerance(compiled, phase, tolerance):
    module = compiled(Parts(), targets=["encode"], passes=[WrongForward(phase)])
    message = rf"target 'encode' differs from eager in the {phase} phase: output 0 has a relative error of .* "
    with torch.set_grad_enabled(phase == "train"), pytest.warns(CompileWarning, match=message + tolerance):
        module.encode(inputs())
    report = report_of(module).phase(phase)
    assert report.verified == "differs 1"
    assert report.diagnostics.max_abs_error > 0.01


def test_verification_finds_gradients_of_the_wrong_sign_and_names_the_parameter(compiled):
    module = compiled(plain(), passes=[WrongRows("backward", factor=-1)])
    with pytest.warns(CompileWarning, match=r"the gradient of l_\w+ has a relative error of 2 \(tol"):
        train_step(module, inputs())
    assert report_of(module).train.diagnostics.max_abs_error < 1e-5


def classes():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10))


class Indices(nn.Linear):
    def __init__(self):
        super().__init__(16, 10)

    def forward(self, x):
        output = super().forward(x)
        return output, output.argmax(-1)


WRONG = {
    "one class is not trained": (
        classes,
        (64, 16),
        WrongRows("backward", (10, 32), 0, 1),
        r"the gradient of l_\w+_2_parameters_weight_ has a relative error of 0\.[234]",
    ),
    "the last rows": (
        classes,
        (4096, 16),
        WrongRows("forward", (4096, 10), 4080, 4096),
        r"output 0 has a relative error of 0\.0[4-8]",
    ),
    "NaN without a float64 kernel": (
        lambda: nn.Sequential(nn.Linear(16, 10), Noise(nn.Identity())),
        (64, 16),
        WrongRows("backward", (10, 16), 0, 1, math.nan),
        r"gradient of l_\w+_0_parameters_weight_ has a relative error of inf .* no float64 reference",
    ),
    "integers": (Indices, (64, 16), Doubling(torch.ops.aten.argmax.default, factor=3), "output 1 differs in "),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_few_elements_in_low_precision_are_found_in_each_call(compiled, name):
    make, shape, wrong, message = WRONG[name]
    module = compiled(make(), passes=[wrong], verify="raise", train_mode=RANDOM)
    for _ in range(2):  # the graph that was not accepted is compared again
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(CompileError, match=message):
            module(torch.randn(shape))


@pytest.mark.usefixtures("recompiles_at_once")
def test_each_recompiled_graph_is_compared_and_one_target_is_warned_about_once(compiled):
    module = compiled(plain(), passes=[WrongForward("train", 5, 4)], train_mode={"dynamic": False})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (8, 5, 4):
            train_step(module, inputs(size))
    assert verified(module) == "differs 2, equal 1"
    assert report_of(module).train.recompiles == 2
    assert len([one for one in caught if issubclass(one.category, CompileWarning)]) == 1


class Casts(nn.Module):
    """Casts between dtypes, as normalizations in float32 within a model in bfloat16 do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, 3).bfloat16()
        self.net = nn.ReLU()

    def forward(self, x):
        hidden = self.net(self.first(x.half().float()))
        normed = hidden.float() * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + 1e-6)
        return self.second(normed.to(torch.bfloat16)) + torch.zeros(3)


class WithStatistics(Wrapper):
    """Runs `nn.BatchNorm1d`, and changes its input and a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        x.mul_(2)
        self.calls += 1
        return self.net(x)


@pytest.mark.parametrize("phase", ["train", "infer"])
def test_verify_eager_returns_the_results_of_eager_in_the_same_call(compiled, phase):
    expected = WithStatistics()
    module = compiled(copy.deepcopy(expected), passes=[WrongForward(phase)], verify="eager")
    exact = {"rtol": 0, "atol": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x = inputs()
            own = x.clone()
            with torch.set_grad_enabled(phase == "train"):
                expected_output, output = expected(x), module(own)
            torch.testing.assert_close((output, own), (expected_output, x), **exact)
            if phase == "train":
                output.sum().backward()
                expected_output.sum().backward()
    (warning,) = caught
    assert "it runs eagerly from here on (verify='eager')" in str(warning.message)
    gradients = [[parameter.grad for parameter in net.parameters()] for net in (module, expected)]
    torch.testing.assert_close(*gradients, **exact)
    torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()), **exact)
    assert report_of(module).phase(phase).fallbacks == 1


# ---------------------------------------------------------------------------------------------- no false differences


def normed():
    """Both biases before batch norms have gradients that consist of rounding errors."""
    layers = [nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 3))


class Residual(Wrapper):
    def forward(self, x):
        return x + self.net(x)


def residual():
    layers = ((nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6))
    return nn.Sequential(*(Residual(nn.Sequential(*layer)) for layer in layers), nn.AdaptiveAvgPool2d(1))


class Uninitialized(Wrapper):
    def forward(self, x):
        out = torch.empty_like(x)
        torch._dynamo.graph_break()  # the first graph returns what nothing has written yet
        return self.net(out.copy_(x))


SOUND = {
    "casts": (Casts, inputs),
    "nan": (plain, lambda: inputs().index_fill(0, torch.tensor([0]), math.nan)),
    "uninitialized": (Uninitialized, inputs),
    "dropout in an activation checkpoint": (lambda: Calls(dropout(), in_checkpoint), inputs),
    "jagged": (plain, lambda: torch.nested.nested_tensor_from_jagged(inputs(5), torch.tensor([0, 2, 5]))),
}
ROUNDS = {
    "residual in bfloat16": (lambda: residual().bfloat16(), lambda: torch.randn(4, 8, 8, 8).bfloat16()),
    "rounding": (normed, lambda: inputs(4096)),
    "rounding around a large mean": (normed, lambda: 100 + inputs(4096)),
}


@pytest.mark.parametrize("name", [*SOUND, *(pytest.param(name, marks=pytest.mark.codegen) for name in ROUNDS)])
def test_sound_modules_are_equal(compiled, name):
    make, x = (SOUND | ROUNDS)[name]
    module = compiled(make(), train_mode=RANDOM, verify="raise")
    output = module(x())
    (output.values() if name == "jagged" else output).float().square().mean().backward()
    assert verified(module) == {"jagged": "outputs only 1", "uninitialized": "equal 2"}.get(name, "equal 1")
    assert all(buffer == 1 for name, buffer in module.named_buffers() if name.endswith("num_batches_tracked"))


# ---------------------------------------------------------------------------------------------- what is not compared


def test_dropout_is_not_compared_in_training_and_compared_in_inference(compiled):
    module = compiled(dropout())
    x = inputs()
    train_step(module, x)
    with torch.no_grad():
        module.eval()(x)
    report = report_of(module)
    assert (verified(module), verified(module, "infer")) == ("not compared 1 (dropout)", "equal 1")
    assert "not compared 1 (dropout)" in str(report)
    assert [e["why_not"] for e in report.train.diagnostics.events if e["kind"] == "verify"] == ["dropout"]
    fix = 'train_mode={"options": {"fallback_random": True}} makes it comparable, but slower'
    assert str(report).endswith(f"next: train has a graph that was not compared with eager (dropout): {fix}")


class Noise(Wrapper):
    def forward(self, x):
        return self.net(x + torch.randn_like(x))


def test_comparing_draws_no_random_numbers(compiled):
    after = []
    for module in (compiled(Noise()), Noise()):
        if after:
            module.compile()
        torch.compiler.reset()
        torch.manual_seed(1)
        train_step(module, inputs())
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


class ReturnsJagged(Wrapper):
    def forward(self, x, lengths):
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
        return torch.nested.nested_tensor_from_jagged(self.net(x).relu(), offsets)


@pytest.mark.parametrize("phase", ["train", "infer"])
def test_wrong_values_of_jagged_outputs_are_found(compiled, phase):
    module = compiled(ReturnsJagged(plain()), passes=[WrongForward(phase)], verify="eager")
    with torch.set_grad_enabled(phase == "train"), pytest.warns(CompileWarning, match="output 0 has a relative error"):
        output = module(inputs(5), torch.tensor([2, 2, 1]))
    assert output.offsets().tolist() == [0, 2, 4, 5]  # the result of the eager run


class SumsOverProcesses(Wrapper):
    def forward(self, x):
        output = self.net(x)
        return output + functional_collectives.all_reduce(output.detach(), "sum", torch.distributed.group.WORLD)


def test_a_graph_that_communicates_is_not_compared(process_group, compiled):
    module, x = compiled(SumsOverProcesses(), verify="raise"), inputs()
    output = module(x)
    torch.testing.assert_close(output, 2 * module.net(x))
    output.sum().backward()
    assert verified(module) == "not compared 1 (collective)"


@pytest.mark.filterwarnings("ignore:freezing has no effect on steps that change the weights")
def test_comparing_writes_no_buffer_that_is_a_constant_of_a_frozen_graph():
    eager, x = WithStatistics().eval(), inputs()
    backend = InductorBackend({"options": {"freezing": True}}, verify="raise").build(copy.deepcopy(eager), x.clone())
    with torch.no_grad():
        for _ in range(3):  # the first call writes a buffer, so that the next one compiles again
            torch.testing.assert_close(backend.infer(x.clone()), eager(x.clone()))
    backend.deactivate()
    torch.testing.assert_close(backend.to_dict()["state_dict"], dict(eager.state_dict()))
