"""`ModelRecord`: the small JSON file that runs of one model leave in ``cache_dir`` for later runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compile_callbacks._utils.device import device_name
from compile_callbacks._utils.files import read_json, write_json
from compile_callbacks._utils.fingerprints import device_fingerprint, installed_version
from compile_callbacks.passes.base import pass_identity

VERSION = 1

_MAX_ENTRIES = 50  # of each section, the latest: a file that grows with each new batch size is no small file


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


_SECTIONS: Mapping[str, Callable[[object], bool]] = {"winners": _is_mapping, "compile_seconds": _is_seconds}


class ModelRecord:
    """One JSON file: a mapping of sections, each a mapping of keys to values.

    - ``"winners"``: the winner of a `Tune` by the key of the conditions that it was measured under.
    - ``"compile_seconds"``: the last compile time of each phase, in seconds.

    A file that is missing, damaged or of another version reads as an empty record, without values of the wrong type. A
    file that cannot be written costs the record, not the run. The file replaces the old one as a whole, and
    only its owner can read it.

    Args:
        cache_dir: The folder. It is created when there is something to write.
        fingerprint: Identifies the model, in the file's name.
        read_only: Write nothing. Of several ranks, only rank zero writes.
    """

    def __init__(self, cache_dir: Path, fingerprint: str, *, read_only: bool = False) -> None:
        self.path = cache_dir / f"model-{fingerprint}.json"
        self.read_only = read_only

    def load(self) -> dict[str, Any]:
        """Read the file: ``"version"``, and each section as a mapping, with values of the right type only."""
        data = read_json(self.path)
        if not isinstance(data, dict) or data.get("version") != VERSION:
            data = {}
        record: dict[str, Any] = {"version": VERSION}
        for section, is_valid in _SECTIONS.items():
            entries = data.get(section)
            entries = entries if isinstance(entries, dict) else {}
            record[section] = {key: value for key, value in entries.items() if is_valid(value)}
        return record

    def save(self, record: Mapping[str, Any]) -> str | None:
        """Write the file.

        Returns:
            Why it could not be written, or ``None``.
        """
        if self.read_only:
            return None
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self.path, record, mode=0o600)
        except (OSError, TypeError, ValueError) as error:  # the last two for a value that JSON has no form for
            return f"{type(error).__name__}: {error}"
        return None

    def update(self, section: str, key: str, value: Any) -> str | None:
        """Write one value; the oldest values of the section are dropped if there are too many.

        Returns:
            Why it could not be written, or ``None``.
        """
        record = self.load()
        entries = record[section]
        entries.pop(key, None)
        entries[key] = value
        record[section] = dict(list(entries.items())[-_MAX_ENTRIES:])
        return self.save(record)


def conditions(
    *,
    model: str,
    targets: Sequence[str],
    passes: Sequence[Any],
    precision: str,
    device: torch.device,
    ranks: int = 1,
) -> dict[str, str]:
    """The conditions of a run that may change which settings are the fastest.

    Args:
        model: Fingerprint of the model.
        targets: Names of the targets.
        passes: Graph passes.
        precision: The Trainer's precision.
        device: The device of the module.
        ranks: Number of ranks.
    """
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
