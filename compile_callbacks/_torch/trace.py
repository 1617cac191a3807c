"""torch's structured trace and its reproduction scripts, which `Session` and `Verification` write to ``trace_dir``."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


class StructuredTrace:
    """Writes torch's structured trace to a folder, one file for each process. ``tlparse`` reads it.

    Args:
        folder: The folder; torch creates it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handler: logging.Handler | None = None

    def start(self) -> None:
        """Start to trace all compiles of this process."""
        from torch._logging import _internal, structured

        if self._handler is not None:
            return
        self._handler = _internal.LazyTraceHandler(str(self._folder))
        self._handler.setFormatter(_internal.TorchLogsFormatter(trace=True))
        _internal.trace_log.addHandler(self._handler)
        # torch writes the name of each source file once in a process, so the names known by now are missing.
        for name, number in structured.INTERN_TABLE.items():
            entry = name, number
            _internal.trace_structured("str", lambda entry=entry: entry, suppress_context=True)  # type: ignore[misc]

    def stop(self) -> None:
        """Stop tracing, and close the file."""
        from torch._logging import _internal

        handler, self._handler = self._handler, None
        if handler is not None:
            _internal.trace_log.removeHandler(handler)
            handler.close()


def write_repro(
    folder: Path, name: str, graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], why: str
) -> Path:
    """Write a script that compares a graph with eager, and its inputs.

    Args:
        folder: The folder; it is created if needed.
        name: A part of the script's name.
        graph: The captured graph.
        inputs: Its inputs.
        options: The Inductor options. Those that are not plain values, such as graph passes, are left out.
        why: A line for the head of the script.

    Returns:
        The path of the script.
    """
    from torch._dynamo.repro.after_dynamo import generate_dynamo_fx_repro_string

    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        script = folder / f"repro_{name}_{number}.py"
        try:
            script.touch(exist_ok=False)  # of several processes, each takes another number
            break
        except FileExistsError:
            continue
    saved = str(script.with_suffix(".inputs"))
    text = generate_dynamo_fx_repro_string(graph, inputs, "inductor", check_accuracy=True, save_dir=saved)
    plain = {key: value for key, value in options.items() if isinstance(value, (bool, int, float, str))}
    head = (
        f"# {why}\n# Run this script: it raises AccuracyError if the compiled graph differs from eager.\n"
        "# Graph passes are not part of it.\n"
    )
    settings = f"import torch._inductor.config\ntorch._inductor.config.patch({plain!r}).__enter__()\n\nclass Repro("
    script.write_text(head + text.replace("class Repro(", settings, 1))
    return script
