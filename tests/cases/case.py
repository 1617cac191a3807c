"""A row of the tables of cases, and the run that checks every promise of the callback for it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
import pickle
import random
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch._functorch.config
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import Classifier, batches_of, trainer

Data = tuple[int, ...] | Callable[[], Any] | None
"""The sizes of the batches, or a function that returns a loader."""

COLUMNS = (
    # phases, baseline_steps, targets, verify: each pair of values is in one row
    ("both", 0, None, "eager"),
    ("both", 2, "net", "off"),
    ("train", 0, "net", "off"),
    ("train", 2, None, "eager"),
    ("infer", 0, None, "off"),
    ("infer", 2, "net", "eager"),
)

UNSURPRISING = {
    f"{phase}.{name}": value
    for phase in ("train", "infer")
    for name, value in {
        "graphs": 1,
        "graph_breaks": 0,
        "recompiles": 0,
        "fallbacks": 0,
        "diagnostics.skipped_passes": 0,
        "diagnostics.eager_calls": {},
    }.items()
}
"""What the report says of a run without surprises, by path in its JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data and settings, and what the report and the warnings say of the run.

    Attributes:
        name: The id of the test.
        make: Makes the module; called once for eager's run and once for the run with the callback.
        train: The data of training.
        validation: The data of validation. Without data, the stage does not run.
        predict: The data of predict.
        trainer: Arguments of the Trainer.
        callback: Arguments of `InductorCompile`; ``baseline_steps`` is 0 if it is not given.
        expect: What the report says other than `UNSURPRISING`, such as ``{"train.graphs": 2}``; ``...`` is any value.
            All graphs are expected to equal eager's in phases that are compared.
        codes: The codes of the warnings.
        says: A pattern that the texts of the warnings, one on each line, match.
        text: A pattern that the report's text matches.
        close: The tolerances for values.
        others: Makes the other callbacks of both runs.
        inside: Makes a context around both runs, such as a changed setting of torch.
        row: The row of `COLUMNS` whose settings the callback gets. The values of the report and the codes of warnings
            are checked in row 0 only.
    """

    name: str
    make: Callable[[], Classifier] = Classifier
    train: Data = (4,) * 6
    validation: Data = (4, 4)
    predict: Data = (4, 4)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    callback: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expect: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    codes: tuple[str, ...] = ()
    says: str = ""
    text: str = ""
    close: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"rtol": 1e-4, "atol": 1e-5})
    others: Callable[[], list[pl.Callback]] = list
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    row: int = 0

    def __str__(self) -> str:
        return f"{self.name}, row {self.row}" if self.row else self.name

    def compiles(self, phase: str) -> bool:
        """Whether the callback of this case compiles a phase."""
        return self.settings[f"{phase}_mode"] not in (None, "eager")

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `InductorCompile`."""
        phases, baseline_steps, targets, verify = COLUMNS[self.row]
        modes = {f"{phase}_mode": "default" if phases in (phase, "both") else None for phase in ("train", "infer")}
        return {**modes, "baseline_steps": baseline_steps, "targets": targets, "verify": verify, **self.callback}


def net(make: Callable[..., nn.Module], *arguments: Any) -> Callable[[], Classifier]:
    """Return a function that makes a `Classifier` around a network."""
    return lambda: Classifier(make(*arguments))


def in_columns(*cases: Case) -> list[Case]:
    """The cases, each with all rows of `COLUMNS`."""
    return [dataclasses.replace(case, row=row) for case in cases for row in range(len(COLUMNS))]


CHANGES_IN_A_RUN = ("_fabric_optimizers", "_trainer", "_metric_attributes", "losses", "validation_outputs")
"""Attributes of a `Classifier` that a run without the callback changes."""

# ------------------------------------------------------------------------------------------ the run


class Copies(pl.Callback):
    """Copies and pickles the module in the last training step, while it is compiled."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_last_batch:
            self.copy = copy.deepcopy(pl_module)
            self.pickled = _pickle(pl_module)


def _pickle(module: nn.Module) -> bytes | None:
    """The module in bytes, or None for one that cannot be pickled: a class of a function, a lambda, TorchScript."""
    try:
        return pickle.dumps(module)
    except (AttributeError, pickle.PickleError, RuntimeError):
        return None


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run leaves."""

    module: Classifier
    copies: Copies
    values: dict[str, Any]
    generators: list[Any]


