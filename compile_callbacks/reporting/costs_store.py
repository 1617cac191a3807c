"""What compiling cost and steps took in earlier runs, of the whole model and of its repeated blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from compile_callbacks.compiling.targets import Scope
from compile_callbacks.files.json_files import JsonFiles
from compile_callbacks.tuning.choices_store import fingerprint


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a run measured of a phase.

    Attributes:
        compile_seconds: Seconds spent compiling.
        cold: Whether no graph of it came out of a cache, and no kept artifacts were loaded.
        step_ms: Median of the compiled steps, in milliseconds.
        samples: How many they were.
        second: Whether the model had been compiled the other way before, by then: what kernels both have may have come
            from torch's cache folder, of which torch does not tell.
    """

    compile_seconds: float
    cold: bool
    step_ms: float
    samples: int
    second: bool = False


def cold_if_known(cost: Cost, earlier: Cost | None) -> Cost:
    """A cost with what compiling took without a cache, where an earlier run of the same knows that."""
    if earlier is None or not earlier.cold or cost.cold:
        return cost
    return replace(cost, compile_seconds=earlier.compile_seconds, cold=True, second=earlier.second)


class CostsStore:
    """Keeps costs in a folder, across runs; what cannot be read or written is not known.

    Args:
        folder: Where the files are, one for all that costs are compared in.
    """

    def __init__(self, folder: Path) -> None:
        self._files = JsonFiles(folder)

    def load(self, made_for: Mapping[str, str], scope: Scope) -> Cost | None:
        """What the last run with these targets measured.

        Args:
            made_for: The circumstances, without the targets.
            scope: What was compiled of the model.
        """
        data = self._files.load(fingerprint(made_for))
        try:
            return Cost(**data[scope]) if data["made_for"] == dict(made_for) else None
        except (KeyError, TypeError):
            return None

    def save(self, made_for: Mapping[str, str], scope: Scope, cost: Cost) -> str | None:
        """Keep what a run measured; a compile without a cache counts for longer than one with.

        Returns:
            Why it could not be kept, or ``None``.
        """
        data = {"made_for": dict(made_for)}
        for other in ("whole", "repeated"):
            if (earlier := self.load(made_for, other)) is not None:
                if other == scope:
                    cost = cold_if_known(cost, earlier)
                data[other] = asdict(earlier)
        data[scope] = asdict(cost)
        return self._files.save(fingerprint(made_for), data)
