"""The decisions of a `Tune` on simulated step times."""

from __future__ import annotations

import math
import random
import types
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest
import torch

from compile_callbacks import InductorConfig, Tune
from compile_callbacks.config.inductor_config import Variant
from compile_callbacks.profiling.events import CompileEvent
from compile_callbacks.profiling.steps import Workload
from compile_callbacks.tuning.candidates import auto_candidates
from compile_callbacks.tuning.ranks import Ranks
from compile_callbacks.tuning.trial import Block, Trial, compared_workload
from compile_callbacks.tuning.tuner import Tuner
from compile_callbacks.tuning.tuning_policy import TuningPolicy


@dataclass
class Machine:
    """Simulates steps. The first step of a candidate compiles; it and the two steps after it are no samples."""

    mean_ms: dict[str, float]  # the step time of each candidate
    noise: float = 0.05  # the standard deviation of a step time, relative to its mean
    compile_seconds: dict[str, float] = field(default_factory=dict)  # of each candidate; 2 if it is not named
    spikes: float = 0.0  # how often a step takes ten times as long
    drift: Callable[[int], float] = lambda n: 1  # the factor of a step time, by the number of steps so far
    fails: Collection[str] = ()  # candidates that fail
    seed: int = 0

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.blocks: list[str] = []
        self.steps = 0

    def step_ms(self, name):
        ms = self.mean_ms[name] * self.drift(self.steps) * (1 + self.noise * abs(self.random.gauss(0, 1)))
        return ms * 10 if self.random.random() < self.spikes else ms

    def block(self, name, steps):
        warmup = 1 if name in self.blocks else 2 if name == "eager" else 3
        compile_seconds = 0.0 if name == "eager" else self.compile_seconds.get(name, 2.0)
        milliseconds = []
        for number in range(3 + steps):
            ms = self.step_ms(name)
            self.steps += 1
            if number >= warmup:
                milliseconds.append(ms)
        self.blocks.append(name)
        problem = ("failed", "by design") if name in self.fails else None
        return Block(milliseconds, compile_seconds, problem, 3 + steps)

    def run(self, tuner, configs=None, *, blocks=200):
        """Run until the tuner has chosen, or for a number of blocks; returns the winner."""
        configs = configs or dict.fromkeys("abc")
        for _ in range(blocks):
            if tuner.winner is not None:
                break
            tuner.block_ends(self.block(tuner.candidate, tuner._tune.steps))
            if tuner.needs_candidates:
                tuner.start([Trial(Variant(config, name)) for name, config in configs.items() if name in self.mean_ms])
        return tuner.winner


def tuner_of(candidates=("default",)):
    return Tuner(Tune(candidates))


def started(*variants, eager=(10.0,) * 10, candidates=("default",), **block):
    """A tuner after the first block of eager steps, whose candidates are "a", "b" and so on, or these variants."""
    tuner = tuner_of(candidates)
    tuner.block_ends(Block([*eager], steps=14, **block))
    tuner.start([Trial(Variant(None, each) if isinstance(each, str) else each) for each in variants])
    return tuner


def play(tuner, *blocks):
    """Run blocks, each given as the candidate that the tuner has to want, and what its `Block` contains."""
    for name, milliseconds, seconds, *problem in blocks:
        assert tuner.candidate == name
        tuner.block_ends(Block(milliseconds, seconds, *problem, steps=14))


def verdicts(tuner):
    return {name: trial.verdict for name, trial in tuner.trials.items()}


def reason(tuner, name):
    return tuner.trials[name].reason


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("spikes", [0.0, 0.05])
def test_tuner_chooses_the_fastest_in_noise(seed, spikes):
    tuner = tuner_of()
    machine = Machine({"eager": 18, "a": 22, "b": 4.8, "c": 6}, noise=0.1, spikes=spikes, seed=seed)
    assert machine.run(tuner) == "b"
    assert verdicts(tuner) | {"a": "beaten"} == {"eager": "beaten", "a": "beaten", "b": "chosen", "c": "beaten"}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("mean_ms", "noise"), [({"a": 10.8, "b": 14}, 0.03), ({"a": 9.95, "b": 10}, 0.2)])
