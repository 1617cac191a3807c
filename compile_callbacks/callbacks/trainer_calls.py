"""`TrainerCalls`: the running Trainer calls of an `InductorCompile`, from ``setup`` to ``teardown``, and their session.

A Trainer call is one ``trainer.fit``, ``validate``, ``test`` or ``predict``. When a call ends, `write_at_end` writes
the report to the loggers, a file and the terminal.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.hooks import RemovableHandle

from compile_callbacks._utils import stack_chunks
from compile_callbacks._utils.errors import warn_user, with_code
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks.callbacks import several_callbacks as several
from compile_callbacks.callbacks.trainer_progress import is_stopping
from compile_callbacks.report import loggers
from compile_callbacks.report.build import uncompiled_report
from compile_callbacks.report.console import print_line, print_report
from compile_callbacks.report.report import CompileReport
from compile_callbacks.runtime.fsdp import unsupported_reason, unsupported_strategy_reason
from compile_callbacks.runtime.measurements import Stage
from compile_callbacks.runtime.session import Session
from compile_callbacks.runtime.targets import named_targets, resolve_targets
from compile_callbacks.runtime.users_compile import match_orig_mod_keys, unwrap_compiled

if TYPE_CHECKING:
    from compile_callbacks.callbacks.inductor_compile import InductorCompile


class LastReport:
    """The report of the last run of a callback. Copies of the callback share it: some libraries train with a copy."""

    report: CompileReport | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LastReport:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@dataclass(kw_only=True)
class TrainerCall:
    """One running Trainer call."""

    trainer: Trainer
    report_folder: str | None
    key_matcher: RemovableHandle  # the hook on the module that matches ``_orig_mod.`` keys
    outer: Session | None = None  # the session of the outer call, if a hook or a step of that call makes this call
    outer_stage: Stage | None = None  # the stage of the outer call, which continues after this call
    nested: bool = False  # whether this call uses the session of the outer call; its steps are not measured


class TrainerCalls:
    """The running Trainer calls of one callback, the outermost first, with the session of the innermost call.

    A call inside another call, such as ``trainer.validate(module)`` in a hook of a fit, uses the session of the outer
    call if both run the same module. Otherwise, the inner call gets its own session.
    """

    def __init__(self, last: LastReport | None = None) -> None:
        self.session: Session | None = None  # the session of the current or last call
        self.last = last or LastReport()
        self.earlier_state: object = None  # the state from a checkpoint that the next session resumes
        self.printed = False  # whether the report was printed
        self._calls: list[TrainerCall] = []
        self._others: tuple[Any, ...] = ()  # targets of the trainer's other callbacks, which targets=None excludes

    @property
    def nested(self) -> bool:
        """Whether the innermost call runs in the session of the call around it."""
        return bool(self._calls) and self.session is not None and self._calls[-1].outer is self.session

    def begin(self, trainer: Trainer, pl_module: LightningModule, own: InductorCompile, *, fits: bool) -> None:
        """Begin a call."""
        if refused := unsupported_strategy_reason(trainer.strategy):
            raise MisconfigurationException(with_code("CC801", refused))
        with contextlib.suppress(ValueError):  # an unknown name may be of a module that configure_model creates later
            _check_together(trainer, pl_module, own)
        while self._calls and self._is_over(self._calls[-1], trainer, fits=fits):
            self._close(self._calls.pop(), keep_compiled=own.keep_compiled)
        outer = self.session if self._calls and self.session is not None and self.session.running else None
        self._calls.append(
            TrainerCall(
                trainer=trainer,
                report_folder=loggers.report_folder(trainer),  # found here once, because it needs a collective
                key_matcher=match_orig_mod_keys(pl_module),
                outer=outer,
                outer_stage=outer.interrupt() if outer is not None else None,
            )
        )
        stack_chunks.install_on(trainer)
        _unwrap_compiled(pl_module, own)

    def prepare(self, trainer: Trainer, pl_module: LightningModule, own: InductorCompile) -> Session:
        """Return the session of the call. In the first hook of a call, begin the session and install the targets."""
        session, arguments, peers = self.session, own.arguments, several.callbacks_of(trainer, own)
        others: tuple[Any, ...] = ()
        if arguments.finds_targets:
            others = tuple(peer.arguments.targets for peer in peers if peer is not own)
        if session is None or session.module is not pl_module or (not session.running and others != self._others):
            self._drop_session()
            _unwrap_compiled(pl_module, own)  # again, because configure_model runs after setup
            if refused := unsupported_reason(pl_module, arguments.configs):
                raise MisconfigurationException(with_code("CC802", refused))
            _check_together(trainer, pl_module, own)
            taken = [target for names in others for target in named_targets(pl_module, names)]
            self._others = others
            session = self.session = Session(
                pl_module,
                resolve_targets(pl_module, arguments.targets, LightningModule, taken),
                arguments,
                finds_targets=arguments.finds_targets,
                taken=taken,
                print_line=functools.partial(print_line, trainer),
            )
        if not session.running:
            session.begin(
                precision=str(trainer.precision),
                together=trainer.world_size > 1,
                shared=several.shared_baselines(peers, own),
                stopping=functools.partial(is_stopping, weakref.ref(trainer)),
            )
        if self.earlier_state is not None:  # not earlier, because the number of processes was unknown
            session.resume(self.earlier_state)
            self.earlier_state = None
        return session

    def _drop_session(self) -> None:
        """End the session of an earlier call. The session of the outer call continues."""
        if self.session is not None and not self.nested:
            self.session.end()
            self.session.free_compiled()
        self.session = None

    @contextlib.contextmanager
    def end(self, trainer: Trainer, *, keep_compiled: bool) -> Iterator[TrainerCall | None]:
        """End the innermost call: clean up, run the ``with`` block, and continue the outer call.

        The block gets ``None`` instead of the call if an exception prevented this callback's ``setup``.
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
        """Return whether a call ended without our hook, because another callback raised in ``on_exception``."""
        return call.trainer.state.status != TrainerStatus.RUNNING or (call.trainer is trainer and fits)

    def _close(self, call: TrainerCall, *, keep_compiled: bool) -> None:
        """Remove the hook and the compiled targets of a call."""
        call.key_matcher.remove()
        if self.session is None or self.session is call.outer:
            return
        try:
            self.session.end(keep_compiled=keep_compiled)
        except Exception as error:
            if isinstance(error, Warning):  # the user's warning filters turn warnings into errors
                raise
            reason = in_one_line(describe_failure(error))
            warn_user("CC106", f"InductorCompile could not clean up after the run: {reason}")


