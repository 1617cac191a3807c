"""`CallInProgress`: a running call of a `CompiledTarget`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compile_callbacks.graphs.snapshot import Snapshot
from compile_callbacks.profiling.compile_events import CompileKey
from compile_callbacks.targets.target import Target

if TYPE_CHECKING:
    from compile_callbacks.calls.compiled_target import CompiledTarget


class CallInProgress:
    """A running call of a compiled target. The recorder has a reference while the call runs.

    Attributes:
        nested_calls_eager: Whether other targets run eagerly within this call.
        snapshot: The state of the module before Dynamo traced it, which is restored if the compile fails.
    """

    __slots__ = ("_args", "_kwargs", "_member", "_target", "nested_calls_eager", "snapshot")

    def __init__(
        self, target: CompiledTarget, member: Target, args: Any, kwargs: Any, nested_calls_eager: bool
    ) -> None:
        self.nested_calls_eager = nested_calls_eager
        self.snapshot: Snapshot | None = None
        self._target, self._member, self._args, self._kwargs = target, member, args, kwargs

    @property
    def key(self) -> CompileKey:
        """The target and its phase."""
        return self._target.key

    def on_trace(self) -> None:
        """Take the snapshot and prepare the target. Called when Dynamo begins to trace within the call."""
        if self.snapshot is None:
            self.snapshot = Snapshot(self._member.module)
            self._target.trace_begins(self._args, self._kwargs)
