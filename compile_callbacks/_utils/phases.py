"""Names the two phases that the library compiles a module for.

*train* is ``training_step``. *infer* is sanity check, validation, test and predict. The trainer's stage decides the
phase, not ``module.training`` or the grad mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Phase = Literal["train", "infer"]
"""``"train"`` or ``"infer"``."""

PHASES: tuple[Phase, ...] = get_args(Phase)

EAGER = "eager"
"""The mode of a phase that this library does not compile, and the name of its variant."""

WAITING = "waiting"
"""The name of the variant of eager steps during which the helper process compiles."""

MODE_ARGUMENTS: Mapping[Phase, str] = {"train": "train_mode", "infer": "infer_mode"}
"""The argument that sets the mode of a phase. Advice names it."""
