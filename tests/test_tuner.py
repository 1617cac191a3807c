"""The decisions of a `Tune`, on made-up noisy times: no torch, no clock."""

from __future__ import annotations

import math
import random

import pytest
import torch

from compile_callbacks.measuring.step_stats import StepStats
from compile_callbacks.measuring.work import Work
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.tuning.auto import LEAST_COMPILE_SECONDS, compile_estimate, why_not_affordable, why_not_repaid
from compile_callbacks.tuning.trial import Known
from compile_callbacks.tuning.tuner import Tuner

pytestmark = pytest.mark.newest


class Machine:
    """Steps of made-up length; a candidate's first step compiles, and is no sample, nor are the two after it.

    Args:
        mean_ms: Each candidate's step.
        noise: Standard deviation of a step's time over its length.
        compile_seconds: What a candidate's first step takes beside; 2 where it is not named.
        spikes: How often a step takes ten times as long.
        drift: What a step's length is multiplied with, by the number of steps so far.
        fails: Candidates that fail in their first step.
    """

    def __init__(self, mean_ms, *, noise=0.05, compile_seconds=None, spikes=0.0, drift=lambda n: 1, fails=(), seed=0):
        self.mean_ms, self.noise, self.spikes, self.drift, self.fails = mean_ms, noise, spikes, drift, fails
        self.compile_seconds = compile_seconds or {}
        self.random = random.Random(seed)
        self.ran: list[str] = []
        self.times: dict[str, dict[str, list[float]]] = {}

    def step_ms(self, name):
        length = self.mean_ms[name] * self.drift(len(self.ran)) * (1 + self.noise * abs(self.random.gauss(0, 1)))
        return length * 10 if self.random.random() < self.spikes else length

    def run(self, tuner, steps=1000, work=lambda n: "w", remembers=None):
        """What is chosen, after at most so many steps."""
        for _ in range(steps):
            if tuner.winner is not None:
                return tuner.winner
            name = tuner.candidate
            compiles = name != "eager" and name not in self.ran
            seconds = self.compile_seconds.get(name, 2.0) if compiles else 0.0
            sample = self.ran.count(name) > 2
            length = self.step_ms(name)
            self.ran.append(name)
            if sample:
                self.times.setdefault(name, {}).setdefault(Work(work(len(self.ran))), []).append(length)
            over = tuner.step_ends(sample=sample, seconds=seconds + length / 1000, compile_seconds=seconds)
            if name in self.fails:
                tuner.rule_out("failed", "by design")
            elif over:
                tuner.measured(self.times.get(name, {}))
                if remembers is not None:
                    tuner.remember(*remembers)
                    remembers = None
                if tuner.winner is None:
                    tuner.block_ends()
        return tuner.winner


def verdicts(tuner):
    return {trial.candidate: trial.verdict for trial in tuner.trials()}


def reasons(tuner):
    return {trial.candidate: trial.reason for trial in tuner.trials()}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spikes", [0.0, 0.05])
def test_throughput_chooses_the_fastest_in_noise(seed, spikes):
    machine = Machine({"eager": 18, "a": 22, "b": 4.8, "c": 6}, noise=0.1, spikes=spikes, seed=seed)
    tuner = Tuner(["a", "b", "c"])
    assert machine.run(tuner) == "b"
    assert verdicts(tuner) == {"eager": "beaten", "a": "not faster", "b": "chosen", "c": "beaten"}


def test_what_is_clear_is_decided_before_all_steps_are_taken():
    machine = Machine({"eager": 18, "a": 5}, noise=0.02)
    tuner = Tuner(["a"], steps=100)
    assert machine.run(tuner) == "a"
    assert len(machine.ran) < 40
    close = Machine({"eager": 5.05, "a": 5}, noise=0.3)
    close.run(Tuner(["a"], steps=100))
    assert len(close.ran) > 200


@pytest.mark.parametrize("seed", range(20))
def test_what_is_slower_than_eager_is_never_chosen(seed):
    for rule in ("throughput", "latency", "first"):
        machine = Machine({"eager": 10, "a": 10.8, "b": 14}, noise=0.03, seed=seed)
        tuner = Tuner(["a", "b"], rule=rule)
        assert machine.run(tuner) == "eager", rule
        assert set(verdicts(tuner).values()) == {"chosen", "not faster"}
        assert "times as fast as eager" in reasons(tuner)["a"]


