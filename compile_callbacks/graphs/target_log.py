"""`TargetSettings`: the reactions to failures and differences from eager. `TargetLog` records and reacts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from compile_callbacks._utils.errors import CompileError, WarnOnce, with_code
from compile_callbacks._utils.messages import check_choice, describe_failure, in_one_line
from compile_callbacks.graphs.requests import RequestQueue
from compile_callbacks.passes.manager import find_pass_error
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.recorder import CallInProgress, CompileRecorder

CODE_RAISED = "its compiled code raised an error that eager does not"

OnError = Literal["eager", "raise"]
"""The reaction if the compiler fails: run eagerly, or raise an error."""

Verify = Literal["off", "warn", "eager", "raise"]
"""The reaction if a new graph differs from eager: warn, run eagerly, or raise an error. ``"off"`` compares nothing.

Results that rounding cannot explain at all run eagerly also with ``"warn"``.
"""


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """The settings of a compiled target that are not compiler settings.

    With ``on_trial``, the config is a candidate of a `Tune`. If the candidate fails or differs from eager, it runs
    eagerly, and the `Tune` excludes it, with any of the other settings. If it is chosen, its warnings are issued.
    """

    on_error: OnError = "eager"
    verify: Verify = "off"
    on_trial: bool = False
    may_guess: bool = True  # whether a graph may have sizes that it computes, because the user has asked for them
    static: bool = False  # whether no graph may have a dynamic dimension, because CUDA graphs replay each size
    keeps_graph: bool = False  # whether a backward pass may keep its graph (retain_graph=True)
    passes: tuple[Any, ...] = ()  # the graph passes of both phases, which run before those of the config
    cache_dir: Path | None = None  # the folder for compiled code
    requests: RequestQueue = field(default_factory=RequestQueue)  # another process compiles them

    def __post_init__(self) -> None:
        check_choice("on_error", self.on_error, get_args(OnError))
        check_choice("verify", self.verify, get_args(Verify))

    def for_trial(self) -> TargetSettings:
        """Return these settings for candidates of a `Tune`."""
        return replace(self, on_error="eager", verify="off" if self.verify == "off" else "eager", on_trial=True)


@dataclass(eq=False)
class TargetLog:
    """Records the failures of one compiled target, and the eager runs that follow."""

    key: CompileKey
    recorder: CompileRecorder
    settings: TargetSettings
    warn: WarnOnce
    runs_eagerly: bool = False  # whether the target runs eagerly from now on
    warnings: list[tuple[str, str, Hashable]] = field(default_factory=list)  # to issue when a call ends

    def eventful_call(self) -> CallInProgress:
        """Return the running call of the target, and mark it as eventful."""
        call = self.recorder.calling.current or CallInProgress()
        call.eventful = True
        return call

    def compiler_failed(self, error: BaseException, *, what: str = "the compiler failed", part: str = "") -> None:
        """Record that the target, or a part of it, runs eagerly. With ``on_error="raise"``, raise an error instead."""
        target, phase = self.key[:2]
        of_pass = find_pass_error(error)
        reason = str(of_pass or describe_failure(error))
        if self.settings.on_error == "raise":
            message = f"compiling target {target!r} for the {phase} phase failed: {reason}"
            raise CompileError(with_code("CC301", message)) from error
        details = f"(in full: report.{phase}.diagnostics.events; on_error='raise' raises instead)"
        if of_pass is not None:
            self.recorder.record("pass_skipped", self.key, reason=reason)
        code = None if of_pass is None else "CC701"
        self._record(code or "CC301", code, reason, f"{what}: {in_one_line(reason)} {details}", part)

    def leave_eager(self, code: str, reason: str) -> CompileError:
        """Leave the target eager from the next call on. Return an error that ends a running trace."""
        self.runs_eagerly = True
        self._record(code, code, reason, reason)
        return CompileError(reason)

    def give_up_cuda_graphs(self, reason: str) -> None:
        """Record that the phase continues without CUDA graphs. `PhaseRun.end_step` acts on the event."""
        self.recorder.record("without_cudagraphs", self.key, reason=reason)

    def _record(self, code: str, event_code: str | None, reason: str, message: str, part: str = "") -> None:
        target, phase = self.key[:2]
        self.recorder.record("fallback", self.key, reason=reason, code=event_code)
        self.warn_later(code, f"{part}target {target!r} runs eagerly in the {phase} phase, because {message}")

    def warn_later(self, code: str, message: str, *, about: Hashable = None) -> None:
        """Warn when the call ends, because Dynamo would treat a warning that raises as a failure of the backend."""
        self.eventful_call()
        self.warnings.append((code, message, about or self.key[:2]))

    def issue_warnings(self) -> None:
        """Issue the warnings of earlier calls. The warnings of a candidate wait until the `Tune` has chosen it."""
        while self.warnings and not self.settings.on_trial:
            code, message, about = self.warnings.pop(0)
            self.warn.warn(code, message, about=about)
