"""Steps are compiled or eager, and the report counts the calls that ran eagerly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_callbacks import CompileReport, CompileWarning, InductorCompile
from compile_callbacks.profiling.step_timer import WARMUP_STEPS
from compile_callbacks.report.summary import notes
from compile_callbacks.session.steps_on_gpu import StepsOnGpu
from tests.support.models import FEATURES, Classifier, Wrapper, batches_of, fit, loader, seeded, trainer
from tests.support.step_times import Times

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


class Critic(Classifier):
    """Differentiates the gradients of its critic, as a WGAN-GP does, and not those of its network."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
        return super().training_step(batch, batch_idx) + (gradient.norm(dim=1) - 1).square().mean()


def test_steps_with_a_target_left_eager_are_compiled_and_its_calls_are_counted(monkeypatch):
    Times(monkeypatch, train={"eager": 12, None: 10})
    callback = InductorCompile("default", None)
    with pytest.warns(CompileWarning, match="target 'critic' runs eagerly in the train phase"):
        module = fit(callback, make=Critic, train=40, validation=None)
    expected = fit(make=Critic, train=40, validation=None)
    torch.testing.assert_close(module.losses, expected.losses, rtol=1e-4, atol=1e-5)
    train = callback.report.train
    assert train.graphs == 1
    steps = train.diagnostics.steps
    assert steps.keys() == {"compiled"}
    assert train.diagnostics.eager_calls == {"critic": steps["compiled"]}
    assert f"train: {steps['compiled']} calls of critic ran eagerly" in notes(callback.report)
    assert train.speedup == pytest.approx(1.2)
    assert {part["kind"] for part in train.diagnostics.series} >= {"eager", "compiled"}
    assert CompileReport.from_dict(callback.report.to_dict()) == callback.report


def test_two_predictions_of_a_compiled_run_are_bit_equal():
    callback = InductorCompile(None, "default", baseline_steps=2)
    module, run = seeded(), trainer(callback)
    first, second = (torch.cat(run.predict(module, loader(12))) for _ in range(2))
    assert torch.equal(first[4 * 4 :], second[4 * 4 :])  # the first four batches of the first call ran eagerly
    third = torch.cat(run.predict(module, loader(12)))
    assert torch.equal(second, third)
    assert callback.report.infer.diagnostics.steps == {"compiled": 32}


@pytest.mark.parametrize("baseline_steps", [0, 3])
def test_unused_gpu_memory_is_freed_once_in_each_phase_after_its_first_compiled_step(baseline_steps, monkeypatch):
    freed = []
    monkeypatch.setattr(StepsOnGpu, "begin", lambda steps, device: setattr(steps, "on_gpu", True))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append((run.state.stage.value, run.global_step)))
    run = trainer(InductorCompile(baseline_steps=baseline_steps), max_epochs=2)
    run.fit(seeded(), batches_of(*[4] * 14, 3), loader(12))
    first = baseline_steps + WARMUP_STEPS if baseline_steps else 0
    at_the_start_by_lightning = ("train", 0)
    assert freed == [at_the_start_by_lightning, ("train", first + 1), ("validate", 15)]


class CountsEagerCalls(Wrapper):
    """Counts the calls that execute its Python code. A trace executes only the other branch."""

    calls = 0

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.calls += 1
        return ran(self.net(x))


RUNS: list[int] = []


@torch.library.custom_op("compile_callbacks_tests::ran", mutates_args=())
def ran(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(len(x))
    return x.clone()


ran.register_fake(torch.empty_like)
ran.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize("verify", ["off", "warn"])
def test_without_a_baseline_and_without_verification_nothing_runs_eagerly(verify):
    RUNS.clear()
    callback = InductorCompile(baseline_steps=0, verify=verify)
    module = seeded(lambda: Classifier(CountsEagerCalls()))
    trainer(callback, num_sanity_val_steps=0).fit(module, loader(6), loader(4))
    assert module.net.calls == 0
    report = callback.report
    assert (report.train.diagnostics.steps, report.infer.diagnostics.steps) == ({"compiled": 6}, {"compiled": 4})
    assert len(RUNS) == 10 + (0 if verify == "off" else 3)  # two runs of the training graph, one of the other graph
