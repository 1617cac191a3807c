"""What earlier runs chose: a small JSON file for each model, shape, precision, device, passes and set of versions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks.architecture import architecture_key, code_key
from compile_callbacks.devices.device_description import described_device, device_name
from compile_callbacks.files.json_files import JsonFiles
from compile_callbacks.passes import pass_identity
from compile_callbacks.phases import Phase
from compile_callbacks.versions import installed_version


def circumstances(
    module: nn.Module,
    *,
    phase: Phase,
    settings_key: str,
    passes: Sequence[Any],
    targets: tuple[str, ...],
    work: str,
    precision: str,
    device: torch.device,
    processes: int = 1,
) -> dict[str, str]:
    """What a choice holds for: all that may change which candidate is the fastest.

    Args:
        module: The module that is compiled.
        phase: The phase.
        settings_key: The key of the candidates, or of the one config.
        passes: Graph passes that all candidates have.
        targets: Names of the targets.
        work: What a step has to do, shapes and dtypes of its batch among it.
        precision: The trainer's precision, and with it the autocast.
        device: Where the module is.
        processes: How many processes train together.
    """
    return {
        "architecture": architecture_key(module),
        "code": code_key(module),
        "compile-callbacks": installed_version("compile-callbacks") or "none",
        "device": device_name(device),
        "device_key": _digest(described_device(device)),
        "passes": ", ".join(map(pass_identity, passes)),
        "phase": phase,
        "precision": f"{precision}, float32 products: {torch.get_float32_matmul_precision()}",
        "processes": str(processes),
        "targets": ", ".join(targets),
        "torch": torch.__version__,
        "triton": installed_version("triton") or "none",
        "tune": settings_key,
        "work": work,
    }


def fingerprint(made_for: Mapping[str, str]) -> str:
    """A hash of `circumstances`, equal for equal ones in every process."""
    return _digest(dict(made_for))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen.

    Attributes:
        candidate: The candidate's settings, in a line; ``"eager"`` for eager.
        key: `InductorConfig.key` of the same; empty for eager.
        holds_for_steps: The longest run, in steps of the phase, that it holds for: a longer one can repay what was not
            worth its compile.
        eager_ms: Median of an eager step when it was chosen, in milliseconds; ``None`` where none was measured.
    """

    candidate: str
    key: str = ""
    holds_for_steps: float = field(default=math.inf, compare=False)
    eager_ms: float | None = field(default=None, compare=False)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Choice:
        """The choice that `to_data` made ``data`` of.

        Raises:
            KeyError: A field is missing.
            TypeError: It is no mapping, or a number is none.
            ValueError: A number is out of range.
            OverflowError: A number is too large.
        """
        steps, eager_ms = data["holds_for_steps"], data.get("eager_ms")
        steps = math.inf if steps is None else float(steps)
        eager_ms = None if eager_ms is None else float(eager_ms)
        if not steps >= 0 or (eager_ms is not None and not 0 < eager_ms < math.inf):
            raise ValueError(f"no choice holds for {steps} steps, and no step takes {eager_ms} ms")
        return cls(candidate=str(data["candidate"]), key=str(data["key"]), holds_for_steps=steps, eager_ms=eager_ms)

    def to_data(self) -> dict[str, Any]:
        """The choice as JSON-ready data."""
        return {
            **asdict(self),
            "holds_for_steps": self.holds_for_steps if math.isfinite(self.holds_for_steps) else None,
        }


class ChoicesStore:
    """Keeps choices in a folder, across runs; what is damaged, or cannot be read or written, costs tuning anew.

    Args:
        folder: Where the files are; made when there is something to keep.
    """

    def __init__(self, folder: Path) -> None:
        self._files = JsonFiles(folder)

    def load(self, made_for: Mapping[str, str]) -> Choice | None:
        """What an earlier run chose under the same circumstances.

        Args:
            made_for: The `circumstances`.

        Returns:
            The choice; ``None`` where there is none, or where its file is damaged.
        """
        data = self._files.load(fingerprint(made_for))
        try:
            return Choice.from_data(data) if data["made_for"] == dict(made_for) else None
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    def path(self, made_for: Mapping[str, str]) -> Path:
        """The file of the choice for some `circumstances`."""
        return self._files.path(fingerprint(made_for))

    def save(self, made_for: Mapping[str, str], choice: Choice, trials: list[dict[str, Any]]) -> str | None:
        """Keep a choice.

        Args:
            made_for: The `circumstances`.
            choice: What was chosen.
            trials: What came of each candidate, for a person to read.

        Returns:
            Why it could not be kept, or ``None``.
        """
        data = {**choice.to_data(), "made_for": dict(made_for), "trials": trials}
        return self._files.save(fingerprint(made_for), data)


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]