def test_a_gain_below_min_speedup_is_not_enough():
    machine = Machine({"eager": 10, "a": 9}, noise=0)
    assert machine.run(Tuner(["a"], min_speedup=1.2)) == "eager"
    assert Machine({"eager": 10, "a": 9}, noise=0).run(Tuner(["a"], min_speedup=1.1)) == "a"


@pytest.mark.parametrize("drift", [lambda n: 1 + n / 60, lambda n: 2 if n < 20 else 1])
def test_a_machine_that_slows_down_or_speeds_up_does_so_for_all(drift):
    for fast, slow in (("a", "b"), ("b", "a")):
        machine = Machine({"eager": 20, fast: 10, slow: 11.5}, noise=0.01, drift=drift)
        assert machine.run(Tuner(["a", "b"])) == fast


def test_candidates_take_turns_in_blocks_and_back_again():
    machine = Machine({"eager": 10, "a": 9.9, "b": 9.9}, noise=0.2)
    machine.run(Tuner(["a", "b"], steps=10))
    blocks = [name for i, name in enumerate(machine.ran) if i == 0 or machine.ran[i - 1] != name]
    assert blocks == ["eager", "a", "b", "a", "eager"]


def test_latency_looks_at_the_slow_steps():
    class Spiky(Machine):
        def step_ms(self, name):
            slow = name == "a" and self.ran.count(name) % 8 == 7
            return super().step_ms(name) * (5 if slow else 1)

    times = {"eager": 20, "a": 5, "b": 7}
    assert Spiky(times).run(Tuner(["a", "b"], rule="throughput")) == "a"
    assert Spiky(times).run(Tuner(["a", "b"], rule="latency")) == "b"


def test_first_takes_the_first_that_passes_and_compiles_no_other():
    machine = Machine({"eager": 10, "a": 12, "b": 9, "c": 1})
    tuner = Tuner(["a", "b", "c"], rule="first")
    assert machine.run(tuner) == "b"
    assert "c" not in machine.ran
    assert verdicts(tuner)["c"] == "not tried"
    assert "b was chosen before its turn" in reasons(tuner)["c"]


def test_first_waits_for_a_candidate_that_is_not_clear():
    machine = Machine({"eager": 10, "a": 9.5, "b": 1}, noise=0.4, seed=3)
    tuner = Tuner(["a", "b"], rule="first")
    machine.run(tuner)
    before_b = machine.ran[: machine.ran.index("b")] if "b" in machine.ran else machine.ran
    assert min(before_b.count("eager"), before_b.count("a")) >= 20


@pytest.mark.parametrize(
    ("budget_ms", "winner", "compiled"),
    [(30, "eager", []), (16, "a", ["a"]), (9, "b", ["a", "b"]), (1, "b", ["a", "b", "c"])],
)
def test_latency_budget_takes_the_first_within_it_else_the_fastest(budget_ms, winner, compiled):
    machine = Machine({"eager": 20, "a": 12, "b": 6, "c": 9})
    tuner = Tuner(["a", "b", "c"], rule="latency_budget", latency_budget_ms=budget_ms)
    assert machine.run(tuner) == winner
    assert [name for name in ("a", "b", "c") if name in machine.ran] == compiled


def test_a_failure_is_out_and_the_others_go_on():
    for rule in ("throughput", "first", "latency"):
        machine = Machine({"eager": 10, "a": 1, "b": 5}, fails=["a"])
        tuner = Tuner(["a", "b"], rule=rule)
        assert machine.run(tuner) == "b"
        assert machine.ran.count("a") == 1
        assert (verdicts(tuner)["a"], reasons(tuner)["a"]) == ("failed", "by design")
    all_fail = Tuner(["a", "b"])
    assert Machine({"eager": 10, "a": 1, "b": 1}, fails=["a", "b"]).run(all_fail) == "eager"


def test_a_budget_ends_it_with_the_best_that_is_proven():
    machine = Machine({"eager": 1000, "a": 500, "b": 100}, compile_seconds={"a": 5, "b": 3600})
    tuner = Tuner(["a", "b"], budget_seconds=60)
    assert machine.run(tuner) == "a"
    assert "budget_seconds=60 was used up" in reasons(tuner)["b"]
    assert machine.ran.count("b") == 1


