"""What follows where the compiler fails on a target: it runs eagerly, and each who is to know is told once."""

from __future__ import annotations

import warnings

from compile_callbacks import _torch
from compile_callbacks.compiling.errors import CompileWarning
from compile_callbacks.compiling.once import WarnOnce
from compile_callbacks.compiling.region_settings import RegionSettings
from compile_callbacks.failures import describe_failure, in_one_line
from compile_callbacks.links import Entry, see
from compile_callbacks.measuring.events import CompileRecorder, Owner
from compile_callbacks.passes import GraphPassError
from compile_callbacks.processes.meetings import Meetings


class Fallback:
    """Of one region: whether its target runs eagerly for good, and what a user is to be told of it.

    Args:
        owner: The target and the phase it is compiled for.
        recorder: Told of each failure.
        meetings: Where the other processes hear of it.
        settings: What a failure does.
        warn: Warns of what several processes find once, and in the one that speaks for all.

    Attributes:
        gave_up: Whether the target runs eagerly for good.
        settings: What a failure does.
    """

    def __init__(
        self, owner: Owner, recorder: CompileRecorder, meetings: Meetings, settings: RegionSettings, warn: WarnOnce
    ) -> None:
        self.gave_up = False
        self.settings = settings
        self._owner = owner
        self._recorder = recorder
        self._meetings = meetings
        self._warn = warn
        self._failed_here = False
        self._warned = False
        self._unsaid: list[tuple[str, Entry]] = []

    def report(self, error: BaseException, *, what: str = "the compiler failed") -> None:
        """The compiler failed on a part of the target, or what it made did.

        Args:
            error: What was raised.
            what: What happened, for the user.
        """
        reason = describe(error)
        self._recorder.add("fallback", self._owner, reason=reason)
        self._tell_processes(reason)
        if self._meetings.speaks and not self._warned:  # for another process, the first one says so when it hears of it
            self._warned = True
            target, phase = self._owner[:2]
            message = (
                f"target {target!r} runs eagerly in the {phase} phase, because {what}: {in_one_line(reason)} "
                f"(the whole of it: callback.report.{phase}.events; more: "
                "TORCH_LOGS='+dynamo,+inductor', or on_error='raise')"
            )
            self.say_later(message, entry_of(error))

    def give_up_on_difference(self, problem: str) -> None:
        """What is compiled computes something else, and the target is to run eagerly for good."""
        self.gave_up = True
        self._tell_processes(problem)

    def give_up(self, reason: str) -> None:
        """Run eagerly from here on, because the compiler failed on the target in this process or in another.

        Args:
            reason: Which process it was, and why it failed.
        """
        if self.gave_up:
            return
        self.gave_up = True
        if self._failed_here:
            return  # known
        self._recorder.add("fallback", self._owner, reason=reason)
        if self._meetings.speaks and not self.settings.on_trial:
            target, phase = self._owner[:2]
            message = f"target {target!r} runs eagerly in the {phase} phase, in every process: {in_one_line(reason)}"
            message += f" (the whole of it: callback.report.{phase}.events)"
            warnings.warn(see(message, "the-compiler-failed"), CompileWarning, stacklevel=3)

    def say(self, message: str, entry: Entry, *, subject: str | None = None) -> None:
        """Warn once, or have the process that speaks for all warn.

        Args:
            message: What to say.
            entry: Where the docs tell of it.
            subject: What it is about, where processes that find the same say it with other figures.
        """
        self._warn((self._owner, subject or message), message, entry)

    def say_later(self, message: str, entry: Entry) -> None:
        """Warn when the call is over: within the backend, a warning that is made an error would end in Dynamo."""
        self._unsaid.append((message, entry))

    def call_is_over(self) -> None:
        """Say what is unsaid; of a candidate, when it is chosen."""
        while self._unsaid and not self.settings.on_trial:
            self.say(*self._unsaid.pop(0))

    def _tell_processes(self, reason: str) -> None:
        """The other processes are to run the target eagerly, too."""
        self._failed_here = True
        self._meetings.failed(self._owner, reason)


def failed_pass(error: BaseException) -> GraphPassError | None:
    """The error of a graph pass among an error's causes."""
    return next((cause for cause in _torch.causes(error) if isinstance(cause, GraphPassError)), None)


def describe(error: BaseException) -> str:
    """Why the compiler failed."""
    of_pass = failed_pass(error)
    return describe_failure(error) if of_pass is None else str(of_pass)


def entry_of(error: BaseException) -> Entry:
    """Where the docs tell of such a failure."""
    return "the-compiler-failed" if failed_pass(error) is None else "a-graph-pass-failed"
