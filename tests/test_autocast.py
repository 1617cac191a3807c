"""Autocast in the settings: what it computes in, what comes back, and who wins under a Trainer."""

from __future__ import annotations

import json

import pytest
import torch
from against_eager import assert_same_values
from models import FEATURES, Classifier, loader, mlp, seeded, trainer
from torch import nn

from compile_callbacks import InductorCompile, InductorConfig, compile_phases, report_of, restore

BF16 = InductorConfig(autocast_enabled=True, autocast_dtype=torch.bfloat16)
OFF = InductorConfig(autocast_enabled=False)


def eager_under_autocast(module, x, dtype=torch.bfloat16):
    with torch.autocast("cpu", dtype):
        return module(x)


def test_outputs_are_those_of_autocast_in_the_dtype_without_it():
    torch.manual_seed(0)
    module, x = mlp().eval(), torch.randn(4, FEATURES)
    with torch.no_grad():
        expected = eager_under_autocast(module, x)
        actual = compile_phases(module, infer_mode=BF16)(x)
    assert expected.dtype == torch.bfloat16
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected.float(), rtol=2e-2, atol=2e-2)
    assert torch.equal(actual, actual.bfloat16().float())  # computed in bfloat16
    assert report_of(module).infer.fallbacks == 0
    restore(module)


class ManyOutputs(nn.Module):
    """Outputs of several dtypes, and state that a call changes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().float().mean(0)
        return {"logits": y, "half": y.to(torch.bfloat16), "label": y.argmax(1), "wide": y.double()}


def test_each_output_has_its_own_dtype_and_finding_it_leaves_no_trace():
    torch.manual_seed(0)
    module, x = ManyOutputs(), torch.randn(4, FEATURES)
    plain = {name: value.dtype for name, value in ManyOutputs()(x).items()}
    compile_phases(module, infer_mode=BF16, verify="off")
    rng = torch.get_rng_state()
    with torch.no_grad():
        outputs = module(x)
        module(x)
    assert {name: value.dtype for name, value in outputs.items()} == plain
    assert module.calls == 2
    assert type(module.mean) is torch.Tensor
    assert module.mean.abs().sum() > 0
    assert torch.equal(torch.get_rng_state(), rng)
    restore(module)


class OnValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 4)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


def test_where_values_decide_outputs_have_the_dtype_of_the_weights():
    module = compile_phases(OnValues().double(), infer_mode=BF16, verify="off")
    with torch.no_grad():
        assert module(torch.ones(2, FEATURES, dtype=torch.float64)).dtype == torch.float64
    restore(module)


class Broken(nn.Module):
    """A graph break, which ``fullgraph`` refuses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 4)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.linear(x)


def test_eager_calls_run_under_it_too():
    x = torch.randn(4, FEATURES)
    module = Broken()
    with torch.no_grad():
        expected = eager_under_autocast(module, x).float()
        with pytest.warns(UserWarning, match="fullgraph|graph break"):
            actual = compile_phases(
                module,
                infer_mode=InductorConfig(autocast_enabled=True, autocast_dtype="bfloat16", fullgraph=True),
                verify="off",
            )(x)
    assert report_of(module).infer.fallbacks == 1
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)
    restore(module)


class KeepsDtypes(Classifier):
    """Keeps the dtype that its net computes in, and the one that comes back."""

    def __init__(self):
        super().__init__()
        self.dtypes: list[tuple[bool, torch.dtype]] = []

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.dtypes.append((torch.is_autocast_enabled("cpu"), self.validation_outputs[-1].dtype))


@pytest.mark.parametrize(
    ("precision", "mode", "computed", "comes_back"),
    [
        ("32-true", BF16, torch.bfloat16, torch.float32),
        ("bf16-mixed", OFF, torch.float32, torch.float32),
        ("bf16-mixed", InductorConfig(autocast_enabled=True, autocast_dtype="float16"), torch.float16, torch.bfloat16),
        ("bf16-mixed", "default", torch.bfloat16, torch.bfloat16),
    ],
    ids=["alone", "off under mixed", "another under mixed", "none in the settings"],
)
def test_the_settings_win_over_a_trainers_precision(precision, mode, computed, comes_back):
    callback = InductorCompile(None, mode, targets=["net"], baseline_steps=1, verify="off")
    module = seeded(KeepsDtypes)
    trainer(callback, precision=precision).validate(module, loader(6))
    assert module.dtypes == [(precision == "bf16-mixed", comes_back)] * 6
    exact = [out.float() for out in module.validation_outputs]
    assert all(torch.equal(out, out.to(computed).float()) for out in exact)
    if computed == torch.float32:
        assert not any(torch.equal(out, out.bfloat16().float()) for out in exact)
    assert callback.report.infer.graphs == 1


def test_training_equals_that_of_a_trainer_with_the_precision():
    def fit(precision, *callbacks):
        module = seeded(Classifier)
        trainer(*callbacks, precision=precision).fit(module, loader(6))
        return module

    callback = InductorCompile(BF16, BF16, targets=["net"], baseline_steps=2)
    ours, eager = fit("32-true", callback), fit("bf16-mixed")
    assert_same_values(ours, eager, {"rtol": 2e-2, "atol": 2e-2})
    assert all(parameter.grad.dtype == torch.float32 for parameter in ours.parameters())
    assert callback.report.train.graphs > 0
    assert callback.report.train.fallbacks == 0


# ------------------------------------------------------------------------------------------ the settings


def test_settings_are_data():
    assert BF16.to_dict() == {"autocast_enabled": True, "autocast_dtype": "bfloat16"}
    assert InductorConfig.from_dict(json.loads(json.dumps(BF16.to_dict()))) == BF16
    assert BF16.describe() == "autocast_enabled=True, autocast_dtype=bfloat16"
    half = {"autocast_enabled": True, "autocast_dtype": "float16"}
    others = [{}, {"autocast_enabled": True}, {"autocast_enabled": False}, half]
    assert len({BF16.key(), *(InductorConfig(**other).key() for other in others)}) == 5


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"autocast_enabled": "yes"}, TypeError, "autocast_enabled='yes'"),
        ({"autocast_enabled": 1}, TypeError, "autocast_enabled=1"),
        ({"autocast_dtype": torch.bfloat16}, ValueError, "no effect with autocast_enabled=None"),
        ({"autocast_enabled": False, "autocast_dtype": "float16"}, ValueError, "no effect"),
        ({"autocast_enabled": True, "autocast_dtype": "bfloat"}, ValueError, "'bfloat16'"),
        ({"autocast_enabled": True, "autocast_dtype": torch.float32}, ValueError, "torch.float32 must be"),
        ({"autocast_enabled": True, "autocast_dtype": 16}, TypeError, "not int"),
    ],
)
def test_bad_settings_are_refused(settings, error, said):
    with pytest.raises(error, match=said):
        InductorConfig(**settings)


def test_targets_inside_a_target_are_not_called_while_dtypes_are_found():
    callback = InductorCompile(None, BF16, baseline_steps=0, verify="raise")  # targets: forward, and net inside it
    module = seeded(Classifier)
    trainer(callback).validate(module, loader(3), verbose=False)
    assert callback.report.infer.verified == "equal"
    assert {event["target"] for event in callback.report.infer.events if event["kind"] == "compile"} == {"forward"}
    assert all(out.dtype == torch.float32 for out in module.validation_outputs)
