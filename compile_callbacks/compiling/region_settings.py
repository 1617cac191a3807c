"""What a compiled region does beside compiling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from compile_callbacks.compiling.shapes import NewShapes
from compile_callbacks.compiling.verify import Verify

OnError = Literal["eager", "raise"]
"""What a failure of the compiler does: cost speed, or end the run."""

ON_ERROR: tuple[OnError, ...] = get_args(OnError)


@dataclass(frozen=True, kw_only=True)
class RegionSettings:
    """What a region does beside compiling.

    Attributes:
        on_error: What a failure of the compiler does.
        verify: What a difference from eager on the first call does.
        new_shapes: What an unseen input shape does.
        on_trial: Whether the settings are candidates of a `Tune`: what fails or differs runs eagerly, whatever else is
            asked for, and is left to the `Tune`; what there is to say is said when they are chosen.
    """

    on_error: OnError = "eager"
    verify: Verify = "off"
    new_shapes: NewShapes = "recompile"
    on_trial: bool = False

    def for_trial(self) -> RegionSettings:
        """These settings while candidates are tried."""
        return replace(self, on_error="eager", verify="off" if self.verify == "off" else "eager", on_trial=True)