def test_a_budget_that_is_used_up_by_the_first_compile_leaves_eager():
    machine = Machine({"eager": 10, "a": 1}, compile_seconds={"a": 100})
    tuner = Tuner(["a"], budget_seconds=30)
    assert machine.run(tuner) == "eager"
    assert "too few to judge by (budget_seconds=30 was used up)" in reasons(tuner)["a"]


def test_what_is_not_worth_its_compile_is_not_tried_until_a_longer_run():
    asked = []

    def why_not(name, known):
        asked.append((name, known))
        return "too short" if known.steps_left < 100 else None

    machine = Machine({"eager": 10, "a": 5})
    tuner = Tuner(["a"], why_not=why_not)
    tuner.plan(50)
    assert machine.run(tuner) == "eager"
    assert verdicts(tuner) == {"eager": "chosen", "a": "not tried"}
    assert "a" not in machine.ran
    assert asked[0][1].steps_left == 50 - len(machine.ran)
    tuner.plan(5000)
    assert machine.run(tuner) == "a"


@pytest.mark.parametrize("steps_left", [0, 20, 50])
def test_a_run_that_is_no_longer_leaves_what_is_chosen(steps_left):
    tuner = Tuner(["a"], why_not=lambda name, known: "too short" if known.steps_left <= 50 else None)
    tuner.plan(50)
    Machine({"eager": 10, "a": 5}).run(tuner)
    settled = tuner.trials()
    assert verdicts(tuner) == {"eager": "chosen", "a": "not tried"}
    tuner.plan(steps_left)
    assert (tuner.winner, tuner.trials()) == ("eager", settled)
    tuner.plan(51)
    assert (tuner.winner, verdicts(tuner)) == (None, {"eager": "undecided", "a": "undecided"})


def test_a_run_too_short_to_compare_in_is_not_looked_at_again_by_another_one():
    tuner = Tuner(["a"], least_steps=15)
    for steps_left in (3, 0, 2):
        tuner.plan(steps_left)
        assert tuner.winner == "eager"
        assert "the run has 3 steps" in reasons(tuner)["a"]
    tuner.plan(5)
    assert "the run has 5 steps" in reasons(tuner)["a"]
    tuner.plan(1000)
    assert Machine({"eager": 10, "a": 5}).run(tuner) == "a"


def test_where_the_steps_are_known_late_a_run_is_as_long_as_it_then_turns_out():
    tuner = Tuner(["a"], least_steps=15)
    tuner.plan(math.inf)
    tuner.plan(3)
    assert tuner.winner == "eager"
    tuner.plan(1000)
    assert tuner.winner is None


@pytest.mark.parametrize("rule", ["throughput", "first", "latency", "latency_budget"])
def test_a_choice_holds_for_no_longer_run_where_another_candidate_was_not_worth_its_compile(rule):
    def why_not(name, known):
        return "too dear" if name == "dear" and known.steps_left < 1000 else None

    budget_ms = {"latency_budget_ms": 6} if rule == "latency_budget" else {}
    tuner = Tuner(["dear", "a"], rule=rule, why_not=why_not, **budget_ms)
    machine = Machine({"eager": 10, "a": 5, "dear": 1})
    tuner.plan(500)
    assert (machine.run(tuner), tuner.holds_for_steps) == ("a", 500)
    assert verdicts(tuner)["dear"] == "not tried"
    tuner.plan(5000)
    assert (machine.run(tuner), tuner.holds_for_steps) == ("dear", math.inf)


@pytest.mark.parametrize(("steps", "believed"), [(500, True), (501, False), (math.inf, False)])
@pytest.mark.parametrize("name", ["eager", "a"])
def test_a_remembered_choice_is_forgotten_in_a_longer_run(name, steps, believed):
    tuner = Tuner(["a", "b"])
    tuner.plan(steps)
    tuner.remember(name, 500)
    chosen = Machine({"eager": 10, "a": 8, "b": 5}).run(tuner)
    assert (chosen, tuner.holds_for_steps) == ((name, 500) if believed else ("b", math.inf))


def test_a_choice_holds_for_no_run_where_it_was_cut_short_and_for_all_where_it_is_clear():
    short = Tuner(["a"], budget_seconds=5)
    Machine({"eager": 1000, "a": 500}).run(short)
    clear = Tuner(["a"])
    Machine({"eager": 10, "a": 5}).run(clear)
    assert (short.holds_for_steps, clear.holds_for_steps) == (0, math.inf)


