"""`Tune`: the decisions at given step times, and runs with Inductor, which equal eager and keep the winner."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from compile_callbacks import CompileReport, InductorCompile, InductorConfig, Tune, graph_pass
from tests.support.memory import compiled_graphs, without_automatic_collection
from tests.support.models import Classifier, assert_fits_as_eager, batches_of, fit, loader, seeded, trainer
from tests.support.passes import Doubling, Uncached
from tests.support.step_times import OnDevice, Times, captured_graphs, noisy

BLOCK = 14  # the steps of a block
CONFIGS = [InductorConfig(options=options) for options in ({}, {"epilogue_fusion": False}, {"max_fusion_size": 1})]
A, B, C = (config.describe() for config in CONFIGS)
CUDA_GRAPHS = "reduce-overhead"
HEALED = "dynamo={'capture_scalar_outputs': True}"

pytestmark = [
    pytest.mark.usefixtures("no_codegen"),
    pytest.mark.filterwarnings("ignore:cache_dir has no effect"),  # on captured graphs
]
AT_ONCE = pytest.mark.usefixtures("recompiles_at_once")


def blocks(*milliseconds):
    """The times of steps in blocks of equal steps; the last block repeats."""
    return [ms for ms in milliseconds for _ in range(BLOCK)]


class Tuned:
    """A run with a `Tune` at given step times, and its results.

    ``before`` gets the module and the number of the step before each step.
    """

    def __init__(
        self, ms, candidates=CONFIGS[:1], *, steps=200, sizes=(4,), gpu=False, net=nn.Linear, before=None, folder=None,
        **compiles,
    ):  # fmt: skip
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("get_device_name", "get_device_capability") if gpu else ():
                patch.setattr(torch.cuda, name, lambda *device: "a GPU")
            self.times = Times(patch, train=ms)
            tune = candidates if candidates == "auto" else Tune(candidates)
            ours = InductorCompile(tune, None, verify="off", targets="net", cache_dir=folder)
            data = batches_of(*itertools.islice(itertools.cycle(sizes), steps))
            hook = LambdaCallback(on_train_batch_start=lambda _, module, __, number: before and before(module, number))
            with captured_graphs(self.times, **compiles):
                module = OnDevice("cuda", net(8, 3)) if gpu else Classifier(net(8, 3))
                trainer(ours, hook, max_steps=steps).fit(module, data)
        self.report, self.mode = str(ours.report), ours.report.train.mode
        self.trials = {trial["candidate"]: trial for trial in ours.report.train.diagnostics.trials}
        self.verdicts = {name: trial["verdict"] for name, trial in self.trials.items()}
        self.tried = [name for name in self.trials if name != "eager" and self.blocks(name)]
        records = [json.loads(record.read_text()) for record in folder.glob("*.json")] if folder else []
        self.is_kept = any(record.get("winners") for record in records)

    def blocks(self, name):
        """The number of blocks of a candidate that was not chosen."""
        return self.times.counts["train", name] / BLOCK


# ------------------------------------------------------------------------------------------ noise and disturbances


def drifting(ms, factor):
    """Step times of a machine that becomes faster or slower, by the number of steps so far."""
    steps = itertools.count()
    return lambda candidate, workload: ms[candidate] * factor(next(steps))


NOT_FASTER = "times as fast as eager"
# The times, the number of candidates, the winner, and for A the number of blocks and the reason.
GIVEN = {
    "spikes": ({"eager": noisy(18, 0.1, spikes=0.05), A: noisy(22, 0.1), B: noisy(4.8, 0.1, spikes=0.05),
                C: noisy(6, 0.1)}, 3, B),
    "slower": ({"eager": noisy(10), A: noisy(10.8), B: noisy(14)}, 2, "eager", None, NOT_FASTER),
    "a tie": ({"eager": noisy(10, 0.2), A: noisy(9.95, 0.2), B: noisy(10, 0.2, seed=1)}, 2, "eager", None, NOT_FASTER),
    "becomes faster": (drifting({"eager": 20, A: 20}, lambda n: max(1, 2 - n / 300)), 1, "eager", None, NOT_FASTER),
    "becomes slower": (drifting({"eager": 20, A: 20}, lambda n: min(2, 1 + n / 300)), 1, "eager", None, NOT_FASTER),
    "drift": (drifting({"eager": 20, A: 11.5, B: 10}, lambda n: 1 + n / 600), 2, B),
    "a slow start": (drifting({"eager": 20, A: 10, B: 11.5}, lambda n: 2 if n < 10 else 1), 2, A),
    "two lost rounds": ({"eager": blocks(10.2, 15, 10, 15, 15, 10), A: blocks(10, 10, 15, 10, 10, 15)}, 1, "eager", 6,
                        NOT_FASTER),
    "nine won rounds": ({"eager": blocks(10.2, 15, 15, 15, 10, 15), A: 10}, 1, A),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_the_fastest_is_chosen_if_noise_and_drift_do_not_explain_it(name):
    ms, count, winner, *of_first = GIVEN[name]
    blocks_of_first, reason = of_first or (None, "")
    tuned = Tuned(ms, CONFIGS[:count], steps=420)
    assert (tuned.mode, tuned.verdicts[winner]) == (winner, "chosen")
    others = {verdict for other, verdict in tuned.verdicts.items() if other != winner}
    assert others <= ({"not faster"} if winner == "eager" else {"beaten", "not faster"})
    assert reason in str(tuned.trials[A]["reason"])
    assert blocks_of_first in (None, tuned.blocks(A))


def test_a_final_ends_when_the_run_has_no_steps_for_another_round():
    for steps, rounds in ((83, 1), (84, 2)):
        tuned = Tuned({"eager": blocks(10.2, 15), A: 10}, steps=steps)
        assert (tuned.mode, tuned.blocks(A)) == ("eager", 1 + rounds)
        assert re.search(r"train   eager kept: .*within noise.*; lost \S+ s so far", tuned.report)


# ------------------------------------------------------------------------------------------ failures

ERROR = ZeroDivisionError("by design")


@AT_ONCE
def test_a_candidate_that_fails_is_out_and_the_others_go_on_until_the_final(tmp_path):
    sizes = [4] * (4 * BLOCK + 5) + [5] * 100
    tuned = Tuned({"eager": 10, A: 5, B: 5.2}, CONFIGS[:2], sizes=sizes, steps=150, raises={2: ERROR})
    assert (tuned.mode, tuned.verdicts[A]) == ("eager", "failed")
    tuned = Tuned({"eager": 10, A: 1, B: 5}, CONFIGS[:2], raises={0: ERROR}, folder=tmp_path / "one", steps=90)
    assert (tuned.mode, tuned.verdicts[A], tuned.blocks(A), tuned.is_kept) == (B, "failed", 1, True)
    assert "by design" in tuned.trials[A]["reason"]
    tuned = Tuned({"eager": 10, A: 1}, raises={0: ERROR}, folder=tmp_path / "two", steps=40)
    assert (tuned.mode, tuned.is_kept) == ("eager", False)  # a later run may have a compiler


class Looping(nn.Linear):
    """Has a graph break that a setting removes, in a loop, so that torch skips the frame."""

    def forward(self, x):
        for _ in range(3):
            x = x * (1 + x.abs().max().item())
        return super().forward(x)


def test_a_healed_candidate_that_is_much_faster_is_not_rejected_for_its_graphs_or_for_noise():
    """The candidate and the one that it heals have one block each, whose steps vary."""
    ms = {"eager": noisy(1000, 0.1), A: noisy(900, 0.1, spikes=0.3), HEALED: noisy(300, 0.1)}
    tuned = Tuned(ms, "auto", steps=120, net=Looping)
    assert (tuned.mode, tuned.trials[HEALED]["verdict"]) == (HEALED, "chosen")


# ------------------------------------------------------------------------------------------ which candidates are tried


@pytest.mark.parametrize(
    ("gpu", "steps", "seconds", "tried"),
    [
        (False, 120, 2, 0),  # saves 40 ms of each step at best, and a first compile is expected to take 5 s
        (False, 200, 2, 1),
        (True, 120, 2, 0),
        (True, 280, 2, 2),
    ],
)
def test_auto_tries_candidates_that_may_amortize_their_compile_time(gpu, steps, seconds, tried, tmp_path):
    ms = {"eager": noisy(50, 0.001), "default": 45, CUDA_GRAPHS: noisy(40, 0.001)}
    tuned = Tuned(ms, "auto", steps=steps, gpu=gpu, seconds={0: seconds}, folder=tmp_path)
    assert tuned.tried == ["default", CUDA_GRAPHS][:tried]
    assert (tuned.mode == "eager") == (not tried)
    assert tuned.is_kept == (tried == 1)  # a longer run may choose another one
    if not tried:
        assert "steps that remain could save" in tuned.trials["default"]["reason"]


@pytest.mark.parametrize(("fastest", "steps", "seconds", "tried"), [(0, 600, 60, 2), (1, 150, 1, 2), (1, 600, 36, 3)])
def test_the_kernels_of_the_fastest_candidate_alone_are_tuned(fastest, steps, seconds, tried, tmp_path):
    """BERT on an H200, whose autotuning took over three minutes, with a hundredth of the steps; 1 s is of a cache."""
    names = ["default", CUDA_GRAPHS, ("max-autotune-no-cudagraphs", "max-autotune")[fastest]]
    times = [[3000, 4000], [4000, 3000]][fastest]
    ms = {name: noisy(ms, 0.001) for name, ms in zip(["eager", *names], [4800, *times, 2800], strict=True)}
    tuned = Tuned(ms, "auto", steps=steps, gpu=True, seconds=dict.fromkeys(range(9), float(seconds)), folder=tmp_path)
    assert (list(tuned.trials), tuned.tried) == (["eager", *names], names[:tried])
    assert (tuned.mode, tuned.is_kept) == (names[-1 if tried == 3 else fastest], tried == 3)
    if tried == 2:
        assert "steps that remain could save" in tuned.trials[names[-1]]["reason"]


# ------------------------------------------------------------------------------------------ which steps are compared


@AT_ONCE
@pytest.mark.parametrize(("lengths", "fast"), [(10, True), (250, True), (10**4, False)])
def test_the_first_steps_of_new_shapes_do_not_favor_the_last_candidate(lengths, fast):
    """With attention on a GPU, cuDNN selects a kernel for each new length, in the first candidate that has it."""
    draw, known = random.Random(lengths), set()
    configs = [InductorConfig(dynamic=True, options=config.options) for config in CONFIGS]
    first = configs[0].describe()

    def ms(candidate, workload):
        is_new, _ = workload.shapes not in known, known.add(workload.shapes)
        mean = 16 if candidate == "eager" else 6 if fast and candidate == first else 16.8
        return mean * draw.uniform(1, 1.05) + 90 * is_new

    tuned = Tuned(ms, configs, steps=420, sizes=[2 + draw.randrange(lengths) for _ in range(420)])
    assert tuned.mode == (first if fast else "eager")


# ------------------------------------------------------------------------------------------ runs with Inductor

UNFUSED = CONFIGS[1]
BOTH = Tune(["default", UNFUSED], steps=5)  # with the same results and other code
UNFUSED_IS_FASTER = {"eager": 10, "default": 8, UNFUSED.describe(): 5}


class Raising(Uncached):
    def __call__(self, graph, is_inference):
        raise ERROR


def trials(report, figure=None):
    trials = {trial["candidate"]: trial for trial in report.diagnostics.trials}
    return {name: trial[figure] for name, trial in trials.items()} if figure else trials


verdicts = functools.partial(trials, figure="verdict")


def test_tuned_run_equals_eager_and_continues_with_the_winner(monkeypatch):
    Times(monkeypatch, train=UNFUSED_IS_FASTER, infer={"eager": 10, "default": 5, UNFUSED.describe(): 8})
    ours = InductorCompile(BOTH, BOTH)
    assert_fits_as_eager(ours, {"rtol": 1e-3, "atol": 1e-4}, validation=8, max_epochs=7, num_sanity_val_steps=0)
    train, infer = ours.report.train, ours.report.infer
    assert verdicts(train) == {"eager": "beaten", "default": "beaten", UNFUSED.describe(): "chosen"}
    assert verdicts(infer) == {"eager": "beaten", "default": "chosen", UNFUSED.describe(): "beaten"}
    assert (train.mode, infer.mode) == (UNFUSED.describe(), "default")
    assert (train.speedup, infer.speedup) == (pytest.approx(2), pytest.approx(2))
    assert train.graphs == 1  # of the winner; compile_seconds has all candidates
    assert trials(train)["default"]["compile_seconds"] > 0
    assert [phase.verified for phase in (train, infer)] == [f"equal {phase.graphs}" for phase in (train, infer)]
    assert CompileReport.from_dict(json.loads(json.dumps(ours.report.to_dict()))) == ours.report
    assert "10.00 ms, beaten" in str(ours.report)


def test_candidates_that_fail_or_differ_are_out_without_a_warning(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "passes=[Raising]": 1, "passes=[Doubling]": 1, "default": 9})
    doubling = Doubling(torch.ops.aten.relu.default, torch.ops.aten.addmm.default)
    wrong = [InductorConfig(passes=[Raising()]), InductorConfig(passes=[doubling])]
    ours = InductorCompile(Tune(["reduce-overhead", *wrong, "default"], steps=5), None)
    assert_fits_as_eager(ours, train=60)
    report = ours.report.train
    assert list(verdicts(report).values()) == ["beaten", "not tried", "failed", "wrong", "chosen"]
    assert "not on a GPU" in trials(report)["reduce-overhead"]["reason"]
    assert "by design" in trials(report)["passes=[Raising]"]["reason"]
    assert "train: passes=[Doubling] wrong: " in str(ours.report)
    assert (report.fallbacks, report.verified, report.diagnostics.skipped_passes) == (0, f"equal {report.graphs}", 0)


def test_run_that_ends_early_decides_nothing_and_the_next_one_tunes(monkeypatch):
    ours, module = InductorCompile(Tune(["default"], steps=5), None, verify="off"), seeded()
    ends_with_the_first_compile = LambdaCallback(on_after_backward=lambda *args: 1 / (1 - ours.report.train.graphs))
    with captured_graphs(Times(monkeypatch, train={"eager": 10, "default": 5})):
        with pytest.raises(ZeroDivisionError):
            trainer(ours, ends_with_the_first_compile).fit(module, loader(30))
        assert ours.report.train.mode == "tune(default, steps=5)"
        assert verdicts(ours.report.train) == {"eager": "undecided", "default": "undecided"}
        assert "train   no candidate is chosen yet" in str(ours.report)
        trainer(ours).fit(module, loader(40))
        graphs = ours.report.train.graphs
        trainer(ours).fit(module, loader(40))
    assert (ours.report.train.mode, ours.report.train.graphs) == ("default", graphs)


def test_next_run_takes_the_winner_from_the_cache(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO", logger="lightning.pytorch")

    def run(**settings):
        ours = InductorCompile(BOTH, None, cache_dir=tmp_path, verify="off", **settings)
        with pytest.MonkeyPatch.context() as patch, captured_graphs(Times(patch, train=UNFUSED_IS_FASTER)):
            fit(ours, train=45)
        return ours.report.train

    assert run().mode == UNFUSED.describe()
    (record,) = tmp_path.glob("*.json")
    (winner,) = json.loads(record.read_text())["winners"].values()
    assert winner["candidate"] == UNFUSED.describe()
    again = run()
    assert (again.mode, verdicts(again)["default"]) == (UNFUSED.describe(), "not tried")
    said = f"won in an earlier run; delete {record} to measure again"
    assert trials(again)[UNFUSED.describe()]["reason"] == said
    assert said in caplog.text
    assert again.speedup == pytest.approx(2)
    other = run(passes=[graph_pass(lambda graph, is_inference: None)])  # other conditions
    assert (other.mode, "not tried" in verdicts(other).values()) == (UNFUSED.describe(), False)
    record.write_text(record.read_text().replace(winner["candidate"], "unknown"))
    assert "not tried" not in verdicts(run()).values()


def test_code_of_a_losing_candidate_is_freed(monkeypatch):
    def graphs_in_the_last_step(mode):
        torch.compiler.reset()  # frees the graphs of other tests
        with without_automatic_collection():
            counts = [compiled_graphs()]
            count = LambdaCallback(on_train_epoch_end=lambda *args: counts.append(compiled_graphs()))
            fit(InductorCompile(mode, None), count, train=60)
        return counts[-1] - counts[0]

    Times(monkeypatch, train={"eager": 10, "default": 5, None: 5, UNFUSED.describe(): 8})
    assert graphs_in_the_last_step(BOTH) == graphs_in_the_last_step("default") > 0
