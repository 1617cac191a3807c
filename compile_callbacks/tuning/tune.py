"""`Tune`: candidates for the config of a phase. `as_phase_config` converts a ``train_mode`` or ``infer_mode``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_fields, check_type
from compile_callbacks._utils.phases import EAGER
from compile_callbacks.config.fast import FAST, Fast
from compile_callbacks.config.inductor_config import InductorConfig, Mode, Settings, as_config
from compile_callbacks.profiling.comparison import MIN_SAMPLES

AUTO = "auto"
"""The mode, and the value of ``candidates``, for which the library chooses candidates by device, phase and run."""


@dataclass(frozen=True)
class Tune(Settings):
    """Candidates for the settings of a phase. The run tries each candidate on its own steps and keeps the fastest.

    Each step trains or validates as usual, with any candidate. Eager is always a candidate.

    Eager and each candidate run one block in turn: a step that compiles, a step that may record a CUDA graph, two
    warm-up steps, and ``steps`` timed steps. Then eager and the fastest candidate run one to ten rounds of one block
    each, in alternating order. The candidate wins if the 99% confidence interval of its speedup is above 1.01, or if it
    is faster by 1% in nine of ten rounds. Only steps of the most frequent workload are compared.

    Args:
        candidates: Modes, templates, `InductorConfig` objects or mappings of their fields, the cheapest to compile
            first. Equal candidates count once. ``"auto"`` chooses candidates for the device and the phase, and skips
            candidates that cannot amortize their compile time in the rest of the run.
        steps: The number of timed steps in a block, at least 5.

    Raises:
        ValueError: If eager is the only candidate, a mode is unknown, or ``steps`` is out of range.
        TypeError: If an argument has the wrong type or is unknown.

    Example::

        >>> Tune(["default", "reduce-overhead"], steps=20).describe()
        'tune(default | reduce-overhead, steps=20)'
    """

    candidates: str | Sequence[Mode]
    _: KW_ONLY
    steps: int = 10

    def __post_init__(self) -> None:
        check_type("steps", self.steps, int, "an integer")
        if self.steps < MIN_SAMPLES:
            message = f"steps={self.steps!r} must be {MIN_SAMPLES} or more: fewer samples prove nothing"
            raise ValueError(with_code("CC201", message))
        if (given := self.candidates) == AUTO:
            return
        kinds = list if isinstance(given, str) else Sequence  # because a string is a sequence, too
        check_type("candidates", given, kinds, "a list of modes or configs, or 'auto'")
        configs = [as_config(candidate, f"candidates[{i}]") for i, candidate in enumerate(given)]
        object.__setattr__(self, "candidates", tuple(dict.fromkeys(filter(None, configs))))
        if not self.candidates:
            message = f"candidates={given!r} has no candidate except eager, which is always a candidate"
            raise ValueError(with_code("CC201", message))

    @property
    def configs(self) -> tuple[InductorConfig, ...]:
        """The candidates in order, without eager. Empty for ``"auto"``, because its candidates depend on the device."""
        return () if isinstance(self.candidates, str) else tuple(self.candidates)  # type: ignore[arg-type]

    def describe(self) -> str:
        """Return the candidates, and the number of steps if it is not the default, in one line."""
        names = " | ".join(config.describe() for config in self.configs) or AUTO
        steps = "" if self.steps == Tune.steps else f", steps={self.steps}"
        return AUTO if names == AUTO and not steps else f"tune({names}{steps})"


PhaseMode = str | InductorConfig | Tune | Mapping[str, Any] | None
"""The type of ``train_mode`` and ``infer_mode``. `inductor_config.Mode` tells why ``Mapping`` comes last."""

PhaseConfig = InductorConfig | Tune | Fast | None
"""A converted `PhaseMode`. ``None`` if the phase is not compiled."""


def as_phase_config(value: object, argument: str) -> PhaseConfig:
    """Convert a ``train_mode`` or ``infer_mode``. Return ``None`` if the phase is not compiled."""
    if isinstance(value, Tune):
        return value
    if value in (AUTO, FAST):
        return Tune(AUTO) if value == AUTO else Fast()
    if isinstance(value, Mapping) and "candidates" in value:
        check_fields(argument, value, Tune)
        return Tune(**value)
    return as_config(value, argument, also=(FAST, AUTO, EAGER))
