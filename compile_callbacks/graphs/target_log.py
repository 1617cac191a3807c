"""`TargetSettings`: the reactions to failures and differences from eager. `TargetLog` records and reacts."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from compile_callbacks import _torch
from compile_callbacks._utils.errors import CompileError, WarnOnce, with_code
from compile_callbacks._utils.messages import check_choice, describe_failure, in_one_line, root_cause
from compile_callbacks.graphs.requests import RequestQueue
from compile_callbacks.passes.manager import find_pass_error
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.recorder import CallInProgress, CompileRecorder

_DAMAGE = (pickle.UnpicklingError, EOFError, ImportError, SyntaxError)
"""The errors that a damaged file in a cache folder causes."""

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
    may_guess: bool = True  # whether a graph may depend on a guessed size, because the user has asked for the settings
    keeps_graph: bool = False  # whether a backward pass may keep its graph (retain_graph=True)
    passes: tuple[Any, ...] = ()  # the graph passes of both phases, which run before those of the config
    cache_dir: Path | None = None  # the folder for compiled code
    requests: RequestQueue | None = None  # the graphs that another process compiles

    def __post_init__(self) -> None:
        if isinstance(self.verify, bool):
            choice = "'warn' compares each new graph" if self.verify else "'off' compares nothing"
            raise ValueError(with_code("CC201", f"verify={self.verify} is not one of the choices: verify={choice}"))
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
        """Record that the target, or a part of it, runs eagerly."""
        reason, (target, phase) = describe(error), self.key[:2]
        self.recorder.record("fallback", self.key, reason=reason)
        message = (
            f"{part}target {target!r} runs eagerly in the {phase} phase, because {what}: {in_one_line(reason)} "
            f"(in full: report.{phase}.diagnostics.events; on_error='raise' raises instead){self._hint(error)}"
        )
        self.warn_later("CC301", message)

    def compiled_code_failed(self, error: Exception, part: str = "") -> None:
        """Record that the target, or a part of it, runs eagerly, because its compiled code raised an error."""
        if self.settings.on_error == "raise":
            raise self.as_compile_error(error) from error
        self.compiler_failed(error, what="its compiled code raised an error that eager does not", part=part)

    def run_target_eagerly(self, code: str, reason: str) -> CompileError:
        """Run the target eagerly from the next call on. Return an error that ends a running trace."""
        self.runs_eagerly = True
        self.recorder.record("fallback", self.key, reason=reason, code=code)
        target, phase = self.key[:2]
        self.warn_later(code, f"target {target!r} runs eagerly in the {phase} phase, because {reason}")
        return CompileError(reason)

    def as_compile_error(self, error: BaseException) -> CompileError:
        """Return the error that ``on_error="raise"`` raises instead of the compiler's error."""
        target, phase = self.key[:2]
        message = f"compiling target {target!r} for the {phase} phase failed: {describe(error)}{self._hint(error)}"
        return CompileError(with_code("CC301", message))

    def _hint(self, error: BaseException) -> str:
        folder, cause = self.settings.cache_dir, root_cause(error)
        # Only after a process ran, because torch's function creates the folder, and raises if it cannot.
        if isinstance(cause, subprocess.CalledProcessError) and " " in (used := str(_torch.inductor.cache_folder())):
            return f". {used!r} contains a space, and torch does not quote it for the compiler: set TMPDIR"
        # An error of dlopen has no number.
        may_be_damage = isinstance(cause, _DAMAGE) or (isinstance(cause, OSError) and cause.errno is None)
        may_be_damage &= folder is not None
        return f". If files in cache_dir={str(folder)!r} are damaged, delete the folder" if may_be_damage else ""

    def warn_later(self, code: str, message: str, *, about: Hashable = None) -> None:
        """Warn when the call ends, because Dynamo would treat a warning that raises as a failure of the backend."""
        self.eventful_call()
        self.warnings.append((code, message, about or self.key[:2]))

    def issue_warnings(self) -> None:
        """Issue the warnings of earlier calls. The warnings of a candidate wait until the `Tune` has chosen it."""
        while self.warnings and not self.settings.on_trial:
            code, message, about = self.warnings.pop(0)
            self.warn.warn(code, message, about=about)


def describe(error: BaseException) -> str:
    """Return the reason for a failure of the compiler: the root cause, or the graph pass that failed."""
    of_pass = find_pass_error(error)
    return describe_failure(error) if of_pass is None else str(of_pass)
