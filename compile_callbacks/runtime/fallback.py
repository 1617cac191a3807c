"""`EagerFallback`: makes a target run eagerly after a failure, and issues warnings at the end of the target's call."""

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

    Attributes:
        active: Whether the target runs eagerly from now on.
        has_regions: Whether the target has regions.
        region_failure: The reason why the regions are compiled separately from now on.
        settings: The reaction to a failure.
        pending: The warnings to issue at the end of the call.
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
        """Record that a part of the target runs eagerly, and warn after the call."""
        reason, (target, phase) = describe(error), self._key[:2]
        self._recorder.record("fallback", self._key, reason=reason)
        message = (
            f"target {target!r} runs eagerly in the {phase} phase, because {what}: {in_one_line(reason)} "
            f"(in full: callback.report.{phase}.diagnostics.events; on_error='raise' raises instead)"
        )
        self.warn_after_call("CC301", message)

    def run_eagerly(self, code: str, reason: str) -> None:
        """Run the target eagerly from now on, for a reason other than a failure. Record this and warn immediately."""
        self.active = True
        self._recorder.record("fallback", self._key, reason=reason, code=code)
        if not self.settings.on_trial:
            target, phase = self._key[:2]
            self.warn(code, f"target {target!r} runs eagerly in the {phase} phase, because {reason}")

    def as_compile_error(self, error: BaseException) -> CompileError:
        """Return the error that ``on_error="raise"`` raises instead of the compiler's error."""
        target, phase = self._key[:2]
        message = f"compiling target {target!r} for the {phase} phase failed: {describe(error)}"
        return CompileError(with_code("CC301", message))

    def warn(self, code: str, message: str) -> None:
        """Warn once for this target and phase."""
        self._warn.warn(code, message, about=self._key[:2])

    def warn_after_call(self, code: str, message: str, *, about: Hashable = None) -> None:
        """Warn after the call, because Dynamo would treat a warning that raises as a failure of the backend."""
        self.pending.append((code, message, about or self._key[:2]))

    def issue_warnings(self) -> None:
        """Issue the pending warnings. The warnings of a candidate wait until the `Tune` has chosen the candidate."""
        while self.pending and not self.settings.on_trial:
            code, message, about = self.pending.pop(0)
            self._warn.warn(code, message, about=about)


def find_pass_error(error: BaseException) -> GraphPassError | None:
    """Return the error of the graph pass that caused ``error``, or ``None`` if no pass caused it."""
    return next((cause for cause in _torch.dynamo.causes(error) if isinstance(cause, GraphPassError)), None)


def describe(error: BaseException) -> str:
    """Return the reason for a failure of the compiler: the root cause, or the graph pass that failed."""
    of_pass = find_pass_error(error)
    return describe_failure(error) if of_pass is None else str(of_pass)
