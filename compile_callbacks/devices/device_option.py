"""The device that a command of the command line is about."""

from __future__ import annotations

import torch

from compile_callbacks.choices import unknown


def parse_device(name: str | None) -> torch.device:
    """The device of a ``--device`` option.

    Args:
        name: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; ``None``: the GPU if there is one, else the CPU.

    Raises:
        ValueError: No such device, or one that is not here.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and index.isdecimal())):
        raise ValueError(unknown("--device", name, ["cpu", "cuda", "cuda:N"]))
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise ValueError(f"--device={name!r} is not here: torch can use {count or 'no'} GPU{'s' * (count > 1)}")
    return torch.device(name)
