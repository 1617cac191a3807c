"""How often the report and `Tune` call steps faster or slower, at known differences and on a busy machine.

python benchmarks/false_verdicts.py [--runs 400] [--pairs 50] [--json FILE]

The simulation runs `PhaseTimes` and `Contest` on step times with 4% noise: a baseline of 10 eager steps, a compile of
5 s, and 2000 compiled steps of 50 ms. "bursts": in a share of the time, in bursts of 1 to 4 s, steps take 10% to
50% longer. "drift": the machine becomes 5% faster or slower during the run. A true ratio of 1.00 must
not be called faster.

The A/A part times training steps of a small network with `PhaseTimes`, while other processes keep all cores busy. The
steps after the baseline are labelled as compiled, but are eager. Each "faster" or "slower" is false.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from tables import Row, in_order, parser_for, print_table, save, say
from torch import nn

from compile_callbacks import Tune
from compile_callbacks.config.inductor_config import EAGER_VARIANT, Variant
from compile_callbacks.profiling import clock
from compile_callbacks.profiling.comparison import Comparison
from compile_callbacks.profiling.step_times import WARMUP_STEPS, PhaseTimes, Step, Workload
from compile_callbacks.tuning.candidates import CompileFacts
from compile_callbacks.tuning.contest import Conditions, Contest

NOISE, STEP_SECONDS, COMPILE_SECONDS, BASELINE_STEPS = 0.04, 0.05, 5.0, 10
BURST_SECONDS = 1.0, 4.0
MACHINES: dict[str, dict[str, float]] = {
    "noise alone": {},
    "bursts in 3% of the time": {"bursts": 0.03},
    "bursts in 5% of the time": {"bursts": 0.05},
    "bursts in 10% of the time": {"bursts": 0.1},
    "drift, faster": {"drift": -0.05},
    "drift, slower": {"drift": 0.05},
}

WORKLOAD = Workload("train")


class Machine:
    """Simulates steps. Its clock counts seconds."""

    def __init__(self, ratio: float, seconds: float, *, seed: int, bursts: float = 0.0, drift: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.seconds = 0.0
        self._ratio, self._whole_seconds, self._drift, self._share = ratio, seconds, drift, bursts
        self._burst, self._factor = (-math.inf, -math.inf), 1.0
        if bursts:
            self._plan_burst(after=-100.0)  # so that the run may begin in a burst

    def _plan_burst(self, after: float) -> None:
        mean = sum(BURST_SECONDS) / 2
        begins = after + self.random.expovariate(self._share / (1 - self._share) / mean)
        self._burst, self._factor = (
            (begins, begins + self.random.uniform(*BURST_SECONDS)),
            self.random.uniform(1.1, 1.5),
        )

    def step_seconds(self, *, compiled: bool) -> float:
        """Run a step."""
        while self._share and self.seconds > self._burst[1]:
            self._plan_burst(after=self._burst[1])
        factor = self._factor if self._burst[0] <= self.seconds else 1.0
        factor *= 1 + self._drift * self.seconds / self._whole_seconds
        factor *= math.exp(self.random.gauss(0, NOISE)) * (1.0 if compiled else self._ratio)
        self.seconds += STEP_SECONDS * factor
        return STEP_SECONDS * factor


def time_run(run_step: Callable[[bool], None], seconds: Callable[[], float], steps: int) -> Comparison | None:
    """Run the steps of a run as a session does, and compare them as the report does."""
    times, real = PhaseTimes("train"), clock.now
    clock.now = lambda *device, **step: seconds()
    for number in range(BASELINE_STEPS + WARMUP_STEPS + steps):
        compiled = number >= BASELINE_STEPS + WARMUP_STEPS
        step = Step(variant=Variant() if compiled else EAGER_VARIANT, kind="compiled" if compiled else "eager")
        times.begin(step, torch.device("cpu"), wanted=not compiled)
        step.workload = WORKLOAD
        run_step(compiled)
        times.end(step, "train")
    clock.now = real
    return times.compared().comparison


def simulate_report(ratio: float, *, seed: int, steps: int = 2000, **machine: float) -> str:
    """Return the outcome of a simulated run."""
    simulated = Machine(ratio, COMPILE_SECONDS + steps * STEP_SECONDS, seed=seed, **machine)
    compiled_before = False

    def run_step(compiled: bool) -> None:
        nonlocal compiled_before
        if compiled and not compiled_before:
            simulated.seconds += COMPILE_SECONDS
        compiled_before = compiled
        simulated.step_seconds(compiled=compiled)

    found = time_run(run_step, lambda: simulated.seconds, steps)
    assert found is not None
    return found.outcome


def simulate_tune(ratio: float, *, seed: int, steps: int = 2000, **machine: float) -> str:
    """Return "faster" if a `Tune` of one candidate chooses the candidate, else "no difference"."""
    simulated = Machine(ratio, COMPILE_SECONDS + steps * STEP_SECONDS, seed=seed, **machine)
    contest = Contest("train", Tune(["default"]))
    contest.facts = lambda variant: CompileFacts(COMPILE_SECONDS)
    contest.waits, contest.tell = lambda variant: None, lambda line: None
    contest.begin(Conditions())
    number: Counter[Variant] = Counter()
    while contest.decision is None:
        variant, _ = contest.next()
        number[variant] += 1
        if variant.config is not None and number[variant] == 1:
            simulated.seconds += COMPILE_SECONDS
        seconds = simulated.step_seconds(compiled=variant.config is not None)
        is_sample = (sum(number.values()) - 1) % (4 + 10) >= 2 + WARMUP_STEPS
        contest.done(Step(variant=variant, workload=WORKLOAD, end=seconds, is_sample=is_sample))
    return "no difference" if contest.decision.name == "eager" else "faster"


def simulation(runs: int) -> Iterator[Row]:
    """Yield the shares of the outcomes for each rule, machine and true ratio."""
    rules = {"report": simulate_report, "Tune": simulate_tune}
    for (rule, simulate), (machine, settings), ratio in itertools.product(
        rules.items(), MACHINES.items(), (1.0, 1.05, 1.1, 1.3)
    ):
        outcomes = Counter(simulate(ratio, seed=seed, **settings) for seed in range(runs))
        yield row_of(rule, machine, ratio, outcomes)


def keep_busy(seed: int) -> None:
    """Compute and sleep in turn, until the process is terminated."""
    chance, values = random.Random(seed), torch.randn(200, 200)
    while True:
        until = time.perf_counter() + chance.uniform(0.2, 3)
        while time.perf_counter() < until:
            values @ values
        time.sleep(chance.uniform(0.2, 3))


def eager_against_eager(pairs: int, steps: int) -> Row:
    """Compare eager steps with eager steps in this process, while other processes use the cores."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    inputs, labels = torch.randn(128, 256), torch.randint(10, (128,))

    def run_step(compiled: bool) -> None:
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=keep_busy, args=(seed,), daemon=True) for seed in range(os.cpu_count() or 1)]
    outcomes: Counter[str] = Counter()
    try:
        for other in others:
            other.start()
        time.sleep(10)  # until they have imported torch
        for pair in range(pairs):
            found = time_run(run_step, time.perf_counter, steps)
            assert found is not None
            outcomes[found.outcome] += 1
            say(f"{pair}: {found.outcome}, {found.ratio:.3f} in {found.low:.3f} to {found.high:.3f}")
    finally:
        for other in others:
            other.terminate()
    return row_of("report", "busy, eager against eager", 1.0, outcomes)


