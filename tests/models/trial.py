"""Trains a model of another package eagerly and with `InductorCompile`, and compares the two runs.

The tests of this folder call it.
"""

from __future__ import annotations

import contextlib
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
    train: Callable[[], Iterable[Any] | None]  # makes the training data
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
        if trial.after is not None and trial.validate is not None:
            trial.after(module)
            trainer(watch, *callbacks, **settings).validate(module, trial.validate(), verbose=False)
    result.weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return result


def assert_trains_as_eager(
    run: Callable[..., Run],
    close: Mapping[str, float] = CLOSE,
    *,
    eager_targets: int = 0,
    chaotic: bool = False,
    **arguments: Any,
) -> None:
    """Assert that the compiled run equals the eager one, that training has graphs, and that no compile failed.

    Without a graph break, torch traces a frame at most twice in each grad mode.

    Args:
        run: Takes callbacks, and runs once.
        close: The tolerance of losses, outputs and weights.
        eager_targets: How many targets the callback leaves eager in training.
        chaotic: Whether to compare only each graph with eager, as the callback did, and not the runs.
        **arguments: Of the callback.
    """
    eager = run()
    callback = InductorCompile(**{"baseline_steps": BASELINE_STEPS, **arguments})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileWarning)
        compiled = run(callback)
    report = callback.report
    if chaotic:
        assert [phase.verified for phase in (report.train, report.infer)] == [
            f"equal {phase.graphs}" for phase in (report.train, report.infer)
        ]
    else:
        for name in ("losses", "outputs", "weights"):
            torch.testing.assert_close(getattr(compiled, name), getattr(eager, name), **close)
    assert (report.train.fallbacks, report.infer.fallbacks) == (eager_targets, 0)
    assert report.train.graphs, str(report)
    for (phase, *frame), count in compiled.traces.items():
        assert report.phase(phase).graph_breaks or count <= 2, frame
