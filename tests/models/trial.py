"""Trains a model of another package eagerly and with `InductorCompile`, and compares the two runs.

The tests of this folder call it.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch.utils._pytree import tree_leaves

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import trainer

BASELINE_STEPS = 5
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model, its data and how it is trained."""

    name: str
    make: Callable[[], pl.LightningModule]  # called after the seed is set
    train: Callable[[], Iterable[Any]]  # makes the training data
    validate: Callable[[], Iterable[Any]] | None = None  # makes the validation data
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the Trainer
    after: Callable[[pl.LightningModule], None] | None = None  # called after the fit; a second validation follows
    eager_targets: int = 0  # how many targets the callback leaves eager in training, because it cannot compile them
    close: Mapping[str, float] = field(default_factory=lambda: CLOSE)  # of losses, outputs and weights
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the callback
    # Whether training amplifies rounding, so that two eager runs differ beyond any tolerance if their weights differ by
    # 1e-7. The tests then compare each graph, and not the runs.
    chaotic: bool = False


class Trained(pl.LightningModule):
    """Has a net, and trains those of its weights that are not frozen with SGD."""

    rate = 0.05

    def __init__(self, net: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.net = net

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((weight for weight in self.parameters() if weight.requires_grad), lr=self.rate)


@dataclass(kw_only=True)
class Run:
    """What one run of a trial produced."""

    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    traces: Counter[tuple[str, str, bool, bool]] = field(default_factory=Counter)


class _Watch(pl.Callback):
    """Keeps the losses, the validation outputs, and how often torch traces each frame.

    A graph break divides a target into many frames.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._phase = "train"

    @contextlib.contextmanager
    def counting_traces(self) -> Iterator[None]:
        """A context in which torch's traces are counted."""
        callback_handler.register_start_callback(self._count)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # torch._dynamo.reset() has removed it
                callback_handler.remove_start_callback(self._count)

    def _count(self, args: Any) -> None:
        if args.callback_trigger == CallbackTrigger.DYNAMO:
            frame = args.compile_id.partition("/")[0]
            self.run.traces[self._phase, frame, torch.is_grad_enabled(), torch.is_inference_mode_enabled()] += 1

    def on_train_batch_start(self, *args: Any) -> None:
        self._phase = "train"

    def on_validation_batch_start(self, *args: Any) -> None:
        self._phase = "infer"

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) and "loss" in outputs else outputs
        self.run.losses += [leaf.detach().clone() for leaf in tree_leaves(loss) if isinstance(leaf, torch.Tensor)]

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.run.outputs += [leaf.detach().clone() for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def run(trial: Trial, *callbacks: pl.Callback) -> Run:
    """Run a trial once, from a fixed seed."""
    result = Run()
    torch.manual_seed(0)
    module = trial.make()
    torch.manual_seed(1)
    settings = {"max_epochs": 2, **trial.settings}
    watch = _Watch(result)
    validate = trial.validate() if trial.validate else None
    with watch.counting_traces():
        trainer(watch, *callbacks, **settings).fit(module, trial.train(), validate)
        if trial.after is not None:
            trial.after(module)
            trainer(watch, *callbacks, **settings).validate(module, trial.validate(), verbose=False)
    result.weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return result


def figures(trial: Trial, **arguments: Any) -> dict[str, Any]:
    """Run a trial eagerly and compiled, and return a row that `check` takes.

    Args:
        trial: The trial.
        **arguments: Of the callback.

    Raises:
        AssertionError: The runs differ.
    """
    return compare(functools.partial(run, trial), trial.close, **arguments)


def compare(run: Callable[..., Run], close: Mapping[str, float] = CLOSE, **arguments: Any) -> dict[str, Any]:
    """Return a row that `check` takes for a function that takes callbacks and runs once."""
    eager = run()
    callback = InductorCompile(**{"baseline_steps": BASELINE_STEPS, **arguments})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = run(callback)
    row = describe(callback.report, caught)
    for phase in ("train", "infer"):
        if compiled.traces:
            row[phase]["traces_of_a_frame"] = traces_of_a_frame(compiled, phase)
    row["difference"] = difference(eager, compiled)
    row["equal"] = equal(eager, compiled, close)
    return row


def describe(report: Any, caught: Iterable[warnings.WarningMessage] = ()) -> dict[str, Any]:
    """The figures of a report, and the first line of each of the callback's warnings."""
    row: dict[str, Any] = {}
    for name in ("train", "infer"):
        phase = report.phase(name)
        row[name] = {
            "targets": list(phase.targets),
            "graphs": phase.graphs,
            "recompiles": phase.recompiles,
            "graph_breaks": phase.graph_breaks,
            "fallbacks": phase.fallbacks,
            "comparisons": phase.verified,
        }
    row["warnings"] = [str(one.message)[:400] for one in caught if issubclass(one.category, CompileWarning)]
    return row


def traces_of_a_frame(result: Run, phase: str) -> int:
    """The largest number of traces of one frame in one grad mode."""
    return max((count for key, count in result.traces.items() if key[0] == phase), default=0)


def difference(eager: Run, compiled: Run) -> float:
    """The largest absolute difference of losses, outputs and weights."""
    pairs = zip(_values(eager), _values(compiled), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())


def equal(eager: Run, compiled: Run, close: Mapping[str, float]) -> bool:
    """Whether losses, outputs and weights of two runs agree within a tolerance."""
    try:
        torch.testing.assert_close(_values(compiled), _values(eager), **close)
    except AssertionError:
        return False
    return True


def _values(result: Run) -> list[torch.Tensor]:
    return [*result.losses, *result.outputs, *result.weights.values()]


def check(row: Mapping[str, Any], *, eager_targets: int = 0, chaotic: bool = False) -> None:
    """Assert that the compiled run equals the eager one, that training has graphs, and that no compile failed.

    Without a graph break, torch traces a frame at most twice in each grad mode.

    Args:
        row: The row of the trial.
        eager_targets: How many targets the callback leaves eager in training.
        chaotic: Whether to compare only each graph with eager, as the callback did, and not the runs.
    """
    if chaotic:
        for phase in ("train", "infer"):
            assert row[phase]["comparisons"] == f"equal {row[phase]['graphs']}", row
    else:
        assert row["equal"], row["difference"]
    assert (row["train"]["fallbacks"], row["infer"]["fallbacks"]) == (eager_targets, 0), row
    assert row["train"]["graphs"], row["warnings"]
    for phase in (row["train"], row["infer"]):
        assert phase["graph_breaks"] or phase.get("traces_of_a_frame", 0) <= 2, row
