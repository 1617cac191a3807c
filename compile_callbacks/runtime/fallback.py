"""Runs a target eagerly after a failure, and issues warnings that have to wait until the end of the target's call."""

from __future__ import annotations

from collections.abc import Hashable

from compile_callbacks import _torch
from compile_callbacks._utils.errors import CompileError, WarnOnce, with_code
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks.passes.manager import GraphPassError
from compile_callbacks.profiling.compile_events import CompileKey, CompileRecorder
from compile_callbacks.runtime.target_settings import TargetSettings


class EagerFallback:
    """The failures of one compiled target.

    Args:
        key: The target, and the phase that it is compiled for.
        recorder: Records each failure.
        settings: The reaction to a failure.
        warn: Warns once for each target and phase.
        has_regions: Whether the target has regions, which can be compiled separately after a failure.

    Attributes:
        active: Whether the target runs eagerly from now on.
        has_regions: Whether the target has regions.
        region_failure: Why its regions are compiled separately from now on.
        settings: The reaction to a failure.
        pending: The warnings that wait for the end of the call.
    """

    def __init__(
        self,
        key: CompileKey,
        recorder: CompileRecorder,
        settings: TargetSettings,
        warn: WarnOnce,
        *,
        has_regions: bool = False,
    ) -> None:
        self.active = False
        self.has_regions = has_regions
        self.region_failure: str | None = None
        self.settings = settings
        self._key = key
        self._recorder = recorder
        self._warn = warn
        self.pending: list[tuple[str, str, Hashable]] = []

    def compiler_failed(self, error: BaseException, *, what: str = "the compiler failed") -> None:
        """Record that a part of the target runs eagerly, and warn about it after the call.

        Args:
            error: The error.
            what: What happened, as a clause of the warning.
        """
        reason, (target, phase) = describe(error), self._key[:2]
        self._recorder.record("fallback", self._key, reason=reason)
        message = (
            f"target {target!r} runs eagerly in the {phase} phase, because {what}: {in_one_line(reason)} "
            f"(in full: callback.report.{phase}.diagnostics.events; on_error='raise' raises instead)"
        )
        self.warn_after_call("CC301", message)

    def run_eagerly(self, code: str, reason: str) -> None:
        """Run the target eagerly from now on, for a reason other than a failure: record it, and warn at once.

        Args:
            code: The code of the warning.
            reason: The reason, as a clause of the warning.
        """
        self.active = True
        self._recorder.record("fallback", self._key, reason=reason, code=code)
        if not self.settings.on_trial:
            target, phase = self._key[:2]
            self.warn(code, f"target {target!r} runs eagerly in the {phase} phase, because {reason}")

    def as_compile_error(self, error: BaseException) -> CompileError:
        """Return the error that ``on_error="raise"`` raises in place of a compiler's error."""
        target, phase = self._key[:2]
        message = f"compiling target {target!r} for the {phase} phase failed: {describe(error)}"
        return CompileError(with_code("CC301", message))

    def warn(self, code: str, message: str) -> None:
        """Warn once for this target and phase."""
        self._warn.warn(code, message, about=self._key[:2])

    def warn_after_call(self, code: str, message: str, *, about: Hashable = None) -> None:
        """Warn when the call has ended. Dynamo would handle a warning that is an error as a failure of the backend.

        Args:
            code: The code of the warning.
            message: The text of the warning.
            about: The subject: only its first warning is issued. By default it is the target and the phase.
        """
        self.pending.append((code, message, about or self._key[:2]))

    def issue_warnings(self) -> None:
        """Issue the warnings of `warn_after_call`. The warnings of a candidate wait until the `Tune` has chosen it."""
        while self.pending and not self.settings.on_trial:
            code, message, about = self.pending.pop(0)
            self._warn.warn(code, message, about=about)


def find_pass_error(error: BaseException) -> GraphPassError | None:
    """Return the error of a graph pass that caused ``error``, if one did."""
    return next((cause for cause in _torch.dynamo.causes(error) if isinstance(cause, GraphPassError)), None)


def describe(error: BaseException) -> str:
    """Return the reason for a failure of the compiler: its root cause, or the graph pass that failed."""
    of_pass = find_pass_error(error)
    return describe_failure(error) if of_pass is None else str(of_pass)
