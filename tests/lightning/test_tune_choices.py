"""The decisions of a `Tune` at given step times: the candidates that are tried, compared and chosen."""

from __future__ import annotations

import itertools
import json
import random

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from compile_callbacks import InductorCompile, InductorConfig, Tune
from tests.support.models import Classifier, batches_of, trainer
from tests.support.step_times import OnGpu, Times, captured_graphs, noisy

BLOCK = 14  # the steps of a block
CONFIGS = [InductorConfig(options=options) for options in ({}, {"epilogue_fusion": False}, {"max_fusion_size": 1})]
A, B, C = (config.describe() for config in CONFIGS)
CUDA_GRAPHS, TUNED = "reduce-overhead", ["max-autotune", "max-autotune-no-cudagraphs"]

pytestmark = pytest.mark.filterwarnings("ignore:cache_dir has no effect")


def blocks(*milliseconds):
    """The times of steps in blocks of equal steps; the last block repeats."""
    return [ms for ms in milliseconds for _ in range(BLOCK)]


class Net(Classifier):
    def __init__(self, gpu=False):
        super().__init__(nn.Linear(8, 3))
        if gpu:
            self._parameters["on_gpu"] = OnGpu(torch.zeros(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1)


class Before(pl.Callback):
    """Calls a function before each step with the module and the number of the step."""

    def __init__(self, call):
        self.on_train_batch_start = lambda trainer, module, batch, number: call(module, number)


class Tuned:
    """A run with a `Tune` at given step times, and its results."""

    def __init__(
        self,
        ms,
        candidates=CONFIGS[:1],
        *,
        steps=200,
        sizes=(4,),
        gpu=False,
        make=Net,
        before=None,
        compiles=None,
        folder=None,
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("get_device_name", "get_device_capability") if gpu else ():
                patch.setattr(torch.cuda, name, lambda *device: "a GPU")
            self.times = Times(patch, train=ms)
            tune = candidates if candidates == "auto" else Tune(candidates)
            ours = InductorCompile(tune, None, verify="off", targets="net", cache_dir=folder)
            data = batches_of(*itertools.islice(itertools.cycle(sizes), steps))
            callbacks = [] if before is None else [Before(before)]
            with captured_graphs(self.times, **(compiles or {})):
                trainer(ours, *callbacks, max_steps=steps).fit(make(gpu), data)
        self.mode = ours.report.train.mode
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


GIVEN = {
    "noise": ({"eager": noisy(18, 0.1), A: noisy(22, 0.1), B: noisy(4.8, 0.1), C: noisy(6, 0.1)}, B),
    "spikes": ({"eager": noisy(18, 0.1, spikes=0.05), A: noisy(22, 0.1), B: noisy(4.8, 0.1, spikes=0.05)}, B),
    "slower": ({"eager": noisy(10), A: noisy(10.8), B: noisy(14)}, "eager"),
    "a tie": ({"eager": noisy(10, 0.2), A: noisy(9.95, 0.2), B: noisy(10, 0.2, seed=1)}, "eager"),
    "a machine becomes faster": (drifting({"eager": 20, A: 20}, lambda n: max(1, 2 - n / 300)), "eager"),
    "a machine becomes slower": (drifting({"eager": 20, A: 20}, lambda n: min(2, 1 + n / 300)), "eager"),
    "drift": (drifting({"eager": 20, A: 11.5, B: 10}, lambda n: 1 + n / 600), B),
    "a slow start": (drifting({"eager": 20, A: 10, B: 11.5}, lambda n: 2 if n < 10 else 1), A),
    "two lost rounds": ({"eager": blocks(10.2, 15, 10, 15, 15, 10), A: blocks(10, 10, 15, 10, 10, 15)}, "eager"),
    "nine won rounds": ({"eager": blocks(10.2, 15, 15, 15, 10, 15), A: 10}, A),
}


@pytest.mark.parametrize("name", GIVEN)
def test_the_fastest_is_chosen_if_noise_and_drift_do_not_explain_it(name):
    ms, winner = GIVEN[name]
    count = len(ms) - 1 if isinstance(ms, dict) else 2 if name in ("drift", "a slow start") else 1
    tuned = Tuned(ms, CONFIGS[:count], steps=420)
    assert tuned.mode == winner
    assert tuned.verdicts[winner] == "chosen"
    others = {verdict for other, verdict in tuned.verdicts.items() if other != winner}
    assert others <= ({"not faster"} if winner == "eager" else {"beaten", "not faster"})
    if winner == "eager":
        assert "times as fast as eager" in tuned.trials[A]["reason"]
    if name == "two lost rounds":
        assert tuned.blocks(A) == 6
    if name == "nine won rounds":
        assert tuned.trials[A]["reason"] == "it was faster than eager in 9 of 10 rounds"


@pytest.mark.parametrize(("steps", "rounds"), [(83, 1), (84, 2)])
def test_a_final_ends_when_the_run_has_no_steps_for_another_round(steps, rounds):
    tuned = Tuned({"eager": blocks(10.2, 15), A: 10}, steps=steps)
    assert (tuned.mode, tuned.blocks(A)) == ("eager", 1 + rounds)
    assert "within noise" in tuned.trials[A]["reason"]


# ------------------------------------------------------------------------------------------ failures

ERROR = ZeroDivisionError("by design")


@pytest.mark.usefixtures("recompiles_at_once")
def test_if_the_finalist_fails_the_next_candidate_is_in_the_final():
    sizes = [4] * (4 * BLOCK + 5) + [5] * 100
    tuned = Tuned({"eager": 10, A: 5, B: 5.2}, CONFIGS[:2], sizes=sizes, steps=150, compiles={"raises": {2: ERROR}})
    assert (tuned.mode, tuned.verdicts[A]) == (B, "failed")


def test_a_candidate_that_fails_is_out_and_the_others_go_on(tmp_path):
    failing = {"raises": {0: ERROR}}
    tuned = Tuned({"eager": 10, A: 1, B: 5}, CONFIGS[:2], compiles=failing, folder=tmp_path / "one", steps=90)
    assert (tuned.mode, tuned.verdicts[A], tuned.blocks(A), tuned.is_kept) == (B, "failed", 1, True)
    assert "by design" in tuned.trials[A]["reason"]
    tuned = Tuned({"eager": 10, A: 1}, compiles=failing, folder=tmp_path / "two", steps=40)
    assert (tuned.mode, tuned.is_kept) == ("eager", False)  # a later run may have a compiler


class Breaking(Net):
    """Has a graph break that a setting removes."""

    def __init__(self, gpu):
        super().__init__(gpu)
        self.net.register_forward_hook(lambda module, inputs, out: out * (1 + out.abs().max().item()))


@pytest.mark.usefixtures("recompiles_at_once")
def test_new_shapes_in_the_final_do_not_end_the_trial_of_a_healed_candidate():
    healed, sizes = "dynamo={'capture_scalar_outputs': True}", [4] * (4 * BLOCK + 5) + [5] * 200
    tuned = Tuned({"eager": 1000, A: 800, healed: 500}, "auto", sizes=sizes, steps=120, make=Breaking)
    assert tuned.mode == healed
    assert tuned.trials[healed]["reason"] == "capture_scalar_outputs removed 1 of 1 graph breaks: 1.6x"


class Looping(Net):
    """Has a graph break in a loop, so that torch skips the frame."""

    def __init__(self, gpu):
        super().__init__(gpu)
        self.net = Scaling(8, 3)


class Scaling(nn.Linear):
    def forward(self, x):
        for _ in range(3):
            x = x * (1 + x.abs().max().item())
        return super().forward(x)


@pytest.mark.parametrize("make", [Breaking, Looping])
def test_a_healed_candidate_that_is_much_faster_is_not_rejected_for_its_graphs_or_for_noise(make):
    """The candidate and the one that it heals have one block each, whose steps vary."""
    healed = "dynamo={'capture_scalar_outputs': True}"
    ms = {"eager": noisy(1000, 0.1), A: noisy(900, 0.1, spikes=0.3), healed: noisy(300, 0.1)}
    tuned = Tuned(ms, "auto", steps=120, make=make)
    assert (tuned.mode, tuned.trials[healed]["verdict"]) == (healed, "chosen")


# ------------------------------------------------------------------------------------------ which candidates are tried


@pytest.mark.parametrize(
    ("gpu", "steps", "seconds", "tried"),
    [
        (False, 20, 2, 0),  # saves 0.2 s at best, and a first compile is expected to take 4 s
        (False, 200, 2, 2),
        (False, 200, 50, 1),
        (True, 180, 2, 0),  # 40 ms of each step at best, and 10 s
        (True, 280, 2, 2),
    ],
)
def test_auto_tries_candidates_that_may_amortize_their_compile_time(gpu, steps, seconds, tried, tmp_path):
    first, second = "default", CUDA_GRAPHS if gpu else "dynamic=True"
    ms, compiles = {"eager": noisy(50, 0.001), first: 45, second: noisy(40, 0.001)}, {"seconds": {0: seconds}}
    sizes = (4,) if gpu else (4, 5, 6)
    tuned = Tuned(ms, "auto", steps=steps, sizes=sizes, gpu=gpu, compiles=compiles, folder=tmp_path)
    assert tuned.tried == [first, second][:tried]
    assert (tuned.mode == "eager") == (not tried)
    assert tuned.is_kept == (tried == 2 and not gpu)  # a longer run may choose another one
    if not tried:
        assert "steps that remain could save" in tuned.trials[first]["reason"]


@pytest.mark.parametrize(("steps", "tried"), [(150, 2), (600, 3)])
def test_tuned_kernels_are_expected_to_be_little_faster_than_the_same_mode_without_tuning(steps, tried, tmp_path):
    """As BERT on an H200, whose autotuning took more than three minutes, with a hundredth of the steps."""
    names = ["default", CUDA_GRAPHS, *TUNED]
    ms = {name: noisy(ms, 0.001) for name, ms in zip(["eager", *names], [4800, 4000, 3000, 2800, 3800], strict=True)}
    compiles = {"seconds": dict.fromkeys(range(9), 36.0)}
    tuned = Tuned(ms, "auto", steps=steps, gpu=True, compiles=compiles, folder=tmp_path)
    assert tuned.tried == names[:tried]
    assert "its steps could take" in tuned.trials[names[-1]]["reason"]
    assert (tuned.mode, tuned.is_kept) == (names[tried - 1], tried == 3)  # a longer run tries one more candidate


# ------------------------------------------------------------------------------------------ which steps are compared


@pytest.mark.parametrize(
    ("gpu", "candidates"),
    [
        (False, ["default", "dynamic=True"]),
        (True, ["default", "dynamic=True", CUDA_GRAPHS, *TUNED[1:], f"{TUNED[1]}, dynamic=True", TUNED[0]]),
    ],
)
def test_auto_has_dynamic_candidates_if_shapes_vary(gpu, candidates):
    tuned = Tuned({"eager": 1}, "auto", gpu=gpu, sizes=(4, 5, 6), steps=20)
    assert list(tuned.trials) == ["eager", *candidates]


def test_the_usual_workload_is_compared():
    def ms(candidate, workload):
        return {"eager": (10, 1), A: (5, 20)}[candidate][workload.shapes[0][0] == 3]

    tuned = Tuned(ms, sizes=[8] * 6 + [3] * 4)
    assert (tuned.mode, tuned.trials[A]["median_ms"]) == (A, pytest.approx(5))


def freezes_a_weight(module, number):
    """Changes the workload of all steps after the first block."""
    if number == BLOCK:
        module.net.bias.requires_grad_(False)


def resets(module, number):
    if BLOCK <= number < 6 * BLOCK and number % 2 == 0:
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("mode", "before", "blocks"),
    [(CUDA_GRAPHS, freezes_a_weight, 16), (A, freezes_a_weight, 4), (CUDA_GRAPHS, resets, 4)],
)
def test_a_candidate_without_comparable_steps_ends(mode, before, blocks, tmp_path):
    tuned = Tuned({"eager": 15, mode: 5}, [mode], before=before, gpu=True, steps=250, folder=tmp_path)
    assert (tuned.mode, tuned.blocks(mode), tuned.is_kept) == ("eager", blocks, False)
    assert tuned.trials[mode]["reason"] == "only 0 steps can be compared"


@pytest.mark.usefixtures("recompiles_at_once")
def test_a_candidate_that_records_a_cuda_graph_for_each_shape_runs_until_its_steps_can_be_compared():
    sizes, ms = range(3, 63), {"eager": noisy(15), CUDA_GRAPHS: noisy(6)}
    tuned = Tuned(ms, [CUDA_GRAPHS], sizes=sizes, gpu=True, steps=350, compiles={"recorded": range(9)})
    assert tuned.mode == CUDA_GRAPHS


@pytest.mark.usefixtures("recompiles_at_once")
@pytest.mark.parametrize(("lengths", "fast"), [(10, True), (40, False), (250, True), (10**4, False)])
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
