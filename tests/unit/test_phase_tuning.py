"""`PhaseTuning` on several ranks, which are threads here; and with steps of simulated length."""

from __future__ import annotations

import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from torch import nn

from compile_callbacks import Tune
from compile_callbacks.profiling.compile_events import CompileKey, CompileRecorder
from compile_callbacks.profiling.workload import Workload
from compile_callbacks.runtime.arguments import CompileArguments
from compile_callbacks.runtime.dispatcher import PhaseSwitch
from compile_callbacks.runtime.phase_tuning import BLOCK_STEPS, PhaseTuning
from tests.support.step_times import Fixed


class FakeProcesses:
    """Gathers the values of threads. A call that not all of them make fails after a minute."""

    def __init__(self, size):
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)
        self.calls = [0] * size

    def of(self, rank):
        return SimpleNamespace(
            size=len(self.values), is_global_zero=rank == 0, gather=functools.partial(self.gather, rank)
        )

    def gather(self, rank, value):
        self.calls[rank] += 1
        self.values[rank] = value
        self.barrier.wait()
        told = list(self.values)
        self.barrier.wait()
        return told


def tuning_of(phase, tune, recorder, **settings):
    return PhaseTuning(phase, tune, switch=PhaseSwitch([], recorder=recorder), recorder=recorder, **settings)


def begin(tuning, cache_dir=None):
    arguments = CompileArguments(configs={"train": tuning.tune, "infer": tuning.tune}, cache_dir=cache_dir)
    tuning.begin(nn.Linear(1, 1), arguments)


def run(tuning, recorder, ms, *, steps=400, fails=()):
    """Run steps until there is a winner; returns the candidates that ran."""
    ran = []
    for _ in range(steps):
        if tuning.winner is not None:
            break
        name = tuning.step_begins(measured=True).candidate or "eager"
        if name != "eager" and name not in ran:
            key = CompileKey("net", tuning.phase, candidate=name)
            what = {"reason": "no compiler"} if name in fails else {"graphs": 1, "seconds": 1.0}
            recorder.record("fallback" if name in fails else "compile", key, **what)
        ran.append(name)
        tuning.step_ends(Workload("w"), Fixed(ms[name]))
    return ran


def test_ranks_run_the_same_candidates_and_choose_by_the_slowest_rank():
    ranks = FakeProcesses(2)
    ms = [{"eager": 10, "default": 5, "aten": 6, "lite": 1}, {"eager": 9, "default": 20, "aten": 1, "lite": 1}]

    def rank_of(rank):
        recorder = CompileRecorder()
        tune = Tune(["default", "aten", "lite"], steps=10)
        tuning = tuning_of("train", tune, recorder, processes=ranks.of(rank))
        begin(tuning)
        return run(tuning, recorder, ms[rank], fails=["lite"] if rank else ()), tuning.winner

    with ThreadPoolExecutor(2) as threads:
        (first, winner), second = threads.map(rank_of, (0, 1))
    assert second == (first, winner)
    assert winner == "aten"
    assert first.count("lite") == BLOCK_STEPS  # it failed on rank 1, which took part in the block all the same
    assert ranks.calls[0] == ranks.calls[1] == len(first) // BLOCK_STEPS + 1


def test_ranks_of_inference_take_the_winner_of_rank_zero_at_the_end_of_the_stage(tmp_path):
    ranks = FakeProcesses(3)
    ms = [{"eager": 10, "default": 5, "aten": 6}, {"eager": 9, "default": 20, "aten": 1}]

    def rank_of(rank):
        recorder = CompileRecorder()
        tuning = tuning_of("infer", Tune(["default", "aten"]), recorder, processes=ranks.of(rank))
        begin(tuning, tmp_path)
        run(tuning, recorder, ms[rank % 2], steps=5 if rank == 2 else 400)  # the third rank has fewer batches
        before = tuning.winner
        for _ in range(2):
            tuning.stage_ends()
        return before, tuning.winner, tuning.active.config.describe()

    with ThreadPoolExecutor(3) as threads:
        told = list(threads.map(rank_of, range(3)))
    assert [before for before, _, _ in told] == ["default", "aten", None]
    assert {(winner, config) for _, winner, config in told} == {("default", "default")}
    assert ranks.calls == [2, 2, 2]
    (record,) = tmp_path.glob("model-*.json")
    assert len(json.loads(record.read_text())["winners"]) == 1


def test_a_run_that_decided_nothing_does_not_count_for_the_next_one():
    recorder = CompileRecorder()
    tuning = tuning_of("train", Tune("auto"), recorder)
    begin(tuning)
    tuning.plan(30)
    run(tuning, recorder, {"eager": 10, "default": 5})
    assert tuning.winner == "eager"
    assert "22 steps that remain" in tuning.trials()[1].reason
    begin(tuning)
    tuning.plan(100_000)
    assert tuning.winner is None
    ran = run(tuning, recorder, {"eager": 100, "default": 50})
    assert (tuning.winner, set(ran)) == ("default", {"eager", "default"})
    assert tuning.trials()[0].median_ms() == 100
    begin(tuning)
    assert tuning.winner == "default"


def test_state_of_another_form_is_ignored():
    tuning = tuning_of("train", Tune(["default"]), recorder := CompileRecorder())
    for state in (None, [], "default", {"key": 3}, {"key": "k", "config_key": None}, {"key": "k", "more": 1}):
        tuning.restore(state)
    begin(tuning)
    run(tuning, recorder, {"eager": 10, "default": 5})
    assert tuning.winner == "default"
    again = tuning_of("train", Tune(["default"]), recorder)
    again.restore({**tuning.state(), "of a later version": 1})
    begin(again)
    assert run(again, recorder, {"eager": 10, "default": 50}) == ["eager"] * BLOCK_STEPS
    assert again.trials()[1].reason == "won in the run that this one resumes"
