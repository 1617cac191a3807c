"""The report: exact counts with reasons, data that survives JSON and a resumed run, and the table."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from compile_callbacks import CompileReport, CompileWarning, InductorCompile, PhaseReport
from tests.support.models import FEATURES, Classifier, loader, mlp, seeded, trainer
from tests.support.step_times import Times
from tests.support.uncached import Uncached

pytestmark = pytest.mark.usefixtures("no_codegen")


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        x = x * 2
        torch._dynamo.graph_break()
        return self.body(x)


LINE_OF_THE_BREAK = 1 + next(
    number for number, line in enumerate(Path(__file__).read_text().splitlines()) if "graph_break()" in line
)


def test_a_known_graph_break_is_reported_with_file_line_and_reason():
    callback = InductorCompile("default", None, baseline_steps=0)
    trainer(callback).fit(Classifier(Broken()), loader(3))
    report = callback.report.train
    [event] = [event for event in report.diagnostics.events if event["kind"] == "graph_break"]
    assert (report.graph_breaks, report.graphs, report.recompiles) == (1, 2, 0)
    assert event["target"] == "net"
    assert Path(event["file"]).name == "test_report.py"
    assert event["line"] == LINE_OF_THE_BREAK
    assert "graph_break" in event["reason"]


def ragged_loader():
    return DataLoader(TensorDataset(torch.randn(11, FEATURES), torch.zeros(11, dtype=torch.long)), 4)


def test_a_known_recompile_is_reported_with_its_reason():
    callback = InductorCompile({"dynamic": False}, None, baseline_steps=0)
    trainer(callback, max_epochs=2).fit(Classifier(), ragged_loader())
    report = callback.report.train
    assert (report.recompiles, report.graphs, report.graph_breaks) == (1, 2, 0)
    [event] = [event for event in report.diagnostics.events if event["kind"] == "recompile"]
    assert event["reason"] == "batch size 3, was 4"


def test_compiles_of_the_users_other_code_are_not_ours():
    class Other(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + torch.compile(lambda x: x.sin().sum())(batch[0])

    callback = InductorCompile("default", None, baseline_steps=0)
    trainer(callback).fit(Other(), loader(3))
    assert {event["target"] for event in callback.report.train.diagnostics.events} == {"net"}
    assert callback.report.train.graphs == 1


def test_seconds_of_the_backward_graph_are_part_of_its_compile():
    torch.compiler.reset()
    callback = InductorCompile("default", None, passes=[Uncached()], baseline_steps=0)
    trainer(callback).fit(Classifier(), loader(2))
    [compile_event] = [event for event in callback.report.train.diagnostics.events if event["kind"] == "compile"]
    assert compile_event["part"] == "graph"
    assert 0 < compile_event["backward_seconds"] < compile_event["seconds"]


def test_cuda_graphs_without_a_gpu_are_warned_about_once_and_reported():
    callback = InductorCompile("reduce-overhead", None, baseline_steps=0)
    with pytest.warns(CompileWarning, match="train_mode='reduce-overhead' asks for CUDA graphs.*no effect"):
        trainer(callback).fit(Classifier(), loader(2))
    events = callback.report.train.diagnostics.events
    assert [event["target"] for event in events if event["kind"] == "cudagraph_skip"] == ["forward", "net"]


def test_never_and_nothing_survive_json():
    report = CompileReport(train=PhaseReport(mode="default", break_even_steps=math.inf))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["train"]["break_even_steps"] == "never"
    assert data["infer"]["speedup"] is None
    assert CompileReport.from_dict(data) == report
    assert "never" in str(report)


def test_compiled_steps_that_are_slower_are_warned_about_with_the_remedy(monkeypatch):
    Times(monkeypatch, train={"eager": 10, None: 12})
    callback = InductorCompile("default", None, baseline_steps=6)
    with pytest.warns(CompileWarning, match=r"compiled train steps are slower.*train_mode='eager'"):
        trainer(callback).fit(Classifier(), loader(30))
    assert callback.report.train.break_even_steps == math.inf


def test_a_resumed_run_knows_its_baseline_and_says_so(tmp_path):
    first = InductorCompile(baseline_steps=4)
    run = trainer(first, enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(seeded(), loader(14))
    run.save_checkpoint(tmp_path / "run.ckpt")

    second = InductorCompile(baseline_steps=4)
    module = seeded()
    trainer(second, max_epochs=2).fit(module, loader(14), ckpt_path=tmp_path / "run.ckpt")
    report = second.report
    assert report.before == first.report
    assert report.train.eager_step_ms == first.report.train.eager_step_ms
    assert report.train.diagnostics.restored == ("eager_step_ms", "eager_spread_ms")
    assert report.train.samples == 4
    assert report.train.compiled_step_ms != first.report.train.compiled_step_ms
    assert "train: eager steps were measured in the run before this one" in str(report)
    assert len(module.losses) == 14


def test_a_resumed_run_with_other_threads_measures_its_baseline_anew(tmp_path):
    run = trainer(InductorCompile(baseline_steps=4), enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(seeded(), loader(14))
    run.save_checkpoint(tmp_path / "run.ckpt")

    threads, second = torch.get_num_threads(), InductorCompile(baseline_steps=4)
    torch.set_num_threads(threads + 1)
    try:
        trainer(second, max_epochs=2).fit(seeded(), loader(14), ckpt_path=tmp_path / "run.ckpt")
    finally:
        torch.set_num_threads(threads)
    assert second.report.before is not None
    assert second.report.train.diagnostics.restored == ()
    assert second.report.train.samples == 4


def test_the_checkpoint_with_the_state_loads_with_weights_only(tmp_path):
    run = trainer(InductorCompile(baseline_steps=2), enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(seeded(), loader(12), loader(2))
    run.save_checkpoint(tmp_path / "run.ckpt")
    assert torch.load(tmp_path / "run.ckpt", weights_only=True)["compile_callbacks"]


def test_the_table_is_printed_once_after_a_fit(capsys):
    callback = InductorCompile(baseline_steps=0)
    run = trainer(callback)
    module = Classifier()
    run.fit(module, loader(2), loader(2))
    run.validate(module, loader(2), verbose=False)
    run.predict(module, loader(2))
    shown = capsys.readouterr().out
    assert shown.count("cache hits / misses") == 1
    assert "net" in shown
