"""`figure` declares a figure of the report by the function that computes it from `PhaseFacts`.

Imports no torch, because ``compile-callbacks check`` does not.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from compile_callbacks._utils.messages import unknown
from compile_callbacks._utils.phases import Phase

if TYPE_CHECKING:
    from compile_callbacks.profiling.events import CompileKey
    from compile_callbacks.profiling.recorder import CompileRecorder
    from compile_callbacks.profiling.step_times import PhaseTimes, StepTimes

_T = TypeVar("_T")

NOTHING = "-"
"""The cell of a figure that was not measured."""

COUNT = "{:d}"
"""The format of a count. A zero is shown like a figure that was not measured."""

Group = Literal["speed", "compile", "correctness"]


@dataclass(kw_only=True)
class PhaseFacts:
    """The measurements of a phase, from which the figures are computed. With a `Tune`, of the chosen candidate."""

    phase: Phase
    mode: str  # the settings in one line
    mode_reason: str | None  # why the mode "fast" became these settings
    target_labels: Mapping[str, Callable[[int], str]]  # the label of a target, by its name, from its number of graphs
    recorder: CompileRecorder
    phase_times: PhaseTimes
    trials: tuple[dict[str, Any], ...]
    waits: bool  # whether the helper process still compiles a graph

    def __post_init__(self) -> None:
        self.candidate = chosen_candidate(self.trials)
        self.steps: Counter[Any] = self.phase_times.steps(self.candidate)

    def counts(self, key: CompileKey) -> bool:
        """Return whether the figures count what happened to a target with this key."""
        return key.phase == self.phase and self.candidate in (None, key.candidate)

    @functools.cached_property
    def times(self) -> StepTimes:
        """The step times of the workload with the most samples."""
        return self.phase_times.compared(self.candidate)

    @functools.cached_property
    def savings(self) -> tuple[float | None, float | None]:
        """The net seconds saved and the break-even steps, or twice ``None`` if nothing was compiled or compared."""
        compiles = [event for event in self.recorder.events if event.kind == "compile"]
        ours = [event for event in compiles if event.phase == self.phase]
        if not ours:
            return None, None
        seconds_outside_steps = self.recorder.executions.import_seconds if compiles[0] is ours[0] else 0.0
        seconds_outside_steps += sum(event.seconds or 0 for event in ours if event.step is None)
        return self.phase_times.savings(self.candidate, seconds_outside_steps) or (None, None)


def chosen_candidate(trials: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the candidate that a `Tune` chose."""
    return next((trial["candidate"] for trial in trials if trial["verdict"] == "chosen"), None)


@dataclass(eq=False)
class Declaration(functools.cached_property[_T]):
    """The declaration of a figure: a function that computes the figure once, and whose docstring describes it."""

    func: Callable[[Any], _T]
    group: Group | None = None  # of its row in the main table; without a group, the figure has no row
    form: str | Callable[[Any], str] = "{}"  # the format of its cell, or a function of the object that has the figure
    row: str = ""  # the label of its row, by default the name of the figure
    scalar: str = ""  # the name of its logged scalar, with ``PHASE`` for the phase
    default: Any = None  # the value before it was measured

    def __post_init__(self) -> None:
        super().__init__(self.func)
        self.row = self.row or self.func.__name__.replace("_", " ").replace("mib", "MiB")


def figure(*group_and_form: Any, **more: Any) -> Callable[[Callable[[Any], _T]], Declaration[_T]]:
    """Declare a figure by a method of a class that derives from `Figures`, with the arguments of `Declaration`."""
    return lambda function: Declaration(function, *group_and_form, **more)


class Figures:
    """Attributes that a `figure` declares. With ``facts``, such as `PhaseFacts`, each is computed when it is read."""

    def __init__(self, **values: Any) -> None:
        for name in values.keys() - {"facts", *self.declared()}:
            raise TypeError(unknown("figure", name, self.declared()))
        defaults = {} if "facts" in values else {name: f.default for name, f in self.declared().items()}
        vars(self).update(defaults | values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other.to_dict() == self.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}.from_dict({self.to_dict()})"

    @classmethod
    def declared(cls) -> dict[str, Declaration[Any]]:
        """Return the declarations by name, in order."""
        return {name: value for name, value in vars(cls).items() if isinstance(value, Declaration)}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data. An infinite number becomes ``"never"``."""
        return {name: _json_ready(getattr(self, name)) for name in self.declared()}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Create an object from `to_dict` data. A figure that is missing gets its default."""
        values = {}
        for name, declaration in cls.declared().items():
            value = data.get(name) if isinstance(data, Mapping) else None
            if isinstance(declaration.default, Figures):
                value = declaration.default.from_dict(value)
            if value is not None:
                values[name] = math.inf if value == "never" else tuple(value) if isinstance(value, list) else value
        return cls(**values)

    def cells(self) -> Iterator[tuple[Group, str, str]]:
        """Yield the group, the label and the cell of each row of the main table."""
        for name, declaration in self.declared().items():
            value, form = getattr(self, name), declaration.form
            if declaration.group:
                yield declaration.group, declaration.row, form(self) if callable(form) else cell(value, form)
            elif isinstance(value, Figures):
                yield from value.cells()

    def scalars(self, phase: Phase) -> dict[str, float]:
        """Return the figures by the names of the logged scalars."""
        scalars = {
            f.scalar.replace("PHASE", phase): getattr(self, name) for name, f in self.declared().items() if f.scalar
        }
        return {name: float(x) for name, x in scalars.items() if x is not None and math.isfinite(x)}


def cell(value: object, form: str) -> str:
    """Format a figure for a table."""
    if value is None or (form == COUNT and not value):
        return NOTHING
    text = "never" if value == math.inf else form.format(value)
    return text.lstrip("-") if text in ("-0.0", "-0.00") else text


def _json_ready(value: Any) -> Any:
    if isinstance(value, Figures):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: _json_ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    return "never" if value == math.inf else value
