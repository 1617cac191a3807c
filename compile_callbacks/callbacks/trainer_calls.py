"""`TrainerCalls`: the Trainer calls that `InductorCompile` is in, from ``setup`` to ``teardown``, and their session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from torch.utils.hooks import RemovableHandle

from compile_callbacks._utils import stack_chunks
from compile_callbacks._utils.errors import warn_user
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks.report.loggers import report_folder
from compile_callbacks.runtime.measurements import Stage
from compile_callbacks.runtime.session import Session
from compile_callbacks.runtime.users_compile import match_orig_mod_keys


@dataclass(kw_only=True)
class TrainerCall:
    """A Trainer call.

    Attributes:
        trainer: The trainer.
        report_folder: The folder for the report.
        key_matcher: The hook on the module, which teardown removes.
        outer: The session of the call around this one, if a hook or step of that call makes this one.
        outer_stage: The stage of the outer call, which continues after this one.
        nested: Whether this call runs in the session of the outer one: it does not measure steps then.
    """

    trainer: Trainer
    report_folder: str | None
    key_matcher: RemovableHandle
    outer: Session | None = None
    outer_stage: Stage | None = None
    nested: bool = False


class TrainerCalls:
    """The calls of one callback, the outermost first, with the session of the innermost one.

    A call inside another one, such as ``trainer.validate(module)`` in a hook of a fit, uses the session of the outer
    call if it has the same module, and another session otherwise.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self._calls: list[TrainerCall] = []

    @property
    def nested(self) -> bool:
        """Whether the innermost call runs in the session of the call around it."""
        return bool(self._calls) and self.session is not None and self._calls[-1].outer is self.session

    def begin(self, trainer: Trainer, pl_module: LightningModule, *, fits: bool, keep_compiled: bool) -> None:
        """Begin a call.

        Args:
            trainer: The trainer.
            pl_module: The module.
            fits: Whether the call is a fit.
            keep_compiled: Whether the module stays compiled after a call.
        """
        while self._calls and self._is_over(self._calls[-1], trainer, fits=fits):
            self._close(self._calls.pop(), keep_compiled=keep_compiled)
        outer = self.session if self._calls and self.session is not None and self.session.running else None
        self._calls.append(
            TrainerCall(
                trainer=trainer,
                report_folder=report_folder(trainer),  # a collective, so that no other hook asks for it
                key_matcher=match_orig_mod_keys(pl_module),
                outer=outer,
                outer_stage=outer.interrupt() if outer is not None else None,
            )
        )
        stack_chunks.install_on(trainer)

    def drop_session(self) -> None:
        """End the session of an earlier call. The session of the outer call continues."""
        if self.session is not None and not self.nested:
            self.session.end()
            self.session.free_compiled()
        self.session = None

    @contextlib.contextmanager
    def end(self, trainer: Trainer, *, keep_compiled: bool) -> Iterator[TrainerCall | None]:
        """End the innermost call: clean up, run the block with the call, and continue the outer call.

        The call is ``None`` if this callback's ``setup`` did not run, because an exception came before it.
        """
        if not self._calls or self._calls[-1].trainer is not trainer:
            yield None
            return
        nested, call = self.nested, self._calls.pop()
        call.nested = nested
        try:
            stack_chunks.remove_from(trainer)
            self._close(call, keep_compiled=keep_compiled)
            yield call
        finally:
            if call.outer is not None and call.outer_stage is not None:
                if self.session is not None and not (nested or keep_compiled):
                    self.session.free_compiled()
                self.session = call.outer
                call.outer.stage_begins(call.outer_stage)

    @staticmethod
    def _is_over(call: TrainerCall, trainer: Trainer, *, fits: bool) -> bool:
        """Whether a call ended without our hook, because another callback raised in ``on_exception``."""
        return call.trainer.state.status != TrainerStatus.RUNNING or (call.trainer is trainer and fits)

    def _close(self, call: TrainerCall, *, keep_compiled: bool) -> None:
        """Remove the hook and the compiled targets of a call."""
        call.key_matcher.remove()
        if self.session is None or self.session is call.outer:
            return
        try:
            self.session.end(keep_compiled=keep_compiled)
        except Exception as error:
            if isinstance(error, Warning):  # a warning that the user has made an error
                raise
            reason = in_one_line(describe_failure(error))
            warn_user("CC106", f"InductorCompile could not clean up after the run: {reason}")