def _unwrap_compiled(pl_module: LightningModule, own: InductorCompile) -> None:
    """Undo the user's ``torch.compile``, so that ``_orig_mod.`` is in no key and this callback's settings apply."""
    if replaced := unwrap_compiled(pl_module, own.arguments.left_alone):
        rank_zero_info(
            f"InductorCompile replaces your torch.compile of {', '.join(replaced)}: it compiles the original module "
            "with train_mode and infer_mode while a trainer runs. If a mode is None, its phase runs as you compiled"
        )


def _check_together(trainer: Trainer, pl_module: LightningModule, own: InductorCompile) -> None:
    if refused := several.why_not_together(several.callbacks_of(trainer, own), pl_module):
        raise MisconfigurationException(with_code("CC203", refused))


# ------------------------------------------------------------------------------------------ the report


def current_report(own: InductorCompile) -> CompileReport:
    """Return the report of a callback so far, or the report of its copy if only the copy ran."""
    if own.session is not None:
        return own.session.report()
    return own._calls.last.report or uncompiled_report(own.arguments.configs, own.arguments.left_alone)


def report_scalars(trainer: Trainer, own: InductorCompile, *, details: bool = True) -> None:
    """Log the scalars of the report. ``details`` synchronizes the GPU, so use it only at the end of a stage."""
    if own.session and trainer.loggers and trainer.is_global_zero:
        name = several.name_in_logs(trainer, own)
        loggers.log_scalars(trainer.loggers, own.session.report(details=details).scalars(name), trainer.global_step)


def write_at_end(trainer: Trainer, own: InductorCompile, call: TrainerCall, exception: BaseException | None) -> None:
    """Write the report when a Trainer call ends, and issue the warnings about the whole run."""
    report = own._calls.last.report = current_report(own)
    name = several.name_in_logs(trainer, own)
    loggers.log_scalars(trainer.loggers, report.scalars(name), trainer.global_step)
    graphs = own.arguments.recorded_graphs()
    loggers.log_summary(trainer.loggers, report, trainer.global_step, graphs, name)
    path = loggers.write_report(call.report_folder, trainer, report, exception, name)
    if call.nested or own.session is None or not report.has_figures:
        return
    if exception is None:
        own.session.check_run()
        if not trainer.is_global_zero or (trainer.state.fn != "fit" and own._calls.printed):
            return
        own._calls.printed = True
        print_report(report, name)
    if path is not None:
        print_line(trainer, f"{f'report {name}'.rstrip()}: {path}")
