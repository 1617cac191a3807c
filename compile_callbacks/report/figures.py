"""`figure` declares a figure of the report: its computation, its row of the table, its scalar and its limit."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

from compile_callbacks._utils.phases import Phase

if TYPE_CHECKING:  # because ``compile-callbacks check`` does not import torch
    from compile_callbacks.report.build import PhaseFacts

NOTHING = "-"
"""The cell of a figure that was not measured."""

COUNT = "{:d}"
"""The format of a count. A zero is shown like a figure that was not measured."""

Group = Literal["speed", "compile", "correctness"]
GROUPS: tuple[Group, ...] = get_args(Group)


class Figure(NamedTuple):
    """The declaration of a figure.

    Attributes:
        value: Computes the figure.
        group: The group of its row in the main table. Without a group, the figure has no row.
        form: The format of its cell, such as ``"{:.1f}"``, or a function that returns the cell from the object that
            has the figure.
        row: The label of its row, by default the name of the figure.
        scalar: The name of its logged scalar, with ``PHASE`` for the phase.
        limit: Whether a contract states the ``"most"`` or the ``"least"`` that is allowed.
        zero: Whether the line "no graph breaks, recompiles or fallbacks" names the figure if it is zero.
    """

    value: Callable[[PhaseFacts], Any]
    group: Group | None = None
    form: str | Callable[[Any], str] = "{}"
    row: str = ""
    scalar: str = ""
    limit: Literal["most", "least"] | None = None
    zero: bool = False

    def label(self, name: str) -> str:
        """Return the label of the row."""
        return self.row or name.replace("_", " ").replace("mib", "MiB")


def figure(
    value: Callable[[PhaseFacts], Any], group: Group | None = None, *form: Any, default: Any = None, **more: Any
) -> Any:
    """Declare a `Figure` as a field of a class that derives from `Figures`. It needs no other code.

    The string literal below such a field describes it in docs/reference/report.md. ``default`` is the value before the
    figure was measured. If ``default`` is a class, the value is a new object of the class.
    """
    initial: Any = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return field(**initial, metadata={"figure": Figure(value, group, *form, **more)})


def count(kind: str, **more: Any) -> Any:
    """Declare the number of events of a kind, which has a row if it is not zero."""
    return figure(lambda facts: len(facts.events(kind)), "compile", COUNT, default=0, **more)


class Data:
    """A dataclass that converts itself to JSON-ready data and back."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data. An infinite number becomes ``"never"``."""
        data: dict[str, Any] = _json_ready(asdict(self))  # type: ignore[call-overload]
        return data

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Create an object from `to_dict` data. A field that is missing or of a wrong type gets its default."""
        values, hints = dict[str, Any](), get_type_hints(cls)
        for f in fields(cls):  # type: ignore[arg-type]
            value = data.get(f.name) if isinstance(data, Mapping) else None
            value = math.inf if value == "never" else value
            if isinstance(f.default_factory, type) and issubclass(f.default_factory, Data):
                values[f.name] = f.default_factory.from_dict(value)
            elif value is not None and _fits(value, hints[f.name]):
                values[f.name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


class Figures(Data):
    """A dataclass of figures."""

    @classmethod
    def declared(cls) -> dict[str, Figure]:
        """Return the declarations by name, in order."""
        return {f.name: f.metadata["figure"] for f in fields(cls)}  # type: ignore[arg-type]

    @classmethod
    def of(cls, facts: PhaseFacts) -> Self:
        """Compute all figures."""
        return cls(**{name: figure.value(facts) for name, figure in cls.declared().items()})

    def cells(self) -> Iterator[tuple[Group, str, str]]:
        """Yield the group, the label and the cell of each row of the main table."""
        for name, f in self.declared().items():
            value = getattr(self, name)
            if f.group:
                shown = f.form(self) if callable(f.form) else cell(value, f.form)
                yield f.group, f.label(name), shown
            elif isinstance(value, Figures):
                yield from value.cells()

    def scalars(self, phase: Phase) -> dict[str, float]:
        """Return the figures by the names of the logged scalars."""
        declared = self.declared().items()
        values = {f.scalar.replace("PHASE", phase): getattr(self, name) for name, f in declared if f.scalar}
        return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def cell(value: object, form: str) -> str:
    """Format a figure for a table."""
    if value is None or (form == COUNT and not value):
        return NOTHING
    text = "never" if value == math.inf else form.format(value)
    return text.lstrip("-") if text in ("-0.0", "-0.00") else text


def _json_ready(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _json_ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    return "never" if value == math.inf else value


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value read from JSON has the type of a field."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is types.UnionType or kind is Union:
        return any(_fits(value, of) for of in arguments)
    if kind is Literal:
        return value in arguments
    if kind is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, arguments[0]) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)