def test_only_steps_of_equal_work_are_compared():
    class ByWork(Machine):
        def step_ms(self, name):
            return super().step_ms(name) * (1 if len(self.ran) % 3 else 0.1)

    machine = ByWork({"eager": 10, "a": 5, "b": 20}, noise=0.01)
    tuner = Tuner(["a", "b"])
    # The n-th step's work is asked for after it was counted, hence n - 1.
    assert machine.run(tuner, work=lambda n: "full" if (n - 1) % 3 else "ragged") == "a"
    eager = tuner.trials()[0]
    assert eager.median_ms == pytest.approx(10, rel=0.1)


def test_without_equal_work_nothing_is_proven_and_it_ends():
    machine = Machine({"eager": 10, "a": 1})
    tuner = Tuner(["a"], steps=5)
    assert machine.run(tuner, work=str) == "eager"
    assert "too few to judge by" in reasons(tuner)["a"]
    assert verdicts(tuner)["a"] == "not judged"


def by_clock(seconds, **settings):
    def why_not(name, known):
        return f"{known.steps_left:.0f} steps" if name == "b" and known.steps_left < 10_000 else None

    tuner = Tuner(["a", "b"], why_not=why_not, **settings)
    tuner.plan(math.inf, seconds)
    return tuner


def test_a_choice_that_was_cut_short_is_not_believed_and_a_short_runs_not_by_a_longer_one():
    for run, held, believed in [((math.inf, 6), 0.0, False), ((math.inf, 600), 500, False), ((math.inf, 4), 500, True)]:
        tuner = Tuner(["a"])
        tuner.plan(*run)
        while not tuner.step_ends(sample=True, seconds=0.01):
            pass
        tuner.measured({Work("w"): [10.0] * 5})
        tuner.remember("eager", held)
        assert (tuner.winner == "eager") == believed


@pytest.mark.parametrize("rule", ["throughput", "first"])
def test_another_run_with_other_work_is_judged_by_its_own_steps(rule):
    machine = Machine({"eager": 10, "a": 20}, noise=0)
    tuner = Tuner(["a"], rule=rule)
    tuner.run_begins()
    tuner.plan(22)
    assert machine.run(tuner, steps=22) is None
    machine.mean_ms = {"eager": 3, "a": 1}
    tuner.run_begins()
    tuner.plan(1000)
    assert tuner.candidate == "eager"
    assert machine.run(tuner, work=lambda n: "other") == "a"
    assert [trial.median_ms for trial in tuner.trials()] == [3, 1]


def test_work_that_an_earlier_run_did_is_compared_again_where_it_returns():
    machine = Machine({"eager": 10, "a": 9.9}, noise=0.3)
    tuner = Tuner(["a"], steps=100)
    for work in ("validate", "test", "validate", "test"):
        tuner.run_begins()
        tuner.plan(40)
        assert machine.run(tuner, steps=40, work=lambda n, work=work: work) is None
    tuner.run_begins()
    tuner.plan(10_000)
    assert machine.run(tuner, steps=10_000, work=lambda n: "validate") is not None
    assert "not judged" not in verdicts(tuner).values()
    assert min(trial.samples for trial in tuner.trials()) >= 20


def test_a_run_after_one_that_was_too_short_begins_with_eager():
    asked = []
    tuner = Tuner(["a", "b"], least_steps=15, why_not=lambda name, known: asked.append(known.eager_ms) or "too dear")
    tuner.run_begins()
    tuner.plan(3)
    assert tuner.winner == "eager"
    tuner.run_begins()
    tuner.plan(100)
    machine = Machine({"eager": 10, "a": 1, "b": 1}, noise=0)
    assert machine.run(tuner) == "eager"
    assert set(machine.ran) == {"eager"}
    assert asked == [10, 10]


def test_settling_while_it_is_tried_anew_keeps_what_is_compiled():
    tuner = Tuner(["a", "b"], compiled="a")
    tuner.settle("the run ended")
    assert tuner.winner == "a"
    assert tuner.holds_for_steps == 0
    tuner.plan(1000)
    machine = Machine({"eager": 10, "a": 20, "b": 5})
    assert machine.run(tuner) == "b"


def test_a_budget_that_ends_a_tuning_anew_keeps_what_is_compiled():
    tuner = Tuner(["a", "b"], compiled="a", budget_seconds=0.04)
    assert Machine({"eager": 10, "a": 5, "b": 1}).run(tuner) == "a"
    assert tuner.holds_for_steps == 0
    assert "chosen before, and budget_seconds=0.04" in reasons(tuner)["a"]
    tuner.plan(math.inf)
    assert tuner.winner == "a"  # no later run has more of the budget


