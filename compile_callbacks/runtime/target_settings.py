"""`TargetSettings`: the reactions to failures, differences from eager and new input shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_choice
from compile_callbacks._utils.signatures import signature

OnError = Literal["eager", "raise"]
"""The reaction if the compiler fails: run eagerly, or raise an error."""

NewShapes = Literal["auto", "recompile", "eager", "raise"]
"""The reaction to an input with a new shape: recompile within a budget, recompile, run eagerly, or raise an error."""

RETURNING_SHAPE_CALLS = 8
"""With ``new_shapes="eager"``, the number of calls with one shape after which the shape is compiled.

torch's default ``recompile_limit`` is the same number.
"""

Verify = Literal["off", "warn", "eager", "raise"]
"""The reaction if a new graph differs from eager: warn, run eagerly, or raise an error. ``"off"`` compares nothing."""


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """The settings of a compiled target that are not compiler settings.

    Attributes:
        on_error: The reaction if the compiler fails.
        verify: The reaction if a graph differs from eager in its first call.
        new_shapes: The reaction if an input has a new shape.
        on_trial: Whether the config is a candidate of a `Tune`. If the candidate fails or differs from eager, it runs
            eagerly, and the `Tune` excludes it, with any of the other settings. If it is chosen, its warnings are
            issued.
        trace_dir: The folder for scripts that reproduce a difference from eager.
    """

    on_error: OnError = "eager"
    verify: Verify = "off"
    new_shapes: NewShapes = "auto"
    on_trial: bool = False
    trace_dir: Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.verify, bool):
            choice = "'warn' compares each new graph" if self.verify else "'off' compares nothing"
            raise ValueError(with_code("CC201", f"verify={self.verify} is not one of the choices: verify={choice}"))
        check_choice("on_error", self.on_error, get_args(OnError))
        check_choice("verify", self.verify, get_args(Verify))
        check_choice("new_shapes", self.new_shapes, get_args(NewShapes))

    def for_trial(self) -> TargetSettings:
        """Return these settings for candidates of a `Tune`."""
        return replace(self, on_error="eager", verify="off" if self.verify == "off" else "eager", on_trial=True)


class ShapePolicy:
    """Decides whether a call may compile. The decision depends on the shapes of earlier calls."""

    def __init__(self, new_shapes: NewShapes) -> None:
        self._new_shapes = new_shapes
        self._known: set[Any] = set()
        self._calls: Counter[Any] = Counter()

    def allow(self, args: Any, kwargs: Any) -> None:
        """Allow calls with these shapes to compile."""
        self._known.add(signature(args, kwargs))

    def stance(self, args: Any, kwargs: Any) -> str | None:
        """Return the stance for a call, or ``None`` if the call may compile. See ``torch.compiler.set_stance``.

        With the stance, torch still runs a compiled graph that accepts the shapes, such as a dynamic graph.
        """
        if self._new_shapes == "recompile":
            return None
        found = signature(args, kwargs)
        if found in self._known:
            return None
        self._calls[found] += 1
        returning = self._new_shapes == "eager" and self._calls[found] >= RETURNING_SHAPE_CALLS
        # An activation checkpoint must not recompute with compiled code if its forward pass was eager.
        if not self._known or (returning and not _torch.autograd.saves_through_hooks()):
            self._known.add(found)
            return None
        return "eager_on_recompile" if self._new_shapes == "eager" else "fail_on_recompile"
