"""Two processes that train together under DDP: the same results as without the callback, and nobody waits in vain."""

from __future__ import annotations

import inspect
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from against_eager import FLOAT32
from lightning.pytorch import Trainer
from models import Classifier, loader, seeded, trainer
from pairs import made_once, run_pairs

from compile_callbacks import InductorCompile, PhaseReport
from compile_callbacks.reporting.slowest import figures_of, with_slowest

pytestmark = pytest.mark.newest

# Two pairs at the same time: what the first spends its time on is waiting.
WAITING = [
    "waiting",
    "farewell",
    "slow_compile",
    "slow_recompile",
    "slow_validation",
    "waits_within_a_target",
]
OTHERS = [
    "plain",
    "find_unused_parameters",
    "static_graph",
    "accumulation",
    "split",
    "failure",
    "failure_raises",
    "uneven_validation",
    "uneven_logged",
    "tuned",
    "resumed_from_one",
]


class Pair:
    """What each of two processes saw of each case."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, case: str) -> list[dict]:
        for rank, left in enumerate(lefts := [self.folder / f"{case}.{rank}.json" for rank in (0, 1)]):
            assert left.exists(), (self.folder / f"printed{int(case in OTHERS)}.{rank}").read_text()[-3000:]
        of_ranks = [json.loads(left.read_text()) for left in lefts]
        for rank, result in enumerate(of_ranks):
            assert "raised" not in result, f"rank {rank}: {result['raised']}"
        return of_ranks

    def printed(self, case: str, rank: int) -> str:
        return (self.folder / f"{case}.{rank}.out").read_text() + (self.folder / f"{case}.{rank}.err").read_text()


@pytest.fixture(scope="module")
def pair(tmp_path_factory, worker_id):
    """All cases, run once: to start processes takes longer than most cases do."""
    return Pair(made_once("ranks", _fill, tmp_path_factory, worker_id))


def _fill(folder: Path) -> None:
    one = trainer(InductorCompile(baseline_steps=2), max_epochs=1)
    one.fit(seeded(), loader(12), loader(4, seed=2))
    one.save_checkpoint(folder / "one.ckpt")
    longer = 4 * float(os.environ.get("RANK_CASES_SLOW", "0"))
    run_pairs("rank_cases.py", folder, WAITING, OTHERS, seconds=280 + longer)


def assert_equal(result: dict) -> None:
    """Losses, validation outputs and weights of a run with the callback are those of the run without."""
    compiled, eager = result["compiled"], result["eager"]
    assert len(eager["losses"]) > 1
    assert eager["losses"][0] != eager["losses"][-1]
    torch.testing.assert_close(compiled["losses"], eager["losses"], **FLOAT32)
    for ours, theirs in zip(compiled["outputs"], eager["outputs"], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), **FLOAT32)
    assert list(compiled["state"]) == list(eager["state"])
    for name, value in eager["state"].items():
        torch.testing.assert_close(torch.tensor(compiled["state"][name]), torch.tensor(value), **FLOAT32)


def events(result: dict, phase: str, kind: str) -> list[str]:
    return [event["reason"] for event in result["report"][phase]["events"] if event["kind"] == kind]


# ------------------------------------------------------------------------------------------ the same results


@pytest.mark.parametrize("case", ["plain", "find_unused_parameters", "static_graph", "accumulation", "split"])
def test_a_run_of_two_processes_equals_the_same_run_without_the_callback(pair, case):
    of_ranks = pair(case)
    for result in of_ranks:
        assert_equal(result)
        train, infer = result["report"]["train"], result["report"]["infer"]
        assert train["graphs"] >= 1
        assert infer["graphs"] == 1  # not split: no gradient is reduced
        assert [train["fallbacks"], infer["fallbacks"]] == [0, 0]
        assert [train["graph_breaks"], infer["graph_breaks"]] == [0, 0]
        assert result["warnings"] == []
    states = [result["compiled"]["state"] for result in of_ranks]
    assert states[0]["net.0.weight"] == states[1]["net.0.weight"]
    assert of_ranks[0]["compiled"]["losses"] != of_ranks[1]["compiled"]["losses"]  # each has data of its own


def test_graphs_are_split_at_ddps_buckets_where_that_is_asked_for(pair):
    assert pair("accumulation")[0]["report"]["train"]["graphs"] == 1  # with as many buckets
    assert pair("split")[0]["report"]["train"]["graphs"] > 1


def test_what_one_process_compiled_the_other_finds_in_the_cache(pair):
    first, second = (result["report"]["train"] for result in pair("static_graph"))
    assert second["cache_hits"] == second["graphs"]
    assert first["graphs"] == second["graphs"]
    assert second["cache_misses"] == 0


# ------------------------------------------------------------------------------------------ reports


def test_the_report_is_that_of_the_slowest_and_the_first_process_alone_shows_it(pair):
    first, second = pair("plain")
    for phase in ("train", "infer"):
        mine, others = first["report"][phase], second["report"][phase]
        assert mine["processes"] == 2
        for name in ("compile_seconds", "eager_step_ms", "compiled_step_ms", "speedup", "slowest_rank"):
            assert mine[name] == others[name]
            assert mine[name] is not None
    assert "compile seconds" in pair.printed("plain", 0)
    assert "2 processes" in pair.printed("plain", 0)
    assert "compile" not in pair.printed("plain", 1).replace("torch.compile", "")
    assert first["scalars"]["compile/train/seconds"] == first["report"]["train"]["compile_seconds"]


def test_compile_seconds_are_those_of_the_slowest_process(pair):
    first, second = pair("slow_compile")
    assert first["report"]["train"]["compile_seconds"] > 6
    assert first["report"]["train"]["compile_seconds"] == second["report"]["train"]["compile_seconds"]


def test_step_times_are_all_of_the_slowest_process_and_pay_for_the_longest_compile():
    of_ranks = [
        figures_of(PhaseReport(compile_seconds=9.0, eager_step_ms=4.0, compiled_step_ms=2.0, speedup=2.0, samples=7)),
        figures_of(PhaseReport(compile_seconds=1.0, eager_step_ms=5.0, compiled_step_ms=3.0, speedup=1.7, samples=5)),
        figures_of(PhaseReport(eager_step_ms=8.0)),
    ]
    mine = PhaseReport(compile_seconds=9.0, graphs=2)
    slowest = with_slowest(mine, "train", [{"train": figures} for figures in of_ranks])
    assert (slowest.compile_seconds, slowest.processes, slowest.slowest_rank, slowest.graphs) == (9.0, 3, 1, 2)
    assert (slowest.eager_step_ms, slowest.compiled_step_ms, slowest.speedup, slowest.samples) == (5.0, 3.0, 1.7, 5)
    assert slowest.break_even_steps == 4500
    assert with_slowest(mine, "train", []) is mine


# ------------------------------------------------------------------------------------------ all together


def test_processes_meet_where_meetings_do_not_match_and_do_not_wait_for_ever(pair):
    first, second = pair("waiting")
    assert [first["follows"], second["follows"]] == [False, True]
    assert first["elsewhere"] is None  # the other process was at another place
    assert first["heard"] == [[1, "of one"], [0, "of zero"], [0, "of zero, after all"]]
    assert second["heard"] == first["heard"][:2]
    assert first["values"] == second["values"] == [0, 1]
    assert second["steps_met"] == [0, 1]  # in the last of them it met the other, which was behind all of its own
    assert first["waited"] > 1  # the timeout of the process group: the other compiled
    assert second["waited"] == 0
    assert 1 < first["in_vain"] < 3  # the other did not
    assert first["destroyed_after"] < 3.5  # which does not wait for the other, either
    assert not first["current"]


def test_a_process_that_leaves_by_an_error_is_heard_later_and_waits_a_few_seconds_at_most(pair):
    first, second = pair("farewell")
    assert first["heard"] == [[1, "of one"]]
    assert not first["current"]
    assert not second["current"]
    assert max(first["seconds"], second["seconds"]) < 5


def test_no_group_is_left_behind_by_a_run(pair):
    for case in ("plain", "tuned"):
        assert [result["groups"] for result in pair(case)] == [1, 1]


@pytest.mark.parametrize("case", ["slow_compile", "slow_recompile", "slow_validation"])
def test_a_compile_that_takes_longer_than_the_timeout_of_collectives_ends_well(pair, case):
    for result in pair(case):
        assert_equal(result)
        assert [result["report"][phase]["fallbacks"] for phase in ("train", "infer")] == [0, 0]
        assert result["warnings"] == []
    report = pair(case)[1]["report"]
    assert report["train"]["recompiles"] == (case == "slow_recompile")
    assert report["infer"]["recompiles"] == (case == "slow_validation")


def test_a_process_may_wait_for_another_within_what_it_compiles(pair):
    for result in pair("waits_within_a_target"):
        assert_equal(result)
        assert result["report"]["train"]["graphs"] > 0


def test_a_failure_in_one_process_has_all_fall_back(pair):
    first, second = pair("failure")
    for result in (first, second):
        assert_equal(result)
    for phase in ("train", "infer"):
        assert [reason[:8] for reason in events(first, phase, "fallback")] == ["rank 1: "] * len(
            events(second, phase, "fallback")
        )
        assert "this lowering is not there" in events(first, phase, "fallback")[0]
    assert any("in the train phase, in every process: rank 1: " in message for message in first["warnings"])
    assert second["warnings"] == []


def test_a_failure_in_one_process_ends_the_run_of_all_where_that_is_asked_for(pair):
    first, second = pair("failure_raises")
    assert "this lowering is not there" in second["error"]
    assert first["error"] == f"rank 1: {second['error']}"


def test_processes_with_unequal_batches_wait_for_nobody(pair):
    first, second = pair("uneven_validation")
    assert first["validated"] > second["validated"]
    assert first["report"]["infer"]["trials"] == second["report"]["infer"]["trials"]
    assert first["report"]["infer"]["trials"][0]["samples"] > 0


def test_a_process_whose_loaders_end_earlier_does_not_reduce_while_others_step(pair):
    first, second = pair("uneven_logged")
    assert first["losses"] == second["losses"]
    assert first["report"]["infer"]["graphs"] >= 1
    assert max(first["s"], second["s"]) < first["patience"], "they waited for each other until the group's timeout"


def test_processes_choose_the_same_candidate(pair):
    first, second = pair("tuned")
    trials = first["report"]["train"]["trials"]
    assert [trial["verdict"] for trial in trials].count("chosen") == 1
    assert all(trial["samples"] >= 5 for trial in trials)
    assert trials == second["report"]["train"]["trials"]
    torch.testing.assert_close(
        first["compiled"]["state"]["net.0.weight"], second["compiled"]["state"]["net.0.weight"], **FLOAT32
    )
    assert len(list((pair.folder / "cache" / "choices").iterdir())) == 1


# ------------------------------------------------------------------------------------------ checkpoints


# Lightning has the argument since 2.6; before, it trusted every checkpoint.
TRUSTED = {"weights_only": False} if "weights_only" in inspect.signature(Trainer.fit).parameters else {}


def test_a_checkpoint_of_two_processes_goes_on_in_one(pair):
    path = pair.folder / "two.ckpt"
    assert set(torch.load(path, weights_only=False)["state_dict"]) == set(Classifier().state_dict())
    module = seeded()
    ours = InductorCompile(baseline_steps=2)
    one = trainer(ours, max_epochs=3)
    one.fit(module, loader(12), loader(4, seed=2), ckpt_path=path, **TRUSTED)
    assert one.current_epoch == 3
    assert len(module.losses) == 12
    assert ours.report.before.train.processes == 2
    assert ours.report.train.restored == ()  # step times of two processes are not compared with those of one
    assert ours.report.train.eager_step_ms is not None
    assert pickle.loads(pickle.dumps(ours)).configs == ours.configs  # a later run may spawn processes
    plain = seeded()
    trainer(max_epochs=3).fit(plain, loader(12), loader(4, seed=2), ckpt_path=path, **TRUSTED)
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()), **FLOAT32)


def test_a_checkpoint_of_one_process_goes_on_in_two(pair):
    for result in pair("resumed_from_one"):
        assert result["epoch"] == 2
        assert len(result["compiled"]["losses"]) == 6  # of twelve batches, for one epoch
        assert result["report"]["train"]["restored"] == []
        assert result["report"]["train"]["graphs"] == 1
        assert result["warnings"] == []
