"""What is measured, and in which ways: plain data, so that whoever conducts or prints needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Work:
    """What is done.

    Args:
        model: As `models.make` takes it.
        phase: Training steps or inference.
        batch_size: Samples in a batch.
        image_size: Height and width; ``None``: what the model is made for.
        device: ``"cpu"`` or ``"cuda"``.
        run_steps: Steps that the trainer is told of: what "auto" may spend on trying depends on them.
    """

    model: str
    phase: Literal["train", "infer"]
    batch_size: int
    image_size: int | None
    device: str
    run_steps: int


@dataclass(frozen=True)
class Way:
    """How it is done.

    Args:
        name: What tables call it.
        loop: A Trainer's ``fit`` or ``predict``, a bare loop, or a bare loop of `InductorBackend.infer`.
        compiled: ``None`` for eager, or what is compiled: the ``"child"`` by hand with `torch.compile`, the
            LightningModule as Lightning takes it from `torch.compile` (``"module"``), or what this library's
            ``"callback"`` or backend compiles.
        mode: Of `torch.compile`, or as the callback takes it.
        targets: As the callback takes them.
        passes: Names of this library's graph passes, for the callback.
    """

    name: str
    loop: Literal["fit", "predict", "bare", "backend"]
    compiled: Literal["child", "module", "callback"] | None = None
    mode: Any = None
    targets: Any = None
    passes: tuple[str, ...] = ()

    @property
    def tuned(self) -> bool:
        """Whether measurements choose."""
        return self.mode == "auto"
