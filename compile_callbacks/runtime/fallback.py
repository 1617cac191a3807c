"""What follows where the compiler fails on a target: it runs eagerly, and each who is to know is told once."""

from __future__ import annotations

from compile_callbacks import _torch
from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks.passes.manager import GraphPassError
from compile_callbacks.profiling.compile_events import CompileKey, CompileRecorder
from compile_callbacks.runtime.target_settings import TargetSettings


class Fallback:
    """Of one compiled_target: whether its target runs eagerly for good, and what a user is to be told of it.

    Args:
        key: The target and the phase it is compiled for.
        recorder: Told of each failure.
        settings: What a failure does.
        warn: Warns of each subject once.

    Attributes:
        gave_up: Whether the target runs eagerly for good.
        settings: What a failure does.
    """

    def __init__(self, key: CompileKey, recorder: CompileRecorder, settings: TargetSettings, warn: WarnOnce) -> None:
        self.gave_up = False
        self.settings = settings
        self._key = key
        self._recorder = recorder
        self._warn = warn
        self._warned = False
        self._unsaid: list[tuple[str, str | None]] = []

    def report(self, error: BaseException, *, what: str = "the compiler failed") -> None:
        """The compiler failed on a part of the target, or what it made did.

        Args:
            error: What was raised.
            what: What happened, for the user.
        """
        reason = describe(error)
        self._recorder.add("fallback", self._key, reason=reason)
        if not self._warned:
            self._warned = True
            target, phase = self._key[:2]
            message = (
                f"target {target!r} runs eagerly in the {phase} phase, because {what}: {in_one_line(reason)} "
                f"(the whole of it: callback.report.{phase}.events; more: "
                "TORCH_LOGS='+dynamo,+inductor', or on_error='raise')"
            )
            self.say_later(message)

    def give_up_on_difference(self) -> None:
        """What is compiled computes something else, and the target is to run eagerly for good."""
        self.gave_up = True

    def say(self, message: str, *, subject: str) -> None:
        """Warn once of a subject."""
        self._warn((self._key, subject), message)

    def say_later(self, message: str, *, subject: str | None = None) -> None:
        """Warn when the call is over: within the backend, a warning that is made an error would end in Dynamo.

        Args:
            message: The warning.
            subject: Only the first warning about a subject is given; the message itself by default.
        """
        self._unsaid.append((message, subject))

    def call_is_over(self) -> None:
        """Say what is unsaid; of a candidate, when it is chosen."""
        while self._unsaid and not self.settings.on_trial:
            message, subject = self._unsaid.pop(0)
            self._warn((self._key, subject or message), message)


def failed_pass(error: BaseException) -> GraphPassError | None:
    """The error of a graph pass among an error's causes."""
    return next((cause for cause in _torch.dynamo.causes(error) if isinstance(cause, GraphPassError)), None)


def describe(error: BaseException) -> str:
    """Why the compiler failed."""
    of_pass = failed_pass(error)
    return describe_failure(error) if of_pass is None else str(of_pass)