def run(case: Case, *callbacks: pl.Callback) -> Run:
    """Fit with validation, and predict."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    module, copies = case.make(), Copies()
    train, validation, predict = (
        batches_of(*data) if isinstance(data, tuple) else data and data()
        for data in (case.train, case.validation, case.predict)
    )
    settings = {"num_sanity_val_steps": 0, "inference_mode": False, **case.trainer}
    runner = trainer(*case.others(), *callbacks, copies, **settings)
    runner.fit(module, train, validation)
    metrics = dict(runner.callback_metrics)
    predictions = runner.predict(module, predict) if predict is not None else []
    values = {
        "losses": module.losses,
        "validation outputs": module.validation_outputs,
        "predictions": predictions,
        "metrics": metrics,
        "state_dict": dict(module.state_dict()),
        "state": [_state(child) for child in module.modules()],
    }
    generators = [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    ]
    return Run(module, copies, values, generators)


def check(case: Case) -> InductorCompile:
    """Train with the callback and without it, compare the runs, and return the callback."""
    with case.inside():
        eager = _eager(case)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CompileWarning)
            callback = InductorCompile(**case.settings)
            before = of_process()
            ours = run(case, callback)
            assert of_process() == before
    said = [str(warning.message) for warning in caught if issubclass(warning.category, CompileWarning)]
    said = [text for text in said if "[CC501" not in text]  # about the times of few tiny steps on a busy machine
    for warning in caught:
        if not issubclass(warning.category, CompileWarning):
            warnings.warn_explicit(warning.message, None, warning.filename, warning.lineno)
    assert len(eager.values["losses"]) > 1
    assert eager.values["losses"][0] != eager.values["losses"][-1]
    torch.testing.assert_close(ours.values, eager.values, **case.close)
    assert ours.generators == eager.generators
    _assert_same_modules(ours.module, eager.module)
    _assert_same_copies(case, ours.copies, eager.copies)
    _assert_reported(case, callback.report.to_dict(), said)
    assert re.search(case.text, str(callback.report))
    return callback


_EAGER: dict[Any, Run] = {}


def _eager(case: Case) -> Run:
    """The run without the callback, once for all rows of a case."""
    key = case.make, case.train, case.validation, case.predict, repr(case.trainer), case.others, case.inside
    if key not in _EAGER:
        _EAGER[key] = run(case)
    return _EAGER[key]


# ------------------------------------------------------------------------------------------ what is compared


def _assert_same_modules(ours: nn.Module, eager: nn.Module) -> None:
    """Assert that nothing is on a module, or on one in it, that is not on its eager twin."""
    assert [attributes(module) for module in ours.modules()] == [attributes(module) for module in eager.modules()]


def of_process() -> Any:
    """What no run may change, next to the settings and hooks that conftest.py compares."""
    threads, grad = torch.autograd.is_multithreading_enabled(), torch.is_grad_enabled()
    return torch._functorch.config.get_config_copy(), threads, grad


def attributes(module: nn.Module) -> Any:
    """The class of a module, its attributes by the number of entries, text or class, and which weights train."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name not in CHANGES_IN_A_RUN:
            entries = len(value) if isinstance(value, dict | list | tuple | set) else None
            found[name] = value if isinstance(value, str) else (type(value), entries)
    return type(module), found, [p.requires_grad for p in module.parameters()]


def _state(module: nn.Module) -> dict[str, Any]:
    """The numbers, tensors, and lists and dictionaries of them, that a module has as attributes."""
    names = [name for name in vars(module) if not name.startswith("_") and name not in ("losses", "validation_outputs")]
    return {name: value for name in names if _is_plain(value := vars(module)[name])}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | torch.Tensor)


def _assert_same_copies(case: Case, ours: Copies, eager: Copies) -> None:
    """Assert that copies and pickles have the same modules and weights."""
    assert (ours.pickled is None) == (eager.pickled is None)
    assert b"compile_callbacks." not in (ours.pickled or b"")  # it loads without an import of this library
    for copied in [ours.copy, *([] if ours.pickled is None else [pickle.loads(ours.pickled)])]:
        assert [type(module) for module in copied.modules()] == [type(module) for module in eager.copy.modules()]
        torch.testing.assert_close(dict(copied.state_dict()), dict(eager.copy.state_dict()), **case.close)


def _assert_reported(case: Case, report: Mapping[str, Any], said: list[str]) -> None:
    for phase in ("train", "infer"):
        found = report[phase]
        if not case.compiles(phase):
            assert found["graphs"] == 0
        elif case.row:
            assert found["graphs"] >= 1
        if found["verified"]:
            assert found["verified"] == f"equal {found['graphs']}" or f"{phase}.verified" in case.expect
    if case.row:
        return
    expect = UNSURPRISING | dict(case.expect)
    phases = [phase for phase in ("train", "infer") if case.compiles(phase)]
    expect = {path: value for path, value in expect.items() if path.split(".")[0] in phases and value is not ...}
    assert {path: _at(report, path) for path in expect} == expect
    codes = [code for text in said for code in re.findall(r"\[(CC\d{3})", text)]
    assert codes == list(case.codes)
    assert re.search(case.says, "\n".join(said))


def _at(report: Mapping[str, Any], path: str) -> Any:
    return functools.reduce(operator.getitem, path.split("."), report)
