"""`Tune`: candidates and the rule by which measurements choose among them."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, get_args

from compile_callbacks.choices import check_choice, part_of, unknown
from compile_callbacks.links import checks_settings
from compile_callbacks.references import class_and_arguments
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.settings.mode import Mode as OneMode
from compile_callbacks.settings.mode import as_config

Rule = Literal["throughput", "latency", "first", "latency_budget"]
"""By what measurements choose."""

RULES: tuple[Rule, ...] = get_args(Rule)

AUTO = "auto"
"""The mode string, and the candidates, that are chosen to suit the device, the phase and the steps to come."""


@dataclass(frozen=True, eq=False)
class Tune:
    """Candidates for the settings of a phase, tried on real steps of the run, and the rule by which one is chosen.

    Every step that is measured trains or validates as any other: nothing is thrown away. Eager is always a candidate,
    and what is not faster than eager is not chosen. What eager does is, for a candidate that sets an autocast, what it
    does under that autocast: rounding that the autocast brings is not held against it. How it goes, and what it costs:
    docs/tune.md.

    Args:
        candidates: Modes, templates, `InductorConfig` objects or mappings of their fields, the cheapest to compile
            first; those that are given twice count once. ``"auto"``: what suits the device and the phase, without what
            cannot repay its compile time in what remains of the run.
        rule: What is chosen among the candidates that compile, compute what eager does and beat eager by
            ``min_speedup``. ``"throughput"``: the lowest median of a step's time. ``"latency"``: the lowest 95th
            percentile. ``"first"``: the first in order; those after it are not compiled. ``"latency_budget"``: the
            first in order whose 95th percentile is within ``latency_budget_ms``, eager before all others; where none
            is, the one with the lowest.
        steps: Samples of each candidate after which it is judged in any case, 1 or more; where it is clear before,
            it is judged before.
        budget_seconds: Time that steps may take while candidates are tried, compile time included; then the best so
            far is chosen, or eager. ``None``: no limit. A compile that is under way is not interrupted.
        min_speedup: How many times as fast as eager a candidate must be, 1 or more.
        latency_budget_ms: For the rule of that name, and needed there: milliseconds that a step may take.

    Raises:
        ValueError: No candidate beside eager, an unknown mode or rule, or a number out of range.
        TypeError: An argument of the wrong type.

    Example::

        >>> Tune(["reduce-overhead", "default"], rule="latency").describe()
        'tune(reduce-overhead | default, rule=latency)'
    """

    candidates: str | Sequence[OneMode]
    _: KW_ONLY
    rule: Rule = "throughput"
    steps: int = 20
    budget_seconds: float | None = None
    min_speedup: float = 1.01
    latency_budget_ms: float | None = None

    @checks_settings
    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", _checked(self.candidates))
        check_choice("rule", self.rule, RULES)
        if isinstance(self.steps, bool) or not isinstance(self.steps, int):
            raise TypeError(f"steps={self.steps!r} must be an integer, 1 or more")
        if self.steps < 1 or _is_too_large(self.steps):
            raise ValueError(f"steps={_shown(self.steps)} must be 1 or more, and finite as a float")
        _check_number("budget_seconds", self.budget_seconds, "seconds")
        _check_number("latency_budget_ms", self.latency_budget_ms, "milliseconds")
        if isinstance(self.min_speedup, bool) or not isinstance(self.min_speedup, (int, float)):
            raise TypeError(f"min_speedup={self.min_speedup!r} must be a number, 1 or more")
        if not 1 <= self.min_speedup < math.inf or _is_too_large(self.min_speedup):
            raise ValueError(
                f"min_speedup={_shown(self.min_speedup)} must be finite and 1 or more: what is slower than eager is "
                "not chosen"
            )
        if (self.rule == "latency_budget") != (self.latency_budget_ms is not None):
            raise ValueError(
                f"rule={self.rule!r} with latency_budget_ms={self.latency_budget_ms!r}: rule='latency_budget' needs "
                "latency_budget_ms, which no other rule reads"
            )

    def __eq__(self, other: object) -> bool:
        return self.key() == other.key() if isinstance(other, Tune) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key())

    @property
    def configs(self) -> tuple[InductorConfig, ...]:
        """The candidates in order, without eager; empty for ``"auto"``, which depends on the device."""
        return () if isinstance(self.candidates, str) else tuple(c for c in self.candidates if c is not None)  # type: ignore[misc]

    @property
    def freezes(self) -> bool:
        """Whether any candidate asks for weights to be baked in where they stand still."""
        return any(config.freezes for config in self.configs)

    @property
    def passes(self) -> tuple[Any, ...]:
        """The graph passes of all candidates."""
        return tuple(graph_pass for config in self.configs for graph_pass in config.passes)

    def check_beside(self, passes: Sequence[Any]) -> None:
        """Refuse passes at a hook point that the options or the template of a candidate set.

        Raises:
            ValueError: There is one.
        """
        for config in self.configs:
            config.check_beside(passes)

    def describe(self) -> str:
        """The candidates and what differs from the default rule, in a line; ``"auto"`` for the mode of that name."""
        names = " | ".join(config.describe() for config in self.configs) or AUTO
        others = [f"{name}={value}" for name, value in self._set_fields().items() if name != "candidates"]
        return AUTO if names == AUTO and not others else f"tune({', '.join([names, *others])})"

    def key(self) -> str:
        """A hash of candidates and rule: equal for equal ones, also in another process."""
        described = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "candidates"}
        described = {n: float(v) if isinstance(v, (int, float)) else v for n, v in described.items()}
        described["candidates"] = [config.key() for config in self.configs] or AUTO
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The candidates and what differs from the defaults as JSON-ready data; passes as ``"module:name"``.

        Raises:
            ValueError: As `InductorConfig.to_dict`.
        """
        return self._set_fields() | {"candidates": [config.to_dict() for config in self.configs] or AUTO}

    @classmethod
    @checks_settings
    def from_dict(cls, data: Mapping[str, Any]) -> Tune:
        """The `Tune` that `to_dict` made ``data`` of.

        Raises:
            ValueError: An unknown or missing field, or a value that is refused.
            TypeError: Not a mapping, or a value of the wrong type.
        """
        if not isinstance(data, Mapping):
            raise TypeError(f"data={data!r} must be a mapping of Tune's fields, not {type(data).__name__}")
        known = [f.name for f in fields(cls)]
        for name in data:
            if name not in known:
                raise ValueError(unknown("field", name, known))
        if "candidates" not in data:
            raise ValueError(f"data={dict(data)!r} has no candidates")
        candidates = data["candidates"]
        if isinstance(candidates, (list, tuple)):
            candidates = [InductorConfig.from_dict(c) if isinstance(c, Mapping) else c for c in candidates]
        return cls(**{**data, "candidates": candidates})

    def _set_fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


