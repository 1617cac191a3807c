"""First calls of what is compiled: compared with eager, and followed by what the user asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from compile_callbacks.compiling.errors import CompileError
from compile_callbacks.compiling.fallback import Fallback
from compile_callbacks.compiling.isolation import Isolation
from compile_callbacks.compiling.targets import Target
from compile_callbacks.compiling.verify import Comparison, call_and_compare, compare_with_eager, why_not_alone
from compile_callbacks.links import see
from compile_callbacks.measuring.events import CompileRecorder, Owner
from compile_callbacks.processes.meetings import Meetings


class VerifiedCalls:
    """Of one region: which of its members are still to be compared with eager, and what a difference does.

    Args:
        owner: The target and the phase it is compiled for.
        members: The modules that the region serves.
        recorder: Told what came of each comparison.
        isolation: Under which the target runs eagerly, targets inside it too.
        meetings: Which process says what there is to say.
        fallback: Where a difference leads; its settings tell what one does.
        uses_cudagraphs: Whether the region records CUDA graphs, beside which no second call can be made.
    """

    def __init__(
        self,
        owner: Owner,
        members: Iterable[Target],
        *,
        recorder: CompileRecorder,
        isolation: Isolation,
        meetings: Meetings,
        fallback: Fallback,
        uses_cudagraphs: bool,
    ) -> None:
        self._owner = owner
        self._unverified = set(members) if fallback.settings.verify != "off" else set()
        self._recorder = recorder
        self._isolation = isolation
        self._meetings = meetings
        self._fallback = fallback
        self._uses_cudagraphs = uses_cudagraphs

    def includes(self, member: Target) -> bool:
        """Whether the next call of a member is one of them."""
        return member in self._unverified

    def call(self, member: Target, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A member's first call.

        Args:
            member: The module that is called.
            compiled: What calls it compiled.
            args: Positional inputs.
            kwargs: Inputs by name.
        """
        self._unverified.remove(member)
        if left_out := member.why_not_twice() or why_not_alone(member.module):
            self._note(left_out)
            return compiled(*args, **kwargs)

        def eager(*args: Any, **kwargs: Any) -> Any:
            with self._isolation.uncompiled():
                return member.eager(*args, **kwargs)

        call = member.module, eager, compiled, args, kwargs
        if not self._uses_cudagraphs:
            self._judge(compare_with_eager(*call))
            return (member.eager if self._fallback.gave_up else compiled)(*args, **kwargs)
        compared, result = call_and_compare(*call)
        self._judge(compared)
        if torch.is_grad_enabled():
            self._note("gradients: CUDA graphs take no backward beside the step's")
        if compared.problem is None:
            return result
        return (member.eager if self._fallback.gave_up else compiled)(*args, **kwargs)

    def _note(self, reason: str | None, max_abs_error: float | None = None) -> None:
        """Report what came of a comparison; of repeated blocks once why they were not compared."""
        said = (event for event in self._recorder.of(self._owner.phase, "verify") if event.target == self._owner.target)
        if max_abs_error is None and any(event.reason == reason for event in said):
            return
        self._recorder.add("verify", self._owner, reason=reason, max_abs_error=max_abs_error)

    def _judge(self, compared: Comparison) -> None:
        """Report a comparison, and do what the user asked for where it found a difference."""
        target, phase = self._owner[:2]
        settings = self._fallback.settings
        self._note(compared.problem or compared.left_out, compared.max_abs_error)
        if compared.problem is None:
            return
        self._unverified.clear()  # one difference is told of, and what follows from it holds for all
        if settings.on_trial:
            self._fallback.give_up_on_difference(compared.problem)
            return
        message = f"target {target!r} does not compute in the {phase} phase what it does eagerly: {compared.problem}"
        if settings.verify == "raise":
            raise CompileError(see(f"{message} (verify='raise')", "differs-from-eager"))
        if settings.verify == "eager":
            self._recorder.add("fallback", self._owner, reason=compared.problem)
            self._fallback.give_up_on_difference(compared.problem)
            message += "; it runs eagerly from here on (verify='eager')"
            if not self._meetings.speaks:
                return  # the first process says so when it hears of it
        self._fallback.say(message, "differs-from-eager", subject="difference")
