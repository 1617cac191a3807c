"""``background=True``: a helper process compiles while training continues."""

from __future__ import annotations

import functools
import os
import time
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from compile_callbacks import CompileWarning, InductorCompile, _torch
from compile_callbacks.background.helper import Helper
from compile_callbacks.graphs.requests import CompileAnswer, CompileRequest, RequestQueue
from compile_callbacks.passes import GraphPass, RecordGraphs
from compile_callbacks.report.summary import verdict_lines
from compile_callbacks.tuning.tuner import Tuner
from tests.support.background import SECONDS, Until, eager_losses, pids, run, waiting_graph
from tests.support.models import Classifier, Wrapper, batches_of, loader, seeded, trainer

pytestmark = pytest.mark.usefixtures("background_ms")
all_versions = pytest.mark.all_versions


@all_versions
def test_training_goes_on_and_switches_to_the_compiled_code():
    callback = InductorCompile(background=True)
    module, _ = run(callback)
    report = callback.report.train
    steps = len(module.losses)
    eager = eager_losses(steps)
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(eager.losses), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(module.state_dict(), eager.state_dict(), rtol=1e-3, atol=1e-3)
    meanwhile = report.diagnostics.waiting_steps
    assert (report.graphs, report.verified, report.diagnostics.steps) == (1, "equal 1", {"compiled": 12, "eager": 1})
    assert meanwhile > 0
    # Twelve steps before the capture: the baseline and its warm-up steps.
    assert steps == 12 + 1 + meanwhile + 12
    assert report.background_seconds > report.compile_seconds > report.diagnostics.load_seconds > 0
    assert report.diagnostics.waiting_step_ms > 0
    assert callback.report.infer.verdict in ("still compiling", "too few samples", "faster", "slower", "no difference")


def test_the_helper_process_stores_its_code_in_the_cache_folder(tmp_path):
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        callback = InductorCompile(background=True, infer_mode=None, cache_dir=tmp_path)
        run(callback, module=seeded(lambda: Classifier(nn.Sequential(nn.Linear(8, 5), nn.Softsign(), nn.Linear(5, 3)))))
        found.append((callback.report.train.cache_hits, callback.report.train.diagnostics.cache_misses))
    assert found == [(0, 1), (1, 0)]


def test_a_run_that_compiles_nothing_starts_no_helper_process():
    callback = InductorCompile("default", None, background=True)
    module, tells = Classifier(), pl.callbacks.LambdaCallback(on_validation_end=lambda *_: found.append(pids(callback)))
    found: list[set[int]] = []
    trainer(callback, tells).validate(module, loader(2), verbose=False)
    assert found == [set()]


class InterruptAfterLoad(pl.Callback):
    """Interrupts the run in a training step when the code for validation is loaded."""

    def __init__(self, callback: InductorCompile) -> None:
        self.callback, self.ends = callback, time.monotonic() + SECONDS

    def on_train_batch_end(self, *args: object) -> None:
        session = self.callback.session
        if session._requests.waits("infer", None):
            while session._requests.waits("infer", None) and time.monotonic() < self.ends:
                session._helper.poll()
                time.sleep(0.05)
            raise ValueError("the code is loaded")


def test_a_phase_whose_code_was_loaded_but_not_called_is_not_compiled_yet():
    callback = InductorCompile(None, "default", background=True)
    interrupt = InterruptAfterLoad(callback)
    with pytest.raises(ValueError, match="the code is loaded"):
        trainer(callback, interrupt, max_epochs=-1).fit(seeded(), loader(), loader(16))
    assert time.monotonic() < interrupt.ends
    infer = callback.report.infer
    assert (infer.graphs, infer.verdict) == (1, "still compiling")


@all_versions
def test_a_graph_with_symbolic_sizes_is_compiled_in_the_helper_process():
    callback = InductorCompile(background=True)
    run(callback, data=batches_of(4, 5, 6, 7, 4, 5, 6, 7))
    diagnostics = callback.report.train.diagnostics
    assert not [event for event in diagnostics.events if event["kind"] in ("foreground", "fallback")]
    assert callback.report.train.graphs == 1
    assert callback.report.train.verified == "equal 1"


def test_sizes_for_which_the_code_is_not_valid_compile_in_the_foreground(monkeypatch):
    only_four = lambda _, positions: lambda inputs: [inputs[i] for i in positions] == [4]  # noqa: E731
    monkeypatch.setattr(_torch.portable_graphs, "guard_of", only_four)
    callback = InductorCompile(background=True, infer_mode="eager")
    run(callback, data=batches_of(4, 5, 6, 7, 4, 5, 6, 7))
    train = callback.report.train
    reasons = [event["reason"] for event in train.diagnostics.events if event["kind"] == "foreground"]
    assert reasons == ["the code of another process is not valid for the sizes of a call"]
    assert (train.fallbacks, train.graphs) == (0, 2)


