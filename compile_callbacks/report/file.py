"""Writes and reads ``compile_report.json``: a JSON list with one record for each trainer call.

Imports no torch, because ``compile-callbacks check`` does not.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from compile_callbacks._utils.errors import warn_user

FILE_NAME = "compile_report.json"
VERSION = 1
"""The version of the records."""

_MAX_RECORDS = 100  # limited, because each call rewrites the file and a notebook may call validate many times
_PACKAGES = ("torch", "triton", "lightning", "compile-callbacks")


def make_record(
    report: Mapping[str, Any], call: str | None = None, step: int | None = None, error: BaseException | None = None
) -> dict[str, Any]:
    """Return the record of a trainer call, or of a report alone, as JSON-ready data."""
    return {
        "version": VERSION,
        "call": call,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "global_step": step,
        "exception": type(error).__name__ if error is not None else None,
        "environment": environment(),
        "report": report,
    }


def append_record(filesystem: Any, folder: str, record: Mapping[str, Any]) -> str:
    """Append a record to the file in a folder, and return its path. Replace a damaged file."""
    path = f"{folder.rstrip('/')}/{FILE_NAME}"
    records: list[Any] = []
    filesystem.makedirs(folder, exist_ok=True)
    try:
        records = [old for old in read_records(filesystem.cat_file(path)) if isinstance(old, dict)]
    except FileNotFoundError:
        pass
    except ValueError as error:
        warn_user("CC402", f"{path} is damaged and will be replaced: {error}. The reports of earlier runs are lost")
    # Writes to a temporary file first, because a killed process must not leave half of a file.
    filesystem.pipe_file(f"{path}.tmp", json.dumps([*records, record][-_MAX_RECORDS:]).encode())
    filesystem.mv(f"{path}.tmp", path)
    return path


def read_records(content: bytes) -> list[Any]:
    """Return the records of a file's content, in order. Any record may be damaged."""
    try:
        records = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(records, list):
        raise ValueError("not a list of records")
    return records


def environment() -> dict[str, str]:
    """Return the versions of the installed packages, and the name of the device."""
    import torch

    from compile_callbacks._utils.device import device_name
    from compile_callbacks._utils.files import installed_version

    installed = {package: version for package in _PACKAGES if (version := installed_version(package)) is not None}
    # If nothing has initialized CUDA, no GPU ran the steps.
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = device_name(torch.device("cuda" if on_gpu else "cpu"))
    return {"python": platform.python_version(), **installed, "device": device}
