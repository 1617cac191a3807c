"""Several `InductorCompile` callbacks in one Trainer: what they may compile, and their names in logs and files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import nn

from compile_callbacks.runtime.target import overlap
from compile_callbacks.runtime.targets import named_targets

Names = Sequence[str] | str | None
"""The ``targets`` of a callback."""


class _Callback(Protocol):
    @property
    def targets(self) -> Names: ...

    @property
    def cache_dir(self) -> Path | None: ...


def why_not_together(callbacks: Sequence[_Callback], module: nn.Module) -> str | None:
    """Why the callbacks of a trainer cannot run together; ``None`` if they can.

    Raises:
        ValueError: A name in targets matches nothing.
    """
    for one, other in itertools.combinations(callbacks, 2):
        if one.cache_dir and other.cache_dir and one.cache_dir != other.cache_dir:
            return (
                f"two InductorCompile callbacks have different folders, cache_dir={str(one.cache_dir)!r} and "
                f"{str(other.cache_dir)!r}, and torch has one for the process: give both callbacks the same"
            )
        if one.targets is None and other.targets is None:
            return (
                "two InductorCompile callbacks have targets=None, so both would compile the whole module: name the "
                "targets of one, as in InductorCompile('max-autotune', targets=['net'])"
            )
        for first, second in itertools.product(
            named_targets(module, one.targets), named_targets(module, other.targets)
        ):
            if overlap(first, second):
                return f"two InductorCompile callbacks have overlapping targets: {first.name!r} and {second.name!r}"
    return None


def name_of(targets: Names) -> str:
    """The name of a callback in scalars and files, by its targets: ``"head-net"``."""
    names = targets if isinstance(targets, str) else "-".join(sorted(targets or ["default"]))
    return re.sub(r"[^A-Za-z0-9_.-]", "_", names)


def state_key(targets: Names) -> str:
    """The key of a callback's state in a checkpoint, by its targets. Unlike `name_of`, other targets have another."""
    return str(targets if targets is None or isinstance(targets, str) else sorted(targets))
