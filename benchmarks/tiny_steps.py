"""The CPU time that the callback adds to a step: a tiny MLP with the callback, compiled by hand, and eager.

python benchmarks/tiny_steps.py

Each round runs `Trainer.predict` and `Trainer.fit` in each of the three ways, and the bare compiled call against
`InductorBackend.infer`. A figure is the median of the rounds; a round's figure is the median time between batch ends.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable

import lightning.pytorch as pl
import torch
from tables import parser_for, print_table, save
from torch import nn
from trainer import Classifier, loader, make_trainer

from compile_callbacks import InductorBackend, InductorCompile

WARM_UP_STEPS = 200


class BatchEnds(pl.Callback):
    """Records when each batch ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *args) -> None:
        self.times.append(time.perf_counter())

    on_predict_batch_end = on_train_batch_end


def step_us(times: list[float]) -> float:
    """The median time of a step after the warm-up, in microseconds."""
    steady = times[WARM_UP_STEPS:]
    return statistics.median(after - before for before, after in itertools.pairwise(steady)) * 1e6


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def trainer_us(loop: str, way: str, steps: int) -> float:
    torch._dynamo.reset()
    module, ends = Classifier(mlp()), BatchEnds()
    callbacks: list[pl.Callback] = [ends]
    if way == "callback":
        callbacks.append(InductorCompile(targets=["net"], baseline_steps=0, verify="off"))
    if way == "by hand":
        module.net.compile()
    data = loader((torch.randn(8, 32), torch.randint(10, (8,))), steps)
    trainer = make_trainer("cpu", *callbacks)
    trainer.predict(module, data) if loop == "predict" else trainer.fit(module, data)
    return step_us(ends.times)


def call_us(call: Callable[[], object], steps: int) -> float:
    times = []
    for _ in range(steps):
        call()
        times.append(time.perf_counter())
    return step_us(times)


def backend_us(way: str, steps: int) -> float:
    torch._dynamo.reset()
    module, batch = mlp().eval(), torch.randn(8, 32)
    if way == "callback":
        backend = InductorBackend().build(module, batch)
        return call_us(lambda: backend.infer(batch), steps)
    call = torch.compile(module) if way == "by hand" else module
    with torch.inference_mode():
        return call_us(lambda: call(batch), steps)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    args: argparse.Namespace = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    ways = ("callback", "by hand", "eager")
    for round_ in range(args.rounds):
        for loop in ("predict", "fit", "infer"):
            for way in ways if round_ % 2 else reversed(ways):
                us = backend_us(way, args.steps) if loop == "infer" else trainer_us(loop, way, args.steps)
                found[loop, way].append(us)
    rows = [
        {"loop": loop, "way": way, "step_us": statistics.median(us), "fastest_us": min(us), "rounds": args.rounds}
        for (loop, way), us in found.items()
    ]
    print_table(
        ("loop", *ways, "callback - by hand", "callback / by hand"),
        (
            (
                loop,
                *(f"{statistics.median(found[loop, way]):.1f} us" for way in ways),
                f"{statistics.median(a - b for a, b in zip(*(found[loop, w] for w in ways[:2]), strict=True)):.1f} us",
                f"{statistics.median(a / b for a, b in zip(*(found[loop, w] for w in ways[:2]), strict=True)):.3f}",
            )
            for loop in ("predict", "fit", "infer")
        ),
    )
    save(args.json, "CPU time of a tiny step", rows)


if __name__ == "__main__":
    main()
