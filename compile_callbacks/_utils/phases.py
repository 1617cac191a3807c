"""The two phases that a module is compiled for.

*train* is ``training_step``; *infer* is sanity check, validation, test and predict. The phase follows the
trainer's stage, not ``module.training`` and not the grad mode.
"""

from __future__ import annotations

from typing import Literal, get_args

Phase = Literal["train", "infer"]
"""``"train"`` or ``"infer"``."""

PHASES: tuple[Phase, ...] = get_args(Phase)
