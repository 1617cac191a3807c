"""Wraps Dynamo's conversion of frames: calls ``torch.compile``, and lets a caller handle the failure of a frame."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from compile_callbacks._torch import ports
from compile_callbacks._torch.dynamo import SHARES_RECOMPILE_LIMIT


class Frame(NamedTuple):
    """A frame that Dynamo converts: the function of `compile_function`, or later a frame behind a graph break."""

    code: types.CodeType
    convert: Callable[[], Any]
    """Traces and compiles the frame, before any of its code runs, and returns the result for torch."""
    is_graph_break: Callable[[Exception], bool]
    """Returns whether torch runs the frame eagerly after this error, and compiles the frames beneath."""


def run_frame_eagerly() -> Any:
    """Return the result with which torch runs a frame and all frames beneath it eagerly, this time."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
    from torch._dynamo.types import ConvertFrameReturn

    eager = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # the frame, and the frames beneath it
    return ConvertFrameReturn(frame_exec_strategy=eager, apply_to_code=False)


def skip_frame() -> Any:
    """Return the result with which torch runs a frame eagerly from now on, and converts the frames beneath it."""
    return torch._dynamo.types.ConvertFrameReturn()


def skipped(result: Any) -> str | None:
    """Return the reason why torch compiles nothing of a frame, or ``None`` if it compiled the frame."""
    if result.guarded_code is not None or result.frame_exec_strategy.cur_action.name != "SKIP":
        return None
    reason = getattr(result, "skip_reason", None) or "torch skips its code"  # before torch 2.13, torch only logs it
    return "torch finds no tensor operation in its code" if "No ops traced" in reason else reason


def compile_function(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    around: Callable[[Frame], Any],
    *,
    fullgraph: bool,
    dynamic: bool | None,
) -> Callable[..., Any]:
    """Call ``torch.compile``, isolated from other compiles of the same code (torch 2.13 and later).

    ``around`` is called for each frame that torch is about to convert, and returns the result of the conversion. The
    setting ``suppress_errors`` has no effect on these frames: torch would run a frame on which ``around`` failed.

    Workaround (until ``torch.compile`` takes a function that handles the failures of a frame).

    Raises:
        ports.MissingPortError: If torch has changed the conversion of frames.
    """
    isolate: dict[str, Any] = {"isolate_recompiles": True} if not SHARES_RECOMPILE_LIMIT else {}
    wrap = _Conversion if fullgraph else _ConvertFrame
    with ports.essential("frames"):
        # A later frame needs these parts, too late to compile the target in another way.
        _ = run_frame_eagerly(), skip_frame(), torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError
        context: Any = torch._dynamo.optimize(backend, nopython=fullgraph, dynamic=dynamic, **isolate)
        context.callback._torchdynamo_orig_backend = wrap(context.callback._torchdynamo_orig_backend, around)
        compiled: Callable[..., Any] = context(function)
    return compiled


class _Conversion:
    """Calls ``around`` for each frame, in the place of Dynamo's ``ConvertFrameAssert``."""

    def __init__(self, convert: Any, around: Callable[[Frame], Any], *, fullgraph: bool = True) -> None:
        self._convert = convert
        self._around = around
        self._fullgraph = fullgraph
        self._box = getattr(convert, "_box", None)  # torch reads these attributes
        self._torchdynamo_orig_backend = convert._torchdynamo_orig_backend

    def _clone_with_backend(self, backend: Any) -> _Conversion:
        """Return the same object, because a clone would split the graphs within DDP's forward."""
        return self

    def __call__(self, frame: Any, *arguments: Any, skip: int = 0) -> Any:
        def convert() -> Any:
            # The user's frame is further up by this function and its three callers, and torch shows it in its logs.
            return self._convert(frame, *arguments, skip=skip + 4)

        def is_graph_break(error: Exception) -> bool:
            breaks = isinstance(error, (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError))
            return breaks and not (self._fullgraph or getattr(self._box, "error_on_graph_break", None))

        return self._around(Frame(frame.f_code, convert, is_graph_break))


class _ConvertFrame(_Conversion):
    """Dynamo's ``ConvertFrame``, with a `_Conversion` in it."""

    def __init__(self, convert: Any, around: Callable[[Frame], Any]) -> None:
        convert._inner_convert = _Conversion(convert._inner_convert, around, fullgraph=False)
        super().__init__(convert, around, fullgraph=False)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with torch._dynamo.config.patch(suppress_errors=False):
            return self._convert(*arguments, **keywords)
