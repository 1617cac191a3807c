"""`ModelRecord`: a small JSON file in ``cache_dir`` that stores results of a model's run for the next run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks._utils.device import device_name
from compile_callbacks._utils.files import read_json, write_json
from compile_callbacks._utils.fingerprints import (
    architecture_fingerprint,
    code_fingerprint,
    device_fingerprint,
    digest,
    installed_version,
)
from compile_callbacks.passes.base import pass_identity

VERSION = 1

_SECTIONS = ("winners", "shapes", "compile_seconds")
_MAX_ENTRIES = 50  # in each section, so that a new batch size in each run does not fill the file


class ModelRecord:
    """One JSON file with three sections.

    - ``"winners"``: for each set of conditions, the winner of a `Tune`.
    - ``"shapes"``: for each phase and target, the input dimensions that vary.
    - ``"compile_seconds"``: for each phase and target, the time of the longest compile.

    If the file is missing, damaged or of another version, the record starts empty. If the file cannot be written, the
    record is lost and the run continues. Each write replaces the whole file, which only its owner can read.
    """

    def __init__(self, cache_dir: Path, fingerprint: str, *, read_only: bool = False) -> None:
        self.path = cache_dir / f"model-{fingerprint}.json"
        self.read_only = read_only

    def load(self) -> dict[str, Any]:
        """Read the version and the sections of the file, without values of the wrong type."""
        data = read_json(self.path)
        known = data if isinstance(data, dict) and data.get("version") == VERSION else {}
        record: dict[str, Any] = {"version": VERSION}
        for section in _SECTIONS:
            entries = known.get(section)
            entries = entries if isinstance(entries, dict) else {}
            record[section] = {key: value for key, value in entries.items() if isinstance(value, dict)}
        return record

    def update(self, section: str, key: str, value: Any) -> str | None:
        """Write one value if it is new, and delete the oldest values of the section if there are too many.

        Return the reason why the value could not be written, or ``None``.
        """
        if self.read_only:
            return None
        record = self.load()
        entries = record[section]
        if entries.pop(key, None) == value:
            return None
        entries[key] = value
        record[section] = dict(list(entries.items())[-_MAX_ENTRIES:])
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self.path, record, mode=0o600)
        except (OSError, TypeError, ValueError) as error:  # JSON raises the last two if it does not support a value
            return f"{type(error).__name__}: {error}"
        return None


def model_fingerprint(module: nn.Module) -> str:
    """Return a hash that identifies a model by its architecture and its code."""
    return digest([architecture_fingerprint(module), code_fingerprint(module)])


def conditions(
    *, model: str, targets: Sequence[str], passes: Sequence[Any], precision: str, device: torch.device, ranks: int = 1
) -> dict[str, str]:
    """Return the conditions of a run that may change which config is the fastest."""
    return {
        "compile-callbacks": installed_version("compile-callbacks") or "none",
        "device": device_name(device),
        "device_key": device_fingerprint(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "model": model,
        "passes": ", ".join(str(pass_identity(graph_pass)) for graph_pass in passes),
        "precision": precision,
        "ranks": str(ranks),
        "targets": ", ".join(targets),
        "torch": torch.__version__,
        "triton": installed_version("triton") or "none",
    }
