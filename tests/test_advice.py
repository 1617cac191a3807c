"""What a run says about the whole model and its repeated blocks: what runs measured, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from models import loader, trainer
from step_times import Times
from test_regional import stacked
from torch import nn

from compile_callbacks import CompileReport, InductorCompile, PhaseReport, Tune
from compile_callbacks.compiling.targets import repeated_blocks
from compile_callbacks.reporting import advice
from compile_callbacks.reporting.costs_store import Cost, CostsStore
from compile_callbacks.reporting.markdown import to_markdown

pytestmark = pytest.mark.newest

SIZES = [[4, 4, 4], [4, 4, 12]]  # of the layers in each block of two networks
MADE_FOR = {"architecture": "a", "work": "w"}
REGIONAL = Cost(compile_seconds=7.2, cold=True, step_ms=34.1, samples=10)
WHOLE = Cost(compile_seconds=23.6, cold=True, step_ms=17.9, samples=10)


def run(cache_dir, **settings):
    callback = InductorCompile("default", None, baseline_steps=0, cache_dir=cache_dir, **settings)
    trainer(callback).fit(stacked(), loader(6))
    return callback.report


def test_the_other_way_is_compared_where_it_was_measured(tmp_path):
    first = run(tmp_path, targets="repeated")
    (line,) = first.train.advice
    assert "were not compared" in line
    assert "A run with targets=None and the same cache_dir compares them" in line
    second = run(tmp_path)
    (line,) = second.train.advice
    ours, theirs = second.train, first.train
    assert f"the whole model: {ours.compile_seconds:.1f} s to compile" in line
    assert f"{ours.compiled_step_ms:.2f} ms a step" in line
    assert f"in an earlier run: {theirs.compile_seconds:.1f} s to compile" in line
    assert f"{theirs.compiled_step_ms:.2f} ms a step" in line
    third = run(tmp_path, targets="repeated")
    assert third.train.advice[0].startswith("repeated blocks: ")
    assert "the whole model, in an earlier run: " in third.train.advice[0]


def test_nothing_is_said_where_parts_are_named_and_nothing_kept_without_a_folder(tmp_path):
    assert run(tmp_path, targets="net.layers.0").train.advice == ()
    assert not (tmp_path / "costs").exists()
    (line,) = run(None, targets="repeated").train.advice
    assert "one cache_dir for both runs" in line


def test_a_long_compile_of_a_model_with_repeated_blocks_points_them_out(monkeypatch):
    assert run(None).train.advice == ()
    monkeypatch.setattr(advice, "LONG_COMPILE_SECONDS", 0.0)
    (line,) = run(None).train.advice
    assert "'net.layers.*' are 3 blocks of one structure: targets='repeated' compiles one graph" in line


def test_blocks_that_are_a_small_part_of_the_model_are_not_pointed_out(monkeypatch):
    monkeypatch.setattr(advice, "LONG_COMPILE_SECONDS", 0.0)
    most, few = (nn.Sequential(*(nn.Sequential(nn.Linear(n, n), nn.ReLU()) for n in sizes)) for sizes in SIZES)
    assert [advice.spared_part(net, repeated_blocks(net)) for net in (most, few)] == [
        2 / 3,
        pytest.approx(0.1, abs=0.01),
    ]
    took = PhaseReport(mode="default", compile_seconds=1.0)
    said = [advice.Advisor(net, "whole", None).advise(took, None) for net in (most, few)]
    assert len(said[0]) == 1
    assert "steps may be slower" in said[0][0]
    assert said[1] == ()


def test_what_is_ahead_and_when():
    (line,) = advice.compared("repeated", REGIONAL, WHOLE)
    assert line == (
        "repeated blocks: 7.2 s to compile, 34.10 ms a step; the whole model, in an earlier run: 23.6 s to compile, "
        "17.90 ms a step. Compiling the whole model is ahead after 1012 steps"
    )
    slow = Cost(compile_seconds=23.6, cold=True, step_ms=40, samples=5)
    (line,) = advice.compared("whole", slow, REGIONAL)
    assert line.endswith("Compiling repeated blocks is ahead from the first step on")
    (line,) = advice.compared("whole", replace(slow, compile_seconds=3.1, cold=False), REGIONAL)
    assert "3.1 s to compile (in part from a cache)" in line
    assert line.endswith("What was compiled from nothing and what came from a cache do not compare")


def test_what_compiling_took_without_a_cache_is_compared_where_an_earlier_run_knows_it(tmp_path):
    advisor = advice.Advisor(nn.Linear(2, 2), "whole", CostsStore(tmp_path))
    cold = PhaseReport(mode="default", compile_seconds=23.6, compiled_step_ms=17.9, samples=10)
    advisor.keep(cold, MADE_FOR)
    CostsStore(tmp_path).save(MADE_FOR, "repeated", REGIONAL)
    (line,) = advisor.advise(replace(cold, compile_seconds=2.0, cache_hits=3), MADE_FOR)
    assert "the whole model: 23.6 s to compile, 17.90 ms a step" in line
    assert "ahead after" in line


def test_artifacts_that_were_loaded_make_a_compile_no_cold_one(tmp_path):
    CostsStore(tmp_path).save(MADE_FOR, "repeated", REGIONAL)
    advisor = advice.Advisor(nn.Linear(2, 2), "whole", CostsStore(tmp_path))
    report = PhaseReport(mode="default", compile_seconds=2.0, compiled_step_ms=17.9, samples=10)
    (line,) = advisor.advise(report, MADE_FOR, loaded=True)
    assert "2.0 s to compile (in part from a cache)" in line
    assert "ahead" not in line


def test_which_was_compiled_second_is_said_for_good(tmp_path):
    way = {scope: advice.Advisor(nn.Linear(2, 2), scope, CostsStore(tmp_path)) for scope in ("whole", "repeated")}
    cold = PhaseReport(mode="default", compile_seconds=23.6, compiled_step_ms=17.9, samples=10)
    way["whole"].keep(cold, MADE_FOR)
    second = replace(cold, compile_seconds=7.2, compiled_step_ms=34.1)
    said = "repeated blocks: 7.2 s to compile (second, so less where torch's cache folder had kernels of the first), 34"
    assert way["repeated"].advise(second, MADE_FOR)[0].startswith(said)
    way["repeated"].keep(second, MADE_FOR)
    (line,) = way["repeated"].advise(replace(second, compile_seconds=1.0, cache_hits=1), MADE_FOR)
    assert line.startswith(said)
    (line,) = way["whole"].advise(replace(cold, compile_seconds=1.0, cache_hits=1), MADE_FOR)
    assert line.startswith("the whole model: 23.6 s to compile, 17.90 ms")
    assert "in an earlier run: 7.2 s to compile (second, " in line


def test_what_tune_chose_is_compared_with_what_it_chose_of_repeated_blocks(tmp_path, monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5})

    def tuned(**settings):
        callback = InductorCompile(Tune(["default"], steps=5), None, cache_dir=tmp_path, **settings)
        trainer(callback).fit(stacked(), loader(30))
        return callback.report.train

    first = tuned(targets="repeated")
    assert first.mode == "default"
    second = tuned()
    (line,) = second.advice
    assert "the whole model: " in line
    assert f"repeated blocks, in an earlier run: {first.compile_seconds:.1f} s to compile" in line


def test_a_cold_compile_is_remembered_over_a_warm_one(tmp_path):
    store = CostsStore(tmp_path / "costs")
    warm = Cost(compile_seconds=2.0, cold=False, step_ms=17.0, samples=20)
    assert store.save(MADE_FOR, "repeated", REGIONAL) is None
    assert store.save(MADE_FOR, "whole", warm) is None
    assert store.load(MADE_FOR, "whole") == warm
    assert store.save(MADE_FOR, "whole", WHOLE) is None
    assert store.save(MADE_FOR, "whole", warm) is None
    assert store.load(MADE_FOR, "whole") == Cost(compile_seconds=23.6, cold=True, step_ms=17.0, samples=20)
    assert store.load(MADE_FOR, "repeated") == REGIONAL
    assert store.load({**MADE_FOR, "work": "other"}, "whole") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"made_for": {}}', '{"whole": 3}', "null"])
def test_a_damaged_file_is_no_cost(tmp_path, content):
    store = CostsStore(tmp_path)
    store.save(MADE_FOR, "whole", WHOLE)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert store.load(MADE_FOR, "whole") is None
    assert store.save(MADE_FOR, "repeated", REGIONAL) is None
    assert store.load(MADE_FOR, "repeated") == REGIONAL


def test_advice_is_in_the_data_the_table_and_the_markdown():
    report = CompileReport(train=PhaseReport(mode="default", advice=("do this",)))
    assert "train: do this" in str(report)
    assert "### Advice\n\n| phase | advice |" in to_markdown(report, {})
    data = json.loads(json.dumps(report.to_dict()))
    assert CompileReport.from_dict(data) == report
    del data["train"]["advice"]  # as an older version wrote it
    assert CompileReport.from_dict(data).train.advice == ()