@pytest.mark.parametrize("name", ["eager", "a"])
def test_what_was_remembered_of_short_runs_is_open_again_in_a_longer_one(name):
    tuner, machine = Tuner(["a", "b"]), Machine({"eager": 10, "a": 8, "b": 5})
    tuner.plan(400)
    assert machine.run(tuner, remembers=(name, 500)) == name
    tuner.plan(500)
    assert tuner.winner == name
    tuner.plan(5000)
    assert (machine.run(tuner), tuner.holds_for_steps) == ("b", math.inf)


def test_a_remembered_choice_that_is_never_comparable_is_given_up():
    tuner = Tuner(["a"], steps=5)
    chosen = Machine({"eager": 10, "a": 5}).run(
        tuner, work=lambda step: tuner.candidate, remembers=("a", math.inf), steps=3000
    )
    assert (chosen, verdicts(tuner)["a"]) == ("eager", "not judged")


def test_what_goes_on_in_another_run_is_compared_with_eager_steps_of_that():
    tuner, machine = Tuner(["a"], steps=5), Machine({"eager": 10, "a": 5})
    machine.run(tuner, steps=9, work=lambda step: "small")
    assert tuner.winner is None
    tuner.run_begins()
    assert machine.run(tuner, work=lambda step: "large") == "a"


def test_a_longer_run_without_a_clock_looks_again_at_what_one_by_the_clock_left_out():
    tuner = by_clock(6)
    Machine({"eager": 10, "a": 5, "b": 1}, noise=0.001).run(tuner)
    tuner.plan(5000)
    assert tuner.winner is None


def test_what_a_run_by_the_clock_cannot_repay_is_not_tried_and_the_choice_holds_for_its_like():
    tuner = by_clock(6)
    assert Machine({"eager": 10, "a": 5, "b": 1}, noise=0.001).run(tuner) == "a"
    assert int(reasons(tuner)["b"].split()[0]) < 600
    assert tuner.holds_for_steps == pytest.approx(600, rel=0.05)
    tuner.plan(math.inf, 3)  # a validation later
    assert tuner.winner == "a"
    again, machine = by_clock(6), Machine({"eager": 10, "a": 5, "b": 1})
    assert machine.run(again, remembers=("a", tuner.holds_for_steps)) == "a"
    assert "in an earlier run" in reasons(again)["a"]
    assert "b" not in machine.ran
    tuner.plan(math.inf, 600)  # of a longer run nothing is known
    assert tuner.winner is None


def test_an_earlier_choice_is_checked_in_a_few_steps():
    machine = Machine({"eager": 10, "a": 4, "b": 3})
    tuner = Tuner(["b", "a"])
    tuner.remember("a")
    assert machine.run(tuner) == "a"
    assert "b" not in machine.ran
    assert len(machine.ran) <= 20
    assert "chosen in an earlier run" in reasons(tuner)["a"]


def test_an_earlier_choice_that_is_not_faster_any_more_is_tuned_anew():
    machine = Machine({"eager": 10, "a": 12, "b": 3})
    tuner = Tuner(["a", "b"])
    tuner.remember("a")
    assert tuner.remembers
    assert machine.run(tuner) == "b"
    assert not tuner.remembers


@pytest.mark.parametrize("winner", ["eager", "gone"])
def test_an_earlier_choice_of_eager_holds_and_an_unknown_one_does_not(winner):
    machine = Machine({"eager": 10, "a": 5})
    tuner = Tuner(["a"])
    tuner.remember(winner)
    assert machine.run(tuner) == ("eager" if winner == "eager" else "a")
    assert machine.ran == [] or winner == "gone"


def test_settling_early_takes_nothing_unproven():
    machine = Machine({"eager": 10, "a": 5, "b": 1})
    tuner = Tuner(["a", "b"])
    machine.run(tuner, steps=18)  # b has not had its samples
    tuner.settle("the run is over")
    assert tuner.winner == "a"
    assert reasons(tuner)["b"].endswith("too few to judge by (the run is over)")


def test_settling_a_phase_that_did_not_run_decides_nothing():
    tuner = Tuner(["a"])
    tuner.settle("the run is over")
    assert tuner.winner is None
    assert verdicts(tuner) == {"eager": "undecided", "a": "undecided"}


