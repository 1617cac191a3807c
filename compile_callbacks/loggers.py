"""Scalars to Lightning's loggers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from lightning.pytorch.loggers import Logger

from compile_callbacks.region import CompileWarning


def log_scalars(loggers: Sequence[Logger], scalars: Mapping[str, float], step: int) -> None:
    """Give every logger the scalars; one that raises costs its numbers, not the run.

    Args:
        loggers: The trainer's loggers.
        scalars: Values by name.
        step: The trainer's global step.
    """
    if not scalars:
        return
    for logger in loggers:
        try:
            logger.log_metrics(dict(scalars), step=step)
        except Exception as error:
            warnings.warn(
                f"{type(logger).__name__} did not take the compile report: {type(error).__name__}: {error}",
                CompileWarning,
                stacklevel=2,
            )
