"""One HPARAMS entry for a run: the user's hyperparameters with ours beside them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

WriteEntry = Callable[[Mapping[str, Any], Mapping[str, Any]], None]


class JoinedHyperparameters:
    """Stands in for a TensorBoardLogger's ``log_hyperparams`` until an entry is written.

    Lightning writes the module's hyperparameters before training, and TensorBoard keeps a run's first entry alone.
    So ours goes in just before that one, with everything that the user's has; then the logger is as it was.

    Args:
        logger: The logger.
        write: Writes an entry; is given the user's hyperparameters and metrics.
    """

    def __init__(self, logger: Any, write: WriteEntry) -> None:
        self._logger = logger
        self._write = write

    @classmethod
    def on(cls, logger: Any) -> JoinedHyperparameters | None:
        """The one that stands in on this logger, if one does."""
        method = vars(logger).get("log_hyperparams")
        return method if isinstance(method, cls) else None

    def join(self) -> None:
        """Take the place of the logger's method."""
        self._logger.log_hyperparams = self

    def leave(self) -> None:
        """Give it back."""
        vars(self._logger).pop("log_hyperparams", None)

    def __call__(self, params: Mapping[str, Any] | Namespace, metrics: Any = None, *args: Any, **kwargs: Any) -> None:
        """Write the entry of both, then do what was asked for: it writes an entry that no longer counts."""
        if metrics is not None or _writes_without_metrics(self._logger):
            self.leave()
            named = metrics if isinstance(metrics, Mapping) else {"hp_metric": metrics}
            self._write(vars(params) if isinstance(params, Namespace) else params, named)
        type(self._logger).log_hyperparams(self._logger, params, metrics, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle of the logger has its own method.
        return getattr, (self._logger, "log_hyperparams")


def _writes_without_metrics(logger: Any) -> bool:
    # Lightning writes no entry where the user gave it default_hp_metric=False and names no metric; the logger keeps
    # that to itself.
    return bool(getattr(logger, "_default_hp_metric", True))
