"""Two ranks under DDP: the same results as without the callback, and no rank waits for a collective in vain."""

from __future__ import annotations

import inspect
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from compile_callbacks import InductorCompile
from tests.support.against_eager import FLOAT32
from tests.support.models import Classifier, loader, seeded, trainer
from tests.support.pairs import made_once, run_pairs

# Two pairs at the same time: the first spends most of its time waiting.
WAITING = ["slow_compile", "slow_recompile", "slow_validation", "exception"]
OTHERS = [
    "plain",
    "find_unused_parameters",
    "static_graph",
    "accumulation",
    "split",
    "failure",
    "uneven_validation",
    "uneven_logged",
    "uneven_tuned",
    "tuned",
    "folding",
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


def chosen(result, phase):
    """The candidate that a rank chose, which is in the report's mode too."""
    trials = result["report"][phase]["diagnostics"]["trials"]
    (name,) = [trial["candidate"] for trial in trials if trial["verdict"] == "chosen"]
    assert result["report"][phase]["mode"] == name
    return name


def events(result: dict, phase: str, kind: str) -> list[str]:
    return [event["reason"] for event in result["report"][phase]["diagnostics"]["events"] if event["kind"] == kind]


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


def test_folded_weights_of_validation_follow_the_optimizer(pair):
    for result in pair("folding"):
        infer = result["report"]["infer"]
        assert [infer[name] for name in ("graphs", "recompiles", "fallbacks", "weight_refreshes")] == [1, 0, 0, 2]
        assert max(result["apart"]) < 1e-5


# ------------------------------------------------------------------------------------------ ranks that wait


def test_only_rank_zero_prints_the_report(pair):
    assert "compile seconds" in pair.printed("plain", 0)
    assert "compile" not in pair.printed("plain", 1).replace("torch.compile", "")


def test_two_processes_write_one_record_of_a_call(pair):
    assert [result["calls"] for result in pair("plain")] == [["fit"], ["fit"]]


def test_run_leaves_no_process_group_behind(pair):
    for case in ("plain", "tuned", "exception"):
        assert [result["groups"] for result in pair(case)] == [1, 1]


def test_run_raises_the_timeouts_of_collectives_and_restores_them(pair):
    for result in pair("slow_compile"):
        assert result["during"] == [1800.0]
        assert result["timeouts"] == [float(os.environ.get("RANK_CASES_TIMEOUT", "4"))]
    for result in pair("exception"):
        assert (result["error"], result["timeouts"]) == ("'batch 2'", [60.0])


@pytest.mark.parametrize("case", ["slow_compile", "slow_recompile", "slow_validation"])
def test_a_compile_that_takes_longer_than_the_timeout_of_collectives_ends_well(pair, case):
    for result in pair(case):
        assert_equal(result)
        assert [result["report"][phase]["fallbacks"] for phase in ("train", "infer")] == [0, 0]
        assert result["warnings"] == []
    report = pair(case)[1]["report"]
    assert report["train"]["recompiles"] == (case == "slow_recompile")
    assert report["infer"]["recompiles"] == (case == "slow_validation")


def test_compile_seconds_are_those_of_the_rank(pair):
    _, second = (result["report"]["train"]["compile_seconds"] for result in pair("slow_compile"))
    assert second > float(os.environ.get("RANK_CASES_SLOW", "6"))


def test_a_failure_on_one_rank_leaves_the_other_compiled_with_equal_results(pair):
    first, second = pair("failure")
    for result in (first, second):
        assert_equal(result)
    for phase in ("train", "infer"):
        assert first["report"][phase]["graphs"] == 1
        assert events(first, phase, "fallback") == []
        assert second["report"][phase]["graphs"] == 0
        assert "this lowering is not there" in events(second, phase, "fallback")[0]
    assert first["warnings"] == []
    assert any("in the train phase" in message for message in second["warnings"])


def test_processes_with_unequal_batches_wait_for_nobody(pair):
    first, second = pair("uneven_validation")
    assert first["validated"] > second["validated"]
    assert chosen(first, "infer") == chosen(second, "infer")
    assert first["report"]["infer"]["diagnostics"]["trials"][0]["samples"] > 0


def test_a_process_whose_loaders_end_earlier_does_not_reduce_while_others_step(pair):
    first, second = pair("uneven_logged")
    assert first["losses"] == second["losses"]
    assert first["report"]["infer"]["graphs"] >= 1
    assert max(first["s"], second["s"]) < first["patience"], "they waited for each other until the group's timeout"


def test_ranks_whose_loaders_have_other_lengths_tune_without_waiting(pair):
    first, second = pair("uneven_tuned")
    assert chosen(first, "infer") == chosen(second, "infer")
    assert first["losses"] == second["losses"]


def test_processes_choose_the_same_candidate(pair):
    first, second = pair("tuned")
    trials = first["report"]["train"]["diagnostics"]["trials"]
    assert [trial["verdict"] for trial in trials].count("chosen") == 1
    assert all(trial["samples"] >= 5 for trial in trials)
    assert trials == second["report"]["train"]["diagnostics"]["trials"]
    torch.testing.assert_close(
        first["compiled"]["state"]["net.0.weight"], second["compiled"]["state"]["net.0.weight"], **FLOAT32
    )
    files = len(list((pair.folder / "cache").glob("*.json")))
    # On a busy machine, eager may win within noise. Such a winner is not kept for later runs.
    assert files <= 1 if chosen(first, "train") == "eager" else files == 1


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
    assert ours.report.train.diagnostics.restored == ()  # two processes, not one
    assert ours.report.train.eager_step_ms is not None
    assert (
        pickle.loads(pickle.dumps(ours)).arguments.configs == ours.arguments.configs
    )  # a later run may spawn processes
    plain = seeded()
    trainer(max_epochs=3).fit(plain, loader(12), loader(4, seed=2), ckpt_path=path, **TRUSTED)
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()), **FLOAT32)


def test_a_checkpoint_of_one_process_goes_on_in_two(pair):
    for result in pair("resumed_from_one"):
        assert result["epoch"] == 2
        assert len(result["compiled"]["losses"]) == 6  # of twelve batches, for one epoch
        assert result["report"]["train"]["diagnostics"]["restored"] == []
        assert result["report"]["train"]["graphs"] == 1
        assert result["warnings"] == []
