"""The CPU time that the callback adds to a step: a tiny MLP with the callback, compiled by hand, and eager.

python benchmarks/tiny_steps.py

Each round runs `Trainer.predict` and `Trainer.fit` in each way, and the bare compiled call against
`InductorBackend.infer`. "empty callback" is compiled by hand with a callback that has no hooks, because Lightning takes
time to call the hooks of each callback. A figure is the median of the rounds; a round's figure is the median time
between batch ends. The difference and the ratio are medians of the rounds' differences and ratios.
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable

import lightning.pytorch as pl
import torch
from tables import parser_for, print_columns, save
from torch import nn
from trainer import Classifier, loader, make_trainer

from compile_callbacks import InductorBackend, InductorCompile

WARM_UP_STEPS = 1000  # in the first steps, the callback times each step


class BatchEnds(pl.Callback):
    """Records when each batch ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *args) -> None:
        self.times.append(time.perf_counter())

    on_predict_batch_end = on_train_batch_end  # type: ignore[assignment]


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
    if way == "empty callback":
        callbacks.append(pl.Callback())
    if way in ("by hand", "empty callback"):
        module.net.compile()
    data = loader([(torch.randn(8, 32), torch.randint(10, (8,)))], steps)
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
    call = module if way == "eager" else torch.compile(module)
    with torch.inference_mode() if way == "inference mode" else torch.no_grad():
        return call_us(lambda: call(batch), steps)


WAYS = {
    "predict": ("callback", "by hand", "empty callback", "eager"),
    "fit": ("callback", "by hand", "empty callback", "eager"),
    "infer": ("callback", "by hand", "inference mode", "eager"),
}
"""The ways that each loop runs. Of "infer", the callback is `InductorBackend`, and the others run under `no_grad`."""

COLUMNS = {"loop": "{}", "way": "{}", "step_us": "{:.1f}", "over_by_hand_us": "{:+.1f}", "of_by_hand": "{:.3f}"}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2500)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for round_ in range(args.rounds):
        for loop, ways in WAYS.items():
            for way in ways if round_ % 2 else reversed(ways):
                mean_us = backend_us(way, args.steps) if loop == "infer" else trainer_us(loop, way, args.steps)
                found[loop, way].append(mean_us)
    rows = []
    for (loop, way), us in found.items():
        by_hand = found[loop, "by hand"]
        rows.append(
            {
                "loop": loop,
                "way": way,
                "step_us": statistics.median(us),
                "over_by_hand_us": statistics.median(a - b for a, b in zip(us, by_hand, strict=True)),
                "of_by_hand": statistics.median(a / b for a, b in zip(us, by_hand, strict=True)),
                "samples": args.rounds,
            }
        )
    rows.sort(key=lambda row: (list(WAYS).index(row["loop"]), WAYS[row["loop"]].index(row["way"])))
    print_columns(COLUMNS, rows)
    save(args.json, "CPU time of a tiny step", rows)


if __name__ == "__main__":
    main()
