"""What an input shape that was not seen before does."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, get_args

from compile_callbacks.signatures import signature

NewShapes = Literal["recompile", "eager", "raise"]
"""What an unseen input shape does: compile anew, run eagerly, or end the run."""

NEW_SHAPES: tuple[NewShapes, ...] = get_args(NewShapes)

RETURNING_SHAPE_CALLS = 8
"""With ``"eager"``, a shape is compiled after all at its eighth call: it keeps coming back, and torch's default
``recompile_limit`` gives up after as many."""


class ShapePolicy:
    """Tells how a call may compile, by whether its inputs look like those of an earlier one.

    Args:
        new_shapes: What an unseen shape does.
    """

    def __init__(self, new_shapes: NewShapes) -> None:
        self._new_shapes = new_shapes
        self._known: set[Any] = set()
        self._calls: Counter[Any] = Counter()

    def admit(self, args: Any, kwargs: Any) -> None:
        """Have a call's shapes count as seen, so that they may compile."""
        self._known.add(signature(args, kwargs))

    def stance(self, args: Any, kwargs: Any) -> str | None:
        """Torch's stance for the call: ``None`` where it may compile.

        Under the stance a graph that fits the shape all the same, a dynamic one, is used.
        """
        if self._new_shapes == "recompile":
            return None
        looks = signature(args, kwargs)
        if looks in self._known:
            return None
        self._calls[looks] += 1
        returning = self._new_shapes == "eager" and self._calls[looks] >= RETURNING_SHAPE_CALLS
        if not self._known or returning:
            self._known.add(looks)
            return None
        return "eager_on_recompile" if self._new_shapes == "eager" else "fail_on_recompile"