Mode = str | Mapping[str, Any] | InductorConfig | Tune | None
"""What a phase's settings may be given as where a Trainer's steps are measured; in this order as in `config.Mode`."""


def named(configs: Sequence[InductorConfig]) -> dict[str, InductorConfig]:
    """Configs by a name of their own: what `describe` says, numbered where two say the same (of unlike passes)."""
    names: dict[str, InductorConfig] = {}
    for config in configs:
        name, number = config.describe(), 1
        while name in names:
            number += 1
            name = f"{config.describe()} ({number})"
        names[name] = config
    return names


Settings = InductorConfig | Tune | None
"""What a `Mode` stands for; ``None``: not compiled."""


@checks_settings
def as_settings(value: object, argument: str) -> Settings:
    """What a ``train_mode`` or ``infer_mode`` stands for; ``None`` where it is not to be compiled.

    Raises:
        ValueError: An unknown mode or field.
        TypeError: A value that is no mode, mapping, config or `Tune`.
    """
    if isinstance(value, Tune):
        return value
    if value == AUTO:
        return Tune(AUTO)
    if isinstance(value, Mapping) and "class_path" in value:
        kind, given = class_and_arguments(value, argument, (InductorConfig, Tune))
        if issubclass(kind, Tune):
            with part_of(argument):
                return Tune.from_dict(given)
    if isinstance(value, Mapping) and "candidates" in value:
        with part_of(argument):
            return Tune.from_dict(value)
    return as_config(value, argument, also=(AUTO,))


def _checked(candidates: object) -> object:
    if candidates == AUTO:
        return AUTO
    if isinstance(candidates, (str, Mapping, InductorConfig)) or not isinstance(candidates, Sequence):
        raise TypeError(f"candidates={candidates!r} must be a list of modes or configs, or 'auto'")
    configs = [as_config(candidate, f"candidates[{i}]") for i, candidate in enumerate(candidates)]
    unlike = {config.key(): config for config in configs if config is not None}
    if not unlike:
        raise ValueError(f"candidates={candidates!r} has nothing to try beside eager, which is always a candidate")
    return tuple(unlike.values())


def _check_number(argument: str, value: object, unit: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument}={value!r} must be a number of {unit}, or None")
    if not 0 < value < math.inf or _is_too_large(value):
        raise ValueError(f"{argument}={_shown(value)} must be above 0 and finite")


def _is_too_large(number: float) -> bool:
    """Whether it is an integer that no float can hold."""
    return isinstance(number, int) and number > sys.float_info.max


def _shown(number: float) -> str:
    return "an integer beyond all floats" if _is_too_large(number) else repr(number)