def test_what_is_settled_early_goes_on_in_the_next_run_that_has_steps():
    machine = Machine({"eager": 10, "a": 5, "b": 1})
    tuner = Tuner(["a", "b"])
    machine.run(tuner, steps=18)
    tuner.settle("the run is over")
    samples = [trial.samples for trial in tuner.trials()]
    tuner.plan(0)
    assert tuner.winner == "a"
    tuner.plan(1000)
    assert (tuner.winner, set(verdicts(tuner).values())) == (None, {"undecided"})
    assert [trial.samples for trial in tuner.trials()] == samples
    assert machine.run(tuner) == "b"
    tuner.plan(2000)
    assert tuner.winner == "b"


def test_the_check_of_an_earlier_choice_goes_on_in_the_next_run():
    machine = Machine({"eager": 10, "a": 4, "b": 3})
    tuner = Tuner(["b", "a"])
    tuner.remember("a")
    machine.run(tuner, steps=4)
    tuner.settle("the run is over")
    assert tuner.winner == "eager"
    tuner.plan(1000)
    assert tuner.remembers
    assert machine.run(tuner) == "a"
    assert "b" not in machine.ran


def test_decisions_depend_on_what_is_told_alone():
    def ran():
        machine = Machine({"eager": 10, "a": 9.5, "b": 9.4}, noise=0.3, seed=7)
        tuner = Tuner(["a", "b"])
        machine.run(tuner)
        return machine.ran, tuner.trials()

    assert ran() == ran()


def test_what_two_samples_say_is_not_clear():
    assert StepStats.of([]) is None
    one, other = StepStats.of([1.0]), StepStats.of([9.0])
    assert not one.clearly_below(other)
    fast, slow = StepStats.of([1.0] * 10), StepStats.of([1.02] * 10)
    assert fast.clearly_below(slow)
    assert not fast.clearly_below(slow, factor=1.05)


# ------------------------------------------------------------------------------------------ worth compiling

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIGS = {"default": InductorConfig(), "max": InductorConfig(mode="max-autotune-no-cudagraphs")}


def test_a_compile_that_cannot_be_repaid_is_not_worth_it():
    known = {"eager_ms": 10.0, "best_ms": 10.0}
    assert "100 steps" in why_not_repaid("default", CONFIGS, CPU, Known(steps_left=100, **known))
    least = LEAST_COMPILE_SECONDS["cpu"]
    assert why_not_repaid("default", CONFIGS, CPU, Known(steps_left=2 * least * 100 + 1, **known)) is None
    assert why_not_repaid("default", CONFIGS, CPU, Known(steps_left=math.inf, **known)) is None
    # On a GPU a step may gain more, and compiling takes longer.
    assert why_not_repaid("default", CONFIGS, CUDA, Known(steps_left=1100, **known)) is not None
    assert why_not_repaid("default", CONFIGS, CUDA, Known(steps_left=1300, **known)) is None


def test_what_others_took_to_compile_is_believed():
    known = {"eager_ms": 10.0, "best_ms": 10.0, "steps_left": 1000.0}
    assert why_not_repaid("default", CONFIGS, CPU, Known(compile_seconds={"max": 8.0}, **known)) is None
    assert why_not_repaid("default", CONFIGS, CPU, Known(compile_seconds={"max": 800.0}, **known)) is not None
    assert compile_estimate("max", CONFIGS, {"default": 3.0}) == 24.0
    assert compile_estimate("max", CONFIGS, {}) is None


def test_near_the_plausible_limit_little_is_left_to_gain():
    close = Known(steps_left=10_000, eager_ms=10.0, best_ms=1.0, compile_seconds={"default": 3.0})
    assert why_not_repaid("max", CONFIGS, CUDA, close) is not None


def test_a_compile_that_does_not_fit_the_budget_is_not_begun():
    known = {"steps_left": math.inf, "eager_ms": 1.0, "best_ms": 1.0, "compile_seconds": {"default": 3.0}}
    assert "12.0 s of budget_seconds" in why_not_affordable("max", CONFIGS, Known(seconds_left=12.0, **known))
    assert why_not_affordable("max", CONFIGS, Known(seconds_left=30.0, **known)) is None
    assert why_not_affordable("max", CONFIGS, Known(**known)) is None