class Unpicklable(GraphPass):
    def __init__(self) -> None:
        self.function = lambda: None

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        pass


@pytest.mark.parametrize(
    ("graph_pass", "reason"),
    [
        (Unpicklable(), "a graph pass, an option or a setting of torch cannot be pickled"),
        (RecordGraphs(), "torch serializes no compiled code with a graph pass whose uuid() is None"),
    ],
)
def test_a_graph_that_cannot_be_sent_compiles_in_the_foreground(graph_pass, reason):
    callback = InductorCompile(background=True, passes=[graph_pass])
    trainer(callback, max_steps=20, max_epochs=-1).fit(seeded(), loader())
    report = callback.report.train
    (found,) = [event["reason"] for event in report.diagnostics.events if event["kind"] == "foreground"]
    assert reason in found
    assert (report.graphs, report.diagnostics.steps, report.diagnostics.waiting_steps) == (1, {"compiled": 10}, 0)
    if isinstance(graph_pass, RecordGraphs):
        assert [graph.kind for graph in graph_pass.graphs] == ["forward", "backward"]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def saves_sines(x: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    return checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False, context_fn=contexts)


@all_versions
@pytest.mark.parametrize(
    ("function", "reason"), [(Double.apply, "torch cannot serialize"), (saves_sines, "context_fn")]
)
def test_a_graph_that_another_process_cannot_compile_is_not_sent(function, reason):
    raised = []

    def backend(graph_module: torch.fx.GraphModule, inputs: list[object]) -> object:
        with pytest.raises(_torch.portable_graphs.NotPortableError) as error:
            _torch.portable_graphs.portable_graph(graph_module, inputs)
        raised.append(str(error.value))
        return graph_module.forward

    torch.compile(function, backend=backend, fullgraph=True)(torch.ones(3, requires_grad=True))
    assert len(raised) == 1
    assert reason in raised[0]


class FailsInOtherProcess(GraphPass):
    def __init__(self) -> None:
        self.pid = os.getpid()

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        if os.getpid() != self.pid:
            raise ValueError("not here")


def test_a_graph_that_the_helper_process_cannot_compile_compiles_in_the_foreground():
    callback = InductorCompile(background=True, passes=[FailsInOtherProcess()])
    run(callback)
    report = callback.report.train
    reasons = [event["reason"] for event in report.diagnostics.events if event["kind"] == "foreground"]
    assert len(reasons) == 1
    assert "not here" in reasons[0]
    assert (report.graphs, report.verified) == (1, "equal 1")


def test_a_module_that_stays_compiled_compiles_the_waiting_graphs_itself():
    callback, module = InductorCompile(background=True, keep_compiled=True), seeded()
    trainer(callback, max_steps=14, max_epochs=-1).fit(module, loader())
    assert callback.report.train.graphs == 0
    x = torch.ones(4, 8)  # as a batch of the run
    for _ in range(2):
        module.net(x).sum().backward()
    report = callback.report.train
    assert report.verified == "equal 1"
    assert [e["reason"] for e in report.diagnostics.events if e["kind"] == "foreground"] == ["the run has ended"]
    assert "most steps ran before the compiled code was loaded" in verdict_lines(callback.report)[0]


