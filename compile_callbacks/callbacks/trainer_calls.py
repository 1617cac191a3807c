"""`TrainerCalls`: the running Trainer call of an `InductorCompile`, from ``setup`` to ``teardown``, and its session.

A Trainer call is one ``trainer.fit``, ``validate``, ``test`` or ``predict``. When it ends, `TrainerCalls` writes the
report to the loggers, a file and the terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch.utils.hooks import RemovableHandle

from compile_callbacks._utils.errors import CompileError, warn_user, with_code
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks.callbacks.trainer_progress import is_stopping
from compile_callbacks.report import loggers
from compile_callbacks.report.loggers import print_line
from compile_callbacks.report.render import print_report
from compile_callbacks.report.report import CompileReport, uncompiled_report
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.session.phase_run import Stage
from compile_callbacks.session.session import Session
from compile_callbacks.targets.fsdp import unsupported_reason, unsupported_strategy_reason
from compile_callbacks.targets.resolve import resolve_targets
from compile_callbacks.targets.target import Target
from compile_callbacks.targets.users_compile import LIGHTNING_MODULE, match_orig_mod_keys, unwrap_compiled


class LastReport:
    """The report of the last run of a callback. Copies of the callback share it: some libraries train with a copy."""

    report: CompileReport | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LastReport:
        return self


class TrainerCalls:
    """The running Trainer call of one callback, and the session of the current or last call.

    A nested call, such as ``trainer.validate(module)`` in a hook of a fit, runs eagerly and is not measured.
    """

    def __init__(
        self, arguments: CompileArguments, *, keep_compiled: bool, last_report: LastReport | None = None
    ) -> None:
        self.arguments, self.keep_compiled = arguments, keep_compiled
        self.session: Session | None = None  # the session of the current or last call
        self.active: Session | None = None  # the session if it is running, except in a nested call
        self.last_report = last_report or LastReport()
        self._printed = False  # whether the report was printed
        self._gave_up = False  # whether the rest of the call runs eagerly, because this library failed
        self._trainer: Trainer | None = None  # the trainer of the running call
        self._key_matcher: RemovableHandle  # the hook on the module that matches ``_orig_mod.`` keys
        self._nested: list[Trainer] = []  # the trainers of the nested calls, the outermost first
        self._outer_stage = Stage()  # the stage of the call around the nested calls

    def begin(self, trainer: Trainer, pl_module: LightningModule, *, fits: bool) -> None:
        """Begin a call, or a nested call."""
        if refused := unsupported_strategy_reason(trainer.strategy):
            raise MisconfigurationException(with_code("CC801", refused))
        if (running := self._trainer) is not None:
            # If another callback raised in ``on_exception``, the earlier call ended without our hook.
            is_over = running.state.status != TrainerStatus.RUNNING or (running is trainer and fits)
            if not is_over:
                self._nested.append(trainer)
                if self.active is not None:
                    self._outer_stage = self.active.stage
                    self.active.stage_begins(dataclasses.replace(self.active.stage, eager=True))
                    self.active = None
                return
            self._close()
        self._nested.clear()
        self._gave_up = False
        self._trainer, self._key_matcher = trainer, match_orig_mod_keys(pl_module)
        _unwrap_compiled(pl_module, self.arguments, trainer)

    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> Session | None:
        """Return the session of the call, or ``None`` in a nested call and if no call began.

        In the first hook of a call, begin the session and install the targets.
        """
        if self._trainer is None or self._is_nested(trainer) or self._gave_up:
            return None
        session, arguments = self.session, self.arguments
        if session is None or session.module is not pl_module:
            if session is not None:
                session.discard()
                self.session = None
            _unwrap_compiled(pl_module, self.arguments, trainer)  # again, because configure_model runs after setup
            if refused := unsupported_reason(pl_module, arguments.configs):
                raise MisconfigurationException(with_code("CC802", refused))
            # Lightning's `is_overridden` raises for a module of the package pytorch_lightning.
            is_lightnings = pl_module.backward.__module__.startswith(("lightning.", "pytorch_lightning."))
            keeps_graph = not (pl_module.automatic_optimization and is_lightnings)
            settings = dataclasses.replace(arguments.target_settings, keeps_graph=keeps_graph)
            session = self.session = Session(
                pl_module,
                resolve_targets(pl_module, arguments.targets or ()),
                dataclasses.replace(arguments, target_settings=settings),
                resolve=functools.partial(_resolve_again, pl_module, arguments),
                print_line=functools.partial(print_line, trainer),
            )
        if not session.running:
            try:
                session.begin(
                    precision=str(trainer.precision),
                    all_ranks=trainer.world_size > 1,
                    stopping=functools.partial(is_stopping, weakref.ref(trainer)),
                )
            except Exception as error:
                self.give_up("begin the run", error)
                return None
        self.active = session
        return session

    def give_up(self, what: str, error: Exception) -> None:
        """Warn about an error of this library's own bookkeeping, and run the rest of the call eagerly."""
        if isinstance(error, (Warning, CompileError)):  # the user's settings turn these into errors
            raise error
        reason = in_one_line(describe_failure(error))
        warn_user("CC106", f"InductorCompile could not {what}: {reason}. The rest of the run is eager")
        self._gave_up, self.active = True, None
        if self.session is not None:
            with contextlib.suppress(Exception):
                self.session.discard()

    def end(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        """End a call, and write its report. A nested call has no report."""
        if self._is_nested(trainer):
            self._nested.pop()
            if not self._nested and self.session is not None and self.session.running:
                self.active = self.session
                self.active.stage_begins(self._outer_stage)
            return
        if self._trainer is not trainer:  # an exception prevented `begin`
            return
        self._trainer = self.active = None
        self._close()
        if self._gave_up:  # the figures may be wrong
            return
        try:
            self._write_report(trainer, exception)
        except Exception as error:
            if exception is not None:
                raise
            self.give_up("write the report", error)

    def _is_nested(self, trainer: Trainer) -> bool:
        while self._nested and self._nested[-1] is not trainer:  # another callback raised in ``on_exception``
            self._nested.pop()
        return bool(self._nested)

    def _close(self) -> None:
        """Remove the hook and the compiled targets of the call."""
        self._key_matcher.remove()
        if self.session is None:
            return
        try:
            self.session.end(keep_compiled=self.keep_compiled)
        except Exception as error:
            if isinstance(error, Warning):  # the user's warning filters turn warnings into errors
                raise
            reason = in_one_line(describe_failure(error))
            warn_user("CC106", f"InductorCompile could not clean up after the run: {reason}")

    # ------------------------------------------------------------------------------------------ the report

    def report(self) -> CompileReport:
        """Return the report so far, or the report of a copy of the callback if only the copy ran."""
        if self.session is not None:
            return self.session.report()
        return self.last_report.report or uncompiled_report(self.arguments.configs)

    def log_scalars(self, trainer: Trainer, *, details: bool = True) -> None:
        """Log the scalars of the report. ``details`` synchronizes the GPU, so use it only at the end of a stage."""
        if self.active and trainer.loggers and trainer.is_global_zero:
            try:
                scalars = self.active.report(details=details).scalars()
            except Exception as error:
                self.give_up("compute the logged figures", error)
            else:
                loggers.log(trainer.loggers, trainer.global_step, scalars)

    def _write_report(self, trainer: Trainer, exception: BaseException | None) -> None:
        """Write the report to the loggers, a file and the terminal, and issue the warnings about the whole run."""
        report = self.last_report.report = self.report()
        graphs = {f"graphs/{graph.title}": graph.text for graph in self.arguments.recorded_graphs()}
        loggers.log(trainer.loggers, trainer.global_step, report.scalars(), report, graphs)
        if self.session is None or not report.has_figures:
            return
        path = loggers.write_report(trainer, report, exception)
        if exception is None:
            self.session.check_run()
            if not trainer.is_global_zero or (trainer.state.fn != "fit" and self._printed):
                return
            self._printed = True
            print_report(report.phases)
        if path is not None:
            print_line(trainer, f"report: {path}")


def _unwrap_compiled(pl_module: LightningModule, arguments: CompileArguments, trainer: Trainer | None = None) -> None:
    """Undo the user's ``torch.compile``, so that ``_orig_mod.`` is in no key and this callback's settings apply."""
    if replaced := unwrap_compiled(pl_module, arguments.uncompiled):
        rank_zero_info(
            f"InductorCompile replaces your torch.compile of {', '.join(replaced)}: it compiles the original module "
            "with train_mode and infer_mode while a trainer runs. With the mode 'eager', a phase runs as compiled"
        )
    children = [name for name in replaced if name != LIGHTNING_MODULE]
    if children and trainer is not None and trainer.state.fn == "fit" and trainer.checkpoint_callbacks:
        name = type(pl_module).__name__
        message = (
            f"the checkpoints of this fit have no '_orig_mod.' in their keys. If {name}.__init__ calls torch.compile "
            f"for {', '.join(children)}, {name}.load_from_checkpoint will fail: remove torch.compile there"
        )
        rank_zero_only(warn_user)("CC405", message)


def _resolve_again(pl_module: LightningModule, arguments: CompileArguments) -> Sequence[Target]:
    """Return the targets of a module that changed during a run."""
    _unwrap_compiled(pl_module, arguments)
    return resolve_targets(pl_module, arguments.targets or (), changed=True)