def row_of(rule: str, machine: str, ratio: float, outcomes: Counter[str]) -> Row:
    """A row: the number of runs, and the shares of those with each claim."""
    runs = outcomes.total()
    shares = {outcome: outcomes[outcome] / runs for outcome in ("faster", "slower", "not comparable")}
    return {"rule": rule, "machine": machine, "true_ratio": ratio, "runs": runs, **shares}


def show(rows: list[Row]) -> None:
    """Print the share of the runs that are called faster, by the true ratio; at 1.00, each claim is false."""
    ratios = in_order(rows, lambda row: row["true_ratio"])
    lines = []
    for rule, machine in in_order(rows, lambda row: (row["rule"], row["machine"])):
        of_line = {row["true_ratio"]: row for row in rows if (row["rule"], row["machine"]) == (rule, machine)}
        cells = [f"{of_line[ratio]['faster']:.1%}" if ratio in of_line else "" for ratio in ratios]
        lines.append([f"{rule}, {machine}", str(of_line[1.0]["runs"]), *cells, f"{of_line[1.0]['slower']:.1%}"])
    print_table(["rule, machine", "runs", *(f"faster at {ratio:.2f}" for ratio in ratios), "slower at 1.00"], lines)


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=400, help="simulated runs of each machine and true ratio")
    add("--pairs", type=int, default=50, help="runs of eager against eager")
    add("--steps", type=int, default=400, help='steps that are labelled "compiled" in each run of eager against eager')
    args = parser.parse_args()
    rows: list[Row] = []
    for row in simulation(args.runs) if args.runs else ():
        say(str(row))
        rows.append(row)
    if args.pairs:
        rows.append(eager_against_eager(args.pairs, args.steps))
    show(rows)
    save(args.json, "False verdicts", rows)


if __name__ == "__main__":
    main()