def test_gradients_are_accumulated_over_the_switch():
    callback = InductorCompile(background=True, infer_mode="eager")
    module, _ = run(callback, accumulate_grad_batches=4)
    eager = eager_losses(len(module.losses) // 4, accumulate_grad_batches=4)
    count = len(eager.losses)
    torch.testing.assert_close(torch.tensor(module.losses[:count]), torch.tensor(eager.losses), rtol=1e-3, atol=1e-3)


def test_a_run_continues_in_the_middle_of_a_compile(tmp_path):
    first = InductorCompile(background=True)
    whole = trainer(first, max_steps=16, max_epochs=-1)
    whole.fit(seeded(), loader())
    assert first.report.train.verdict == "still compiling"
    whole.save_checkpoint(tmp_path / "last.ckpt")
    second, module = InductorCompile(background=True), seeded()
    until = Until(second)
    trainer(second, until, max_epochs=-1).fit(module, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert second.report.train.diagnostics.steps["compiled"] == 12
    eager = eager_losses(16 + len(module.losses))
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(eager.losses[16:]), rtol=1e-3, atol=1e-3)


@all_versions
def test_a_second_run_of_the_same_callback_requests_what_the_first_did_not_get():
    callback, module = InductorCompile(background=True), seeded()
    trainer(callback, max_steps=16, max_epochs=-1).fit(module, loader())
    assert callback.report.train.graphs == 0
    until = Until(callback)
    trainer(callback, until, max_epochs=-1).fit(module, loader())
    assert callback.report.train.diagnostics.steps["compiled"] == 12


class Own(nn.Module):
    """Calls two networks, with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x)


def test_all_graphs_of_a_step_are_loaded_before_the_steps_switch():
    callback = InductorCompile(background=True)
    run(callback, module=seeded(lambda: Classifier(Wrapper(Own()))))
    assert callback.report.train.graphs == 2
    assert callback.report.train.diagnostics.steps == {"compiled": 12, "eager": 1}


def test_a_repeatable_run_warns():
    callback = InductorCompile(background=True)
    with pytest.warns(CompileWarning, match=r"background=True.*deterministic.*CC204"), warnings.catch_warnings():
        trainer(callback, max_steps=2, deterministic=True).fit(seeded(), loader())
    torch.use_deterministic_algorithms(mode=False)


def test_the_argument_is_checked():
    with pytest.raises(TypeError, match="background=1 must be True or False"):
        InductorCompile(background=1)  # type: ignore[arg-type]


class UntilChosen(Until):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.pids |= pids(self.callback)
        verdicts = [trial["verdict"] for trial in self.callback.report.train.diagnostics.trials]
        if "chosen" in verdicts or time.monotonic() > self.ends:
            trainer.should_stop = True


def test_candidates_of_a_tune_are_compiled_while_the_best_so_far_trains(background_ms):
    fast = "options={epilogue_fusion: True}"
    background_ms.update({"default": 1.5, fast: 1.0})
    candidates = ["default", {"options": {"epilogue_fusion": True}}]
    callback = InductorCompile(train_mode={"candidates": candidates, "steps": 5}, background=True)
    module, until = seeded(), UntilChosen(callback)
    trainer(callback, until, max_epochs=-1).fit(module, loader())
    report = callback.report.train
    trials = {trial["candidate"]: trial["verdict"] for trial in report.diagnostics.trials}
    assert trials == {"eager": "beaten", "default": "beaten", fast: "chosen"}
    assert report.background_seconds > 0
    variants = {(series["candidate"], series["kind"]) for series in report.diagnostics.series}
    assert {("waiting", "eager"), ("default", "compiled"), (fast, "compiled")} <= variants
    eager = eager_losses(len(module.losses))
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(eager.losses), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("recompiles_at_once")
def test_auto_tries_the_setting_that_removes_a_graph_break(background_ms, monkeypatch):
    healed = "dynamo={'capture_scalar_outputs': True}"
    background_ms.update({"default": 1.5, healed: 1.0})
    monkeypatch.setattr(Tuner, "_why_not_compiled", lambda tuner, trial: None)
    callback = InductorCompile("auto", None, background=True)
    module = seeded(lambda: Classifier(Scaling()))
    trainer(callback, UntilChosen(callback), max_epochs=-1).fit(module, loader())
    assert callback.report.train.mode == healed
    eager = eager_losses(len(module.losses), seeded(lambda: Classifier(Scaling())))
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(eager.losses), rtol=1e-3, atol=1e-3)


class Scaling(Wrapper):
    def forward(self, x):
        return self.net(x * (1 + x.abs().max().item()))


def test_slower_steps_go_back_to_eager(background_ms):
    background_ms[None] = 3.0
    callback = InductorCompile(background=True)
    until, module = Until(callback, compiled_steps=10**9), seeded()

    def stop(trainer_: pl.Trainer, *args: object) -> None:
        events = [event["kind"] for event in callback.report.train.diagnostics.events]
        trainer_.should_stop |= "sent_back" in events

    until.on_train_batch_start = stop  # type: ignore[method-assign]
    trainer(callback, until, max_epochs=-1).fit(module, loader())
    assert time.monotonic() < until.ends
    line = verdict_lines(callback.report)[0]
    assert "runs eagerly again: compiled steps were slower in alternating blocks (2.00 → 3.00 ms)" in line
    assert not callback.session._switch.compiled_targets("train")


def test_of_two_helper_processes_one_compiles_a_graph_and_the_other_loads_it():
    factor = time.time()  # no earlier test has compiled this graph
    requests: list[bytes] = []

    def backend(graph_module: torch.fx.GraphModule, inputs: list[object]) -> object:
        graph = _torch.portable_graphs.portable_graph(graph_module, inputs)
        request = CompileRequest(graph=graph, phase="train", options={}, passes=(), activation_memory_budget=None)
        requests.append(request.pickled())
        return graph_module.forward

    torch.compile(lambda x: (x * factor).sin(), backend=backend)(torch.ones(3, requires_grad=True))
    answers: list[CompileAnswer] = []
    helpers = []
    for _ in range(2):
        waiting = waiting_graph(requests[0], answers.append)
        helpers.append(Helper(RequestQueue([waiting]), lambda problem, keys: pytest.fail(problem)))
    ends = time.monotonic() + SECONDS
    while len(answers) < 2 and time.monotonic() < ends:
        for helper in helpers:
            helper.poll()
        time.sleep(0.05)
    for helper in helpers:
        helper.stop()
    assert sorted(answer.cached for answer in answers) == [False, True]
