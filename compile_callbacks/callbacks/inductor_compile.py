"""`InductorCompile`: the Lightning callback. Its hooks tell the `Session` when stages and steps begin and end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from compile_callbacks._utils.errors import CompileError, warn_user, with_code
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks._utils.phases import Phase
from compile_callbacks.callbacks.trainer_run import is_stopping, remaining_steps, resolve_again, undo_users_compile
from compile_callbacks.graphs.target_log import OnError, Verify
from compile_callbacks.report import loggers
from compile_callbacks.report.loggers import print_line
from compile_callbacks.report.render import print_report
from compile_callbacks.report.report import CompileReport, uncompiled_report
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.session.phase_run import Stage
from compile_callbacks.session.session import Session
from compile_callbacks.targets.fsdp import unsupported_reason, unsupported_strategy_reason
from compile_callbacks.targets.resolve import resolve_targets
from compile_callbacks.targets.users_compile import match_orig_mod_keys
from compile_callbacks.tuning.contest import Conditions
from compile_callbacks.tuning.tune import PhaseMode

_OF_RUN = ("session", "_active", "_trainer", "_key_matcher")
"""The attributes that a copy does not get. A strategy that spawns processes pickles the callback for each of them."""


class LastReport:
    """The report of the last run of a callback. Copies of the callback share it: some libraries train with a copy."""

    report: CompileReport | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LastReport:
        return self


class InductorCompile(Callback):
    """Compile the module with one set of Inductor settings for training, and another for inference.

    The callback compiles the module in place while the trainer runs, and restores it afterwards. Checkpoints, copies
    and pickles always contain the original module.

    Args:
        train_mode: The settings for training. ``"fast"`` becomes ``"reduce-overhead"`` when the eager steps end, if
            CUDA graphs fit the run (one NVIDIA GPU for each process, equal shapes), otherwise ``"default"``.
            Other choices: a mode of ``torch.compile`` (``"default"``, ``"reduce-overhead"``, ``"max-autotune"``,
            ``"max-autotune-no-cudagraphs"``, ``"lite"``), the name of a template, an `InductorConfig`, or a mapping of
            its fields. ``"auto"``, a `Tune` or a mapping of its fields measures several settings and selects the
            fastest. ``"eager"`` and ``None`` do not compile the phase: it runs as without the callback, with the
            modules that you compiled yourself.
        infer_mode: The settings for sanity check, validation, test and predict, with the same choices.
        targets: The modules and methods to compile: dotted names of submodules or methods (``"net"``,
            ``"training_step"``), or globs (``"encoder.layers.*"``). ``"forward"`` is the LightningModule's own call.
            If ``None``, the callback compiles the modules that the steps call, and the methods that the eager steps of
            the baseline call. If you replace a module, the callback compiles the new module from the next epoch or
            stage on. It compiles a metric or a module without parameters only if you name it. Equal blocks that a
            glob matches share a compiled function.
        passes: Custom graph passes for both phases. See `GraphPass`. In YAML, give a ``class_path``.
        baseline_steps: The number of eager steps that the callback times first in each phase, after two warm-up steps.
            The speedup is relative to these steps. The callback uses at most half of the remaining steps. With 0, the
            report shows no speedup.
        background: Whether a helper process compiles while training continues. The steps run eagerly until the compiled
            code is loaded, so when it is used depends on the clock. A graph that cannot be sent to another process
            compiles in this one.
        on_error: The reaction if the compiler fails: ``"eager"`` warns, counts the failure and runs the graph
            eagerly; ``"raise"`` ends the run with a `CompileError`.
        verify: The reaction if a new graph differs from eager by more than rounding explains. The callback compares
            outputs, mutated inputs and gradients. ``"warn"`` warns, ``"eager"`` warns and runs the target eagerly,
            and ``"raise"`` ends the run. ``"off"`` skips the comparison. Results that rounding cannot explain at all,
            such as values that are not finite, run eagerly also with ``"warn"``.
        cache_dir: The folder for the compiled code of Inductor and Triton, and for the winner of a `Tune`. A later run
            compiles in a fraction of the time, also on another machine of the same kind. The callback creates a
            missing folder. The folder must belong to you, because torch runs the code in it. If ``None``, torch uses
            its own folder.
        keep_compiled: Whether the module stays compiled after the run. The grad mode of a call then selects the phase.

    Raises:
        ValueError: If a value is not one of the choices. The callback resolves ``targets`` when the trainer starts.
        TypeError: If a value has the wrong type, or an argument is unknown.
        MisconfigurationException: When the trainer starts, if the strategy is DeepSpeed, if CUDA graphs would run with
            sharded weights, or if the Trainer has a second `InductorCompile`.

    Example::

        >>> callback = InductorCompile(train_mode="reduce-overhead", infer_mode={"mode": "max-autotune"})
        >>> callback.report.infer.mode
        'max-autotune'
    """

    # The constructor sets none of these, because copies begin without a run.
    session: Session | None = None
    """The session of the current or last run."""
    _active: Session | None = None  # the session if it is running
    _trainer: Trainer | None = None  # the trainer of the running call, unless its rest runs eagerly
    _key_matcher: RemovableHandle  # the hook on the module that matches ``_orig_mod.`` keys
    from_environment = False  # whether the variable ``COMPILE_CALLBACKS`` added it, so that it yields to another one
    _printed = False  # whether the report was printed
    _global_step_before: int | None = None  # at the start of a timed step
    _misconfiguration: type[Exception] = MisconfigurationException

    def __init__(
        self,
        train_mode: PhaseMode = "fast",
        infer_mode: PhaseMode = "fast",
        *,
        targets: str | Sequence[str] | None = None,
        passes: Sequence[Any] = (),
        baseline_steps: int = 10,
        background: bool = False,
        on_error: OnError = "eager",
        verify: Verify = "warn",
        cache_dir: str | os.PathLike[str] | None = None,
        keep_compiled: bool = False,
    ) -> None:
        given = {name: value for name, value in dict(locals()).items() if name not in ("self", "__class__")}
        self.arguments = CompileArguments.checked(**given)
        self._last_report = LastReport()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_RUN}

    @property
    def report(self) -> CompileReport:
        """The measurements so far. On a GPU, reading them waits until the GPU has finished the current steps.

        If only a copy of this callback ran, this is the report of the copy.
        """
        if self.session is not None:
            return self.session.report()
        return self._last_report.report or uncompiled_report(self.arguments.configs)

    # ------------------------------------------------------------------------------------------ a Trainer call

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a call. A nested call, such as ``trainer.validate`` in a hook of a fit, ends the outer one."""
        # Only now, all callbacks are known: Lightning adds those of entry points and of the module.
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # one of its connectors sets it
        others = [c for c in callbacks if isinstance(c, InductorCompile) and c is not self and not c.from_environment]
        if others and self.from_environment:
            rank_zero_info("COMPILE_CALLBACKS has no effect, because the script has its own InductorCompile")
            return
        if others:
            message = (
                "the Trainer has more than one InductorCompile. Name all modules to compile in one callback, as in "
                "InductorCompile(targets=['encoder', 'head']). For other settings of a part, call its compile(mode=...)"
            )
            raise self._misconfiguration(with_code("CC203", message))
        if refused := unsupported_strategy_reason(trainer.strategy):
            raise self._misconfiguration(with_code("CC801", refused))
        if (running := self._trainer) is not None:
            self._end_call(running)
            # If another callback raised in ``on_exception``, the earlier call ended without our hook.
            if running.state.status == TrainerStatus.RUNNING and not (running is trainer and stage == "fit"):
                warn_user("CC106", "a Trainer call began within another one. The rest of the outer call is eager")
        self._trainer, self._key_matcher = trainer, match_orig_mod_keys(pl_module)
        undo_users_compile(pl_module, self.arguments, trainer)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # No phase begins yet, because a model summary or log_graph may run the model before the first step.
        self._prepare(trainer, pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_call(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # After a GPU error, even reading step times raises. That exception must not hide the run's exception.
        try:
            self._end_call(trainer, exception)
        except Exception as error:
            exception.add_note(f"InductorCompile wrote no report: {in_one_line(describe_failure(error))}")

    def _prepare(self, trainer: Trainer, pl_module: LightningModule) -> Session | None:
        """In the first hook of a call, begin the session. Return ``None`` after a nested call and `_give_up`."""
        if trainer is not self._trainer:
            return None
        if self.session is None or self.session.module is not pl_module:
            if self.session is not None:
                self.session.discard()
            self.session = self._new_session(trainer, pl_module)
        if self._active is not self.session:
            try:
                conditions = Conditions(
                    precision=str(trainer.precision),
                    rank=trainer.global_rank,
                    ranks=trainer.world_size,
                    of_rank_zero=trainer.strategy.broadcast,
                    stopping=functools.partial(is_stopping, weakref.ref(trainer)),
                )
                self.session.begin(conditions)
            except Exception as error:
                self._give_up("begin the run", error)
                return None
        self._active = self.session
        return self.session

    def _new_session(self, trainer: Trainer, pl_module: LightningModule) -> Session:
        arguments = self.arguments
        undo_users_compile(pl_module, arguments, trainer)  # again, because configure_model runs after setup
        if refused := unsupported_reason(pl_module, arguments.configs):
            raise self._misconfiguration(with_code("CC802", refused))
        # Lightning's `is_overridden` raises for a module of the package pytorch_lightning.
        is_lightnings = pl_module.backward.__module__.startswith(("lightning.", "pytorch_lightning."))
        keeps_graph = not (pl_module.automatic_optimization and is_lightnings)
        settings = dataclasses.replace(arguments.target_settings, keeps_graph=keeps_graph)
        return Session(
            pl_module,
            resolve_targets(pl_module, arguments.targets or ()),
            dataclasses.replace(arguments, target_settings=settings),
            resolve=functools.partial(resolve_again, pl_module, arguments),
            print_line=functools.partial(print_line, weakref.ref(trainer)),
        )

    def _give_up(self, what: str, error: Exception) -> None:
        """Warn about an error of this library's own bookkeeping, and run the rest of the call eagerly."""
        if isinstance(error, (Warning, CompileError)):  # the user's settings turn these into errors
            raise error
        reason = in_one_line(describe_failure(error))
        warn_user("CC106", f"InductorCompile could not {what}: {reason}. The rest of the run is eager")
        self._trainer = self._active = None
        self._key_matcher.remove()
        with contextlib.suppress(Exception):
            self.session.discard()  # type: ignore[union-attr]

    def _end_call(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        """End a call: remove the hook, end the run of the session, and write the report."""
        if (ours := self._trainer) is None or (ours is not trainer and ours.state.status == TrainerStatus.RUNNING):
            return
        self._trainer = self._active = None
        self._key_matcher.remove()
        try:
            if self.session is not None:
                self.session.end(keep_compiled=self.arguments.keep_compiled)
            self._write_report(trainer, exception)
        except Exception as error:
            if exception is not None:
                raise
            self._give_up("end the run", error)

    def _write_report(self, trainer: Trainer, exception: BaseException | None) -> None:
        """Write the report to the loggers, a file and the terminal, and issue the warnings about the whole run."""
        report = self._last_report.report = self.report
        graphs = {f"graphs/{graph.title}": graph.text for graph in self.arguments.recorded_graphs()}
        loggers.log(trainer.loggers, trainer.global_step, report.scalars(), report, graphs)
        if self.session is None or not report.has_figures:
            return
        path = loggers.write_report(trainer, report, exception)
        if exception is None:
            self.session.check()
            if not trainer.is_global_zero or (trainer.state.fn != "fit" and self._printed):
                return
            self._printed = True
            print_report(report.phases)
        if path is not None:
            print_line(weakref.ref(trainer), f"report: {path}")

    def _log_scalars(self, trainer: Trainer, *, details: bool = True) -> None:
        """Log the scalars of the report. ``details`` synchronizes the GPU, so use it only at the end of a stage."""
        if self._active and trainer.loggers and trainer.is_global_zero:
            try:
                loggers.log(trainer.loggers, trainer.global_step, self._active.report(details=details).scalars())
            except Exception as error:
                self._give_up("compute the logged figures", error)

    # ------------------------------------------------------------------------------------------ stages

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_stage(trainer, pl_module, "train" if trainer.training else "infer")

    on_validation_start = on_test_start = on_predict_start = on_train_start

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (session := self._active) is not None:
            session.check("train" if trainer.training else "infer")
        if not trainer.sanity_checking:
            self._log_scalars(trainer)
        if trainer.state.fn == "fit" and not trainer.training:
            self._begin_stage(trainer, pl_module, "train")

    on_validation_end = on_test_end = on_predict_end = on_train_epoch_end

    def _begin_stage(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        if (session := self._prepare(trainer, pl_module)) is not None:
            stage = Stage(phase=phase, eager=trainer.sanity_checking, weights_frozen=trainer.state.fn != "fit")
            session.stage_begins(stage, {} if stage.eager else remaining_steps(trainer))

    # ------------------------------------------------------------------------------------------ steps of all stages

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if (session := self._active) is not None:
            is_timed = session.step_begins(first=batch_idx == 0)
            self._global_step_before = trainer.global_step if is_timed else None

    on_train_batch_start = on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if (session := self._active) is None:
            return
        try:
            session.step_ends(batch, self._describe_step, trainer, dataloader_idx)
        except Exception as error:
            self._give_up("measure a step", error)
        if session.stage.phase == "train":
            every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # one of its connectors sets it
            if every and (batch_idx + 1) % every == 0:
                self._log_scalars(trainer, details=False)

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _describe_step(self, trainer: Trainer, dataloader_idx: int) -> tuple[str, str]:
        """Return the loader of a step, and how it accumulates gradients. Most steps do not need this."""
        loader = "train" if trainer.training else f"{trainer.state.stage} {dataloader_idx}"
        if (before := self._global_step_before) is None or not trainer.training:
            return loader, ""
        return loader, f"{trainer.global_step - before} of {trainer.accumulate_grad_batches} accumulated"

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        session = self._active
        if session is None or not session.gpu.on_gpu:
            return
        if trainer.accumulate_grad_batches > 1 or not pl_module.automatic_optimization:
            session.keep_gradients()