def test_eager_wins_ties_and_against_slower_candidates(mean_ms, noise, seed):
    tuner = tuner_of()
    assert Machine({"eager": 10, **mean_ms}, noise=noise, seed=seed).run(tuner) == "eager"
    assert "times as fast as eager" in reason(tuner, "a")


@pytest.mark.parametrize(("speedup", "wins"), [(1.0, range(3)), (1.1, range(35, 51)), (1.3, range(48, 51))])
def test_more_rounds_decide_if_the_machine_is_busy(speedup, wins):
    def chooses(seed):
        draw = random.Random(seed)
        others = [1 + 0.3 * abs(draw.gauss(0, 1)) for _ in range(20)]  # what other programs slow, for 40 steps
        machine = Machine({"eager": 20, "a": 20 / speedup}, noise=0.1, drift=lambda n: others[n // 40], seed=seed)
        return machine.run(tuner_of())

    assert [chooses(seed) for seed in range(50)].count("a") in wins


def final_of():
    """Return a tuner at the start of a final. The first block was disturbed, so the interval stays too wide."""
    tuner = started("a", eager=[10.2] * 10)
    tuner.block_ends(Block([10.0] * 10, compile_seconds=1.0, steps=14))
    return tuner


def test_two_lost_rounds_end_the_final():
    tuner = final_of()
    for number, (eager_ms, ms) in enumerate([(15, 10), (10, 15), (15, 10), (15, 10), (10, 15)]):
        blocks = [("eager", [eager_ms] * 10, 0.0), ("a", [ms] * 10, 0.0)]
        play(tuner, *(blocks if number % 2 == 0 else reversed(blocks)))
    assert (tuner.winner, verdicts(tuner)["a"]) == ("eager", "not faster")


def test_nine_won_rounds_of_ten_decide_the_final():
    tuner, blocks = final_of(), 0
    while tuner.winner is None:
        milliseconds = [10.0 if tuner.candidate == "a" or blocks // 2 == 3 else 15.0] * 10
        blocks += 1
        tuner.block_ends(Block(milliseconds, steps=14))
    assert (tuner.winner, blocks) == ("a", 20)
    assert reason(tuner, "a") == "it was faster than eager in 9 of 10 rounds"


@pytest.mark.parametrize("steps_left", [28 + 27, 28 + 28])
def test_a_final_ends_when_the_run_has_no_steps_for_another_round(steps_left):
    tuner, blocks = final_of(), 0
    tuner.steps_left = steps_left
    while tuner.winner is None:
        tuner.block_ends(Block([10.0 if tuner.candidate == "a" else 15.0] * 10, steps=14))
        blocks += 1
    assert (tuner.winner, blocks) == ("eager", steps_left // 28 * 2)
    assert "within noise" in reason(tuner, "a")
    assert not tuner.lasts


@pytest.mark.parametrize("drift", [lambda n: max(1, 2 - n / 300), lambda n: min(2, 1 + n / 300)])
def test_a_machine_that_becomes_faster_or_slower_does_not_win_rounds(drift):
    machines = [Machine({"eager": 20, "a": 20}, noise=0.02, drift=drift, seed=seed) for seed in range(50)]
    assert [machine.run(tuner_of()) for machine in machines].count("a") <= 1


@pytest.mark.parametrize("verdict", ["failed", "wrong"])
def test_if_the_finalist_fails_the_next_candidate_is_in_the_final(verdict):
    tuner = started("a", "b")
    a, b, eager = ("a", [5.0] * 10, 1.0), ("b", [5.2] * 10, 1.0), ("eager", [10.0] * 10, 0.0)
    play(tuner, a, b, eager, (*a, (verdict, "in the final")), eager, b)
    assert (tuner.winner, verdicts(tuner)["a"]) == ("b", verdict)


def test_new_shapes_in_the_final_do_not_end_the_trial_of_a_healed_candidate():
    tuner = started(Variant(InductorConfig(), "default"), candidates="auto")
    breaks = {"graphs": 2, "breaks": 1, "healing": ("capture_scalar_outputs",)}
    tuner.block_ends(Block([8.0] * 10, 1.0, steps=14, **breaks))
    healed = tuner.candidate
    for name, ms, graphs in ((healed, 5.0, 1), ("eager", 10.0, 0), (healed, 5.0, 2)):
        assert tuner.candidate == name
        tuner.block_ends(Block([ms] * 10, 1.0 * graphs, steps=14, graphs=graphs))
    assert tuner.winner == healed
    assert reason(tuner, healed) == "capture_scalar_outputs removed 1 of 1 graph breaks: 1.6x"


@pytest.mark.parametrize("drift", [lambda n: 1 + n / 600, lambda n: 2 if n < 10 else 1])
def test_a_machine_that_changes_its_speed_does_not_change_the_winner(drift):
    for fast, slow in (("a", "b"), ("b", "a")):
        machine = Machine({"eager": 20, fast: 10, slow: 11.5}, noise=0.01, drift=drift)
        assert machine.run(tuner_of()) == fast


def test_a_candidate_that_fails_is_out_and_the_others_go_on():
    tuner, machine = tuner_of(), Machine({"eager": 10, "a": 1, "b": 5}, fails=["a"])
    assert machine.run(tuner) == "b"
    assert machine.blocks.count("a") == 1
    assert (verdicts(tuner)["a"], reason(tuner, "a")) == ("failed", "by design")
    assert tuner.worth_keeping
    none_left = tuner_of()
    assert Machine({"eager": 10, "a": 1}, fails=["a"]).run(none_left) == "eager"
    assert not none_left.worth_keeping  # a later run may have a compiler


@pytest.mark.parametrize(
    ("device", "steps_left", "compile_seconds", "tried"),
    [
        ("cpu", 100, 2, []),  # saves 0.5 s at best, and a first compile is expected to take 4 s
        ("cpu", 900, 2, ["a", "b"]),
        ("cpu", 900, 50, ["a"]),
        ("cuda", 900, 2, []),  # 8 ms of each step at best, and 10 s
        ("cuda", 1400, 2, ["a", "b"]),
        ("cpu", math.inf, 500, ["a", "b"]),
    ],
)
def test_auto_tries_candidates_that_may_amortize_their_compile_time(device, steps_left, compile_seconds, tried):
    tuner = Tuner(Tune("auto"), device)
    tuner.steps_left = steps_left
    machine = Machine({"eager": 10, "a": 9, "b": 8}, noise=0.001, compile_seconds={"a": compile_seconds})
    machine.run(tuner)
    assert [name for name in "ab" if tuner.trials[name].blocks] == tried
    assert (tuner.winner == "eager") == (not tried)
    assert tuner.worth_keeping == (len(tried) == 2)  # a longer run may choose another one
    if not tried:
        assert "steps that remain could save" in reason(tuner, "a")
        assert not tuner.lasts


@pytest.mark.parametrize(
    ("steps", "tried"),
    [
        # BERT on an H200: autotuning took more than three minutes, and 15,000 steps take 450 s.
        (15_000, ["default", "reduce-overhead"]),
        # With CUDA graphs and tuned kernels, 6 ms of each step at best.
        (60_000, ["default", "reduce-overhead", "max-autotune"]),
        (math.inf, ["default", "reduce-overhead", "max-autotune"]),
    ],
)
def test_tuned_kernels_are_expected_to_be_little_faster_than_the_same_mode_without_tuning(steps, tried):
    tuner = Tuner(Tune("auto"), "cuda")
    tuner.steps_left = steps
    configs = {config.describe(): config for config in auto_candidates(torch.device("cuda"), "train")}
    step_ms = dict(zip(["eager", *configs], [48, 40, 30, 38, 28], strict=True))
    machine = Machine(step_ms, noise=0.001, compile_seconds=dict.fromkeys(configs, 36.0))
    machine.run(tuner, configs)
    assert [name for name in configs if tuner.trials[name].blocks] == tried
    assert "its steps could take" in reason(tuner, "max-autotune-no-cudagraphs")
    assert tuner.winner == tried[-1]
    assert tuner.worth_keeping == (steps > 15_000)  # a longer run tries one more candidate


def test_the_usual_workload_is_compared_or_all_shapes_if_none_is_usual():
    full, ragged = Workload("train", "", ((32,),)), Workload("train", "", ((3,),))
    assert compared_workload(Counter({full: 6, ragged: 4})) == full
    sizes = Counter({Workload("train", "", ((size,),)): 1 for size in range(9)})
    assert compared_workload(sizes) == Workload("train", "", ())


def test_a_block_with_too_few_comparable_steps_runs_again():
    tuner = tuner_of()
    tuner.block_ends(Block([10.0] * 4, steps=13))
    assert tuner.candidate == "eager"
    tuner.block_ends(Block([10.0] * 4, steps=13))
    tuner.start([Trial(Variant(None, "a"))])
    for number in range(4):  # each block compiles
        assert tuner.candidate == "a"
        tuner.block_ends(Block([5.0], compile_seconds=number + 1, steps=13))
    assert (tuner.winner, reason(tuner, "a")) == ("eager", "only 4 steps can be compared")
    assert not tuner.worth_keeping


def test_a_candidate_that_records_a_cuda_graph_for_each_shape_runs_until_its_steps_can_be_compared():
    graphs = Variant(InductorConfig(mode="reduce-overhead"), "a")
    tuner = started(graphs, eager=[15.0, 15.5] * 3, unseen_shapes_ms=[100.0] * 8)
    for _ in range(10):  # a recording in one of three steps leaves no sample
        assert tuner.candidate == "a"
        tuner.block_ends(Block([], compile_seconds=18.0, steps=14, settled=True, unseen_shapes_ms=[7.0]))
    a = "a", [6.0, 6.1] * 3, 18.0
    play(tuner, a, ("eager", [15.0, 15.1] * 3, 0.0), a)
    assert tuner.winner == "a"


@pytest.mark.parametrize(("mode", "blocks"), [("reduce-overhead", 16), ("default", 4)])
def test_a_candidate_without_comparable_steps_ends(mode, blocks):
    """For example after the user's code has unfrozen weights, which changes the workload."""
    tuner = started(Variant(InductorConfig(mode=mode), "a"), eager=[15.0] * 6)
    for _ in range(blocks):
        assert tuner.candidate == "a"
        tuner.block_ends(Block([], compile_seconds=18.0, steps=14, settled=True))
    assert (tuner.winner, reason(tuner, "a")) == ("eager", "only 0 steps can be compared")


@pytest.mark.parametrize("lengths", [10, 40, 120, 250, 600, 10**6])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_the_first_steps_of_new_shapes_do_not_favor_the_last_candidate(lengths, fast, seed):
    """With attention on a GPU, cuDNN selects a kernel for each new length, in the first candidate that has it."""
    draw, known, seen = random.Random(seed), set(), Counter()
    tuner = tuner_of()
    mean_ms = {"eager": 16.0, **({"a": 6.0} if fast else {}), **dict.fromkeys("bcdefg", 16.8)}
    while tuner.winner is None:
        milliseconds, new = [], []
        for number in range(14):
            length = draw.randrange(lengths)
            ms = mean_ms[tuner.candidate] * draw.uniform(1, 1.05) + (0 if length in known else 90)
            if number > 3:
                (milliseconds if seen[tuner.candidate, length] else new).append(ms)
            known.add(length)
            seen[tuner.candidate, length] += 1
        tuner.block_ends(Block(milliseconds, 1.0, steps=14, settled=True, unseen_shapes_ms=new))
        if tuner.needs_candidates:
            tuner.start([Trial(Variant(None, name)) for name in list(mean_ms)[1:]])
    assert tuner.winner == ("a" if fast else "eager"), {name: t.median_ms for name, t in tuner.trials.items()}


@pytest.mark.parametrize(("part", "settled"), [("cudagraph", True), ("graph", False), ("backward", False)])
def test_recording_a_cuda_graph_is_no_compile(part, settled):
    earlier = CompileEvent(
        kind="compile", target="net", phase="train", candidate="eager", part="graph", seconds=1.0, graphs=1
    )
    recorder = types.SimpleNamespace(events=[earlier], collect=lambda: None)
    policy = TuningPolicy("train", Tune(["reduce-overhead"]), recorder, Ranks(), print)
    policy.begin(torch.device("cpu"), {}, None, no_freezing=None, no_cudagraphs=None)
    assert policy._block().settled
    recorder.events.append(
        CompileEvent(kind="compile", target="net", phase="train", candidate="eager", part=part, seconds=0.2)
    )
    assert policy._block().settled == settled
