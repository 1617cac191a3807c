"""`InductorCompile`: the Lightning callback; its hooks, and nothing else."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from compile_callbacks._utils import stack_chunks
from compile_callbacks._utils.errors import CompileWarning
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.callbacks.trainer_progress import remaining_seconds, remaining_steps
from compile_callbacks.config.tune import Mode, Settings, as_settings, phases_left_alone
from compile_callbacks.passes.base import as_passes
from compile_callbacks.passes.library.record_graphs import RecordedGraph, RecordGraphs
from compile_callbacks.profiling.baseline import Baseline
from compile_callbacks.profiling.workload import Workload, workload_of
from compile_callbacks.report.build import uncompiled_report
from compile_callbacks.report.console import print_line, print_report
from compile_callbacks.report.loggers import (
    log_scalars,
    log_settings,
    log_summary,
    report_folder,
    settings_to_log,
    write_report,
)
from compile_callbacks.report.report import CompileReport
from compile_callbacks.runtime.cache_dir import check_folder
from compile_callbacks.runtime.checkpoint_keys import match_orig_mod_keys
from compile_callbacks.runtime.fsdp import unsupported_reason, unsupported_strategy_reason
from compile_callbacks.runtime.session import Session, Stage
from compile_callbacks.runtime.several_callbacks import name_of, state_key, why_not_together
from compile_callbacks.runtime.target_settings import NewShapes, OnError, TargetSettings, Verify
from compile_callbacks.runtime.targets import check_target_names, named_targets, resolve_targets, unwrap_compiled

_USERS_LINE = 5  # the stack level at which a warning of the constructor names the line that calls it
_STATE_KEY = "compile_callbacks"
"""The checkpoint's key for the states of all callbacks, by their targets. Lightning's ``state_dict`` hook is not used,
because two callbacks would need different state keys when the Trainer is constructed."""


@dataclass(kw_only=True)
class _Call:
    """A trainer call from ``setup`` to ``teardown``.

    Attributes:
        trainer: The trainer.
        report_folder: The folder for the report.
        key_matcher: The hook on the module, which teardown removes.
        outer: The session of the trainer call that is running, if this one is made in a hook of it.
        go_on: Continues ``outer``.
    """

    trainer: Trainer
    report_folder: str | None
    key_matcher: RemovableHandle
    outer: Session | None
    go_on: Callable[[], None]


class _LastReport:
    """The report of the last run of a callback or of any copy of it: some libraries train with a copy."""

    report: CompileReport | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _LastReport:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class InductorCompile(Callback):
    """Compile the module with one set of Inductor settings for training, and another for inference.

    Training runs with ``train_mode``; sanity check, validation, test and predict run with ``infer_mode``. The
    module is compiled in place while the trainer runs, and is an ordinary module again after it: checkpoints,
    copies and pickles look as if nothing had been compiled.

    Args:
        train_mode: Settings for training: a mode of ``torch.compile`` (``"default"``, ``"reduce-overhead"``,
            ``"max-autotune"``, ``"max-autotune-no-cudagraphs"``, ``"lite"``), a template's name, an
            `InductorConfig`, or a mapping of its fields. ``"auto"`` or a `Tune`, or a mapping of its fields: the
            fastest of several, by measuring. ``"eager"``: not compiled. ``None``: the callback leaves the phase alone,
            so that a module you compiled yourself runs as you compiled it.
        infer_mode: Settings for sanity check, validation, test and predict; the same choices.
        targets: What to compile: dotted names of submodules or methods (``"net"``, ``"training_step"``), or
            globs (``"encoder.layers.*"``); ``"forward"`` is the LightningModule's own call. ``None``: what the
            steps call. The callback records the modules and methods that the first step of each stage calls, which is
            eager, and compiles these; a direct child with parameters that is called later is compiled then. A
            module without parameters and a metric are compiled only if you name them. ``"repeated"``: repeated blocks,
            such as a transformer's layers, share one graph; the code between them stays eager.
        passes: Custom graph passes for both phases, see `GraphPass`; in YAML by import path, or by ``class_path``.
        baseline_steps: Steps that each phase runs eagerly first, to measure what the speedup is compared
            with, after two to warm up; never more than half of the steps to come. 0: no baseline, no speedup.
        on_error: What a failure of the compiler does: ``"eager"`` warns, counts it, and runs the work eagerly;
            ``"raise"`` ends the run with a `CompileError`.
        verify: Compare the first batch of each phase with eager, outputs and in training gradients, and on a
            difference that rounding does not explain: ``"warn"``; ``"eager"``, warn and leave the target eager;
            ``"raise"``, end the run. ``"off"``: do not compare. The tolerance is in docs/correctness.md.
        new_shapes: What an input of a shape not seen before does: ``"recompile"``; ``"eager"``, run eagerly
            unless a compiled graph fits (a shape that keeps coming back is compiled after all); ``"raise"``.
        cache_dir: A folder in which Inductor and Triton keep compiled code while the trainer runs, so that a later run
            starts in a fraction of the time, also on another machine of the same kind. It is created if it is missing,
            and must belong to you: its code is run. It also holds what a `Tune` chose. ``None``: torch's own folder.
        keep_compiled: Leave the module compiled after the trainer is done. Calls then choose the phase by
            whether grad is enabled.

    Raises:
        ValueError: A value that is none of the choices. Targets are looked up when the trainer starts.
        TypeError: A value of the wrong type.
        MisconfigurationException: When the trainer starts: under DeepSpeed, CUDA graphs of sharded weights, or
            several callbacks with overlapping targets.

    Example::

        >>> callback = InductorCompile(train_mode="reduce-overhead", infer_mode={"mode": "max-autotune"})
        >>> callback.report.infer.mode
        'max-autotune'
    """

    def __init__(
        self,
        train_mode: Mode = "default",
        infer_mode: Mode = "default",
        *,
        targets: str | Sequence[str] | None = None,
        passes: Sequence[Any] = (),
        baseline_steps: int = 10,
        on_error: OnError = "eager",
        verify: Verify = "warn",
        new_shapes: NewShapes = "recompile",
        cache_dir: str | os.PathLike[str] | None = None,
        keep_compiled: bool = False,
    ) -> None:
        self.configs: dict[Phase, Settings] = {
            "train": as_settings(train_mode, "train_mode"),
            "infer": as_settings(infer_mode, "infer_mode"),
        }
        self._left_alone = phases_left_alone(train_mode, infer_mode)
        self.targets = check_target_names(targets)
        self._region_settings = TargetSettings(on_error=on_error, verify=verify, new_shapes=new_shapes)
        self.passes = as_passes(passes, "passes")
        for settings in self.configs.values():
            if settings is not None:
                settings.check_beside(self.passes)
        if isinstance(baseline_steps, bool) or not isinstance(baseline_steps, int):
            raise TypeError(f"baseline_steps={baseline_steps!r} must be an integer, 0 or more")
        if baseline_steps < 0:
            raise ValueError(f"baseline_steps={baseline_steps} must be 0 or more; 0 measures no baseline")
        self.cache_dir = check_folder("cache_dir", cache_dir)
        if not isinstance(keep_compiled, bool):
            raise TypeError(f"keep_compiled={keep_compiled!r} must be True or False")
        if self.configs["train"] is not None and self.configs["train"].freezes:
            message = "train_mode's option 'freezing' has no effect: weights that are trained are not baked in"
            rank_zero_warn(message, stacklevel=_USERS_LINE, category=CompileWarning)
        given = {"passes": self.passes, "cache_dir": self.cache_dir, "keep_compiled": keep_compiled}
        if not any(self.configs.values()) and (idle := next((name for name, value in given.items() if value), None)):
            message = f"{idle} has no effect: neither train_mode nor infer_mode compiles"
            rank_zero_warn(message, stacklevel=_USERS_LINE, category=CompileWarning)
        self.baseline_steps = baseline_steps
        self.keep_compiled = keep_compiled
        self._session: Session | None = None
        self._calls: list[_Call] = []
        self._last = _LastReport()
        self._global_step_before = 0
        self._printed = False
        self._peers: list[InductorCompile] = []  # the trainer's callbacks of this class
        self._others: tuple[Any, ...] = ()  # targets of other callbacks of the trainer, which targets=None leaves out
        self._earlier_state: object = None

    @property
    def report(self) -> CompileReport:
        """What was measured so far; on a GPU, asking waits for the steps done so far.

        If only a copy of this callback ran, the report is that of the copy.
        """
        if self._session is not None:
            return self._session.report()
        return self._last.report or uncompiled_report(self.configs, self._left_alone)

    def __getstate__(self) -> dict[str, Any]:
        # A run belongs to its process: a strategy that spawns processes sends each of them a callback.
        return {**vars(self), "_session": None, "_calls": [], "_peers": []}

    # ------------------------------------------------------------------------------------------ a trainer run

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if refused := unsupported_strategy_reason(trainer.strategy):
            raise MisconfigurationException(refused)
        with contextlib.suppress(ValueError):  # configure_model may still make the module of an unknown name
            self._check_together(trainer, pl_module)
        self._begin_call(trainer, pl_module, stage)
        stack_chunks.install_on(trainer)
        self._adopt(pl_module)
        log_settings(trainer, pl_module, self._settings_to_log(trainer))

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._prepare(trainer, pl_module)  # no phase yet: a model summary may run the model, and so may log_graph

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._session:
            checkpoint.setdefault(_STATE_KEY, {})[state_key(self.targets)] = self._session.state_dict()

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._session and self._session.running:
            return  # LearningRateFinder and BatchSizeFinder load a checkpoint within a run, which is no resume
        states = checkpoint.get(_STATE_KEY)
        self._earlier_state = states.get(state_key(self.targets)) if isinstance(states, Mapping) else None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_call(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # After an error of the GPU, even reading step times raises. It must not hide the exception of the run.
        try:
            self._end_call(trainer, exception)
        except Exception as error:
            exception.add_note(f"InductorCompile wrote no report: {in_one_line(describe_failure(error))}")

    # ------------------------------------------------------------------------------------------ train phase

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, pl_module, "train")
        self._expect(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._step_begins(batch_idx):
            self._global_step_before = trainer.global_step

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session and self._session.has_cudagraphs:
            accumulates = trainer.accumulate_grad_batches > 1 or not pl_module.automatic_optimization
            self._session.gradients_ready(kept=accumulates)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        def workload() -> Workload:
            optimizer_steps = trainer.global_step - self._global_step_before
            return workload_of("train", batch, f"{optimizer_steps} of {trainer.accumulate_grad_batches} accumulated")

        self._step_ends(workload)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave("train")
        self._log(trainer, self.report)

    # ------------------------------------------------------------------------------------------ infer phase

    # Validation, test and predict are the same to this callback.

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, pl_module, "infer")
        self._expect(trainer)

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._step_begins(batch_idx)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

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
        self._step_ends(lambda: workload_of(f"{trainer.state.stage} {dataloader_idx}", batch))

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave("infer")
        if trainer.state.fn == "fit":
            self._begin(trainer, pl_module, "train")

    on_test_end = on_predict_end = on_validation_end

    # ------------------------------------------------------------------------------------------ what hooks call

    def _adopt(self, pl_module: LightningModule) -> None:
        """Undo what the user compiled, so that state_dict keys are clean and this callback's settings hold."""
        if adopted := unwrap_compiled(pl_module, self._left_alone):
            rank_zero_info(
                f"InductorCompile replaces your torch.compile of {', '.join(adopted)}: it compiles the original module "
                "with train_mode and infer_mode while a trainer runs. If a mode is None, its phase runs as you compiled"
            )

    def _begin(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        """Enter a phase."""
        session = self._prepare(trainer, pl_module)
        nested = self._is_within_run
        self._peers = self._callbacks(trainer)
        session.enter(
            Stage(
                phase=phase,
                name="validate" if trainer.sanity_checking else str(trainer.state.stage.value),  # type: ignore[union-attr]
                sanity=trainer.sanity_checking,
                nested=nested,
                weights_frozen=trainer.state.fn != "fit" and not nested,
            )
        )

    def _prepare(self, trainer: Trainer, pl_module: LightningModule) -> Session:
        """Return the session of the run. At the first call in a run, begin the session and install the targets."""
        session = self._session
        others = tuple(callback.targets for callback in self._callbacks(trainer) if callback is not self)
        others = others if self.targets is None else ()
        if session is None or session.module is not pl_module or (not session.running and others != self._others):
            if session is not None and not self._is_within_run:
                session.end()
                session.free_compiled()
            self._adopt(pl_module)  # configure_model comes after setup
            if refused := unsupported_reason(pl_module, self.configs):
                raise MisconfigurationException(refused)
            self._check_together(trainer, pl_module)
            taken = [target for names in others for target in named_targets(pl_module, names)]
            targets = resolve_targets(pl_module, self.targets, LightningModule, taken)
            self._others = others
            session = self._session = Session(
                pl_module,
                targets,
                self.configs,
                left_alone=self._left_alone,
                finds_targets=self.targets is None,
                others=taken,
                taken=taken,
                passes=self.passes,
                baseline_steps=self.baseline_steps,
                settings=self._region_settings,
                cache_dir=self.cache_dir,
                print_line=functools.partial(print_line, trainer),
            )
        if not session.running:
            together = trainer.world_size > 1
            session.begin(precision=str(trainer.precision), together=together, shared=self._shared_baselines(trainer))
        if self._earlier_state is not None:  # now it is known how many processes there are
            session.resume(self._earlier_state)
            self._earlier_state = None
        return session

    def _expect(self, trainer: Trainer) -> None:
        """Tell how many steps are to come: what is tried out, or measured eagerly, must not take most of them."""
        if self._session and not trainer.sanity_checking and not self._is_within_run:
            timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
            self._session.expect(remaining_steps(trainer), remaining_seconds(trainer, timers))

    def _step_begins(self, batch_idx: int) -> bool:
        """Begin a step; returns whether it is timed."""
        if self._session is None:
            return False
        turn = True
        if len(self._peers) > 1:  # each session changes how long the step takes, so only one at a time measures it
            sessions = [session for callback in self._peers if (session := callback._session)]
            turn = max(sessions, key=lambda session: (session.compares, session.measures)) is self._session
        return self._session.step_begins(first=batch_idx == 0, turn=turn)

    def _step_ends(self, workload: Callable[[], Workload]) -> None:
        if self._session:
            self._session.step_ends(workload)

    def _leave(self, phase: Phase) -> None:
        if self._session and not self._is_within_run:
            self._session.leave(phase)

    def _log(self, trainer: Trainer, report: CompileReport) -> None:
        log_scalars(trainer.loggers, report.scalars(self._name_in(trainer)), trainer.global_step)

    # ------------------------------------------------------------------------------------------ calls of a trainer

    def _begin_call(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        while self._calls and (
            self._calls[-1].trainer.state.status != TrainerStatus.RUNNING
            or (self._calls[-1].trainer is trainer and stage == "fit")
        ):
            self._close(self._calls.pop())  # another callback raised in on_exception, so this one was not called
        outer = self._session if self._calls and self._session and self._session.running else None
        call = _Call(
            trainer=trainer,
            report_folder=report_folder(trainer),  # a collective, so that no other hook asks for it
            key_matcher=match_orig_mod_keys(pl_module),
            outer=outer,
            go_on=outer.interrupt() if outer else lambda: None,
        )
        self._calls.append(call)

    @property
    def _is_within_run(self) -> bool:
        """Whether the call was made within a run of the same session, which then neither measures nor decides."""
        return bool(self._calls) and self._session is not None and self._calls[-1].outer is self._session

    def _end_call(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        if not self._calls or self._calls[-1].trainer is not trainer:
            return  # an exception came before this callback's setup
        within, call = self._is_within_run, self._calls.pop()
        try:
            stack_chunks.remove_from(trainer)
            self._close(call)
            report = self._last.report = self.report
            self._log(trainer, report)
            name, settings = self._name_in(trainer), self._settings_to_log(trainer)
            log_summary(trainer.loggers, report, trainer.global_step, self._recorded_graphs(), settings, name)
            write_report(call.report_folder, trainer, report, exception, name)
            if exception is None and not within:
                self._summarize(trainer, report)
        finally:
            if call.outer is not None:
                if self._session is not None and not (within or self.keep_compiled):
                    self._session.free_compiled()
                self._session = call.outer
                call.go_on()

    def _close(self, call: _Call) -> None:
        """Remove the hook and the compiled calls of a trainer call."""
        call.key_matcher.remove()
        if self._session is not None and self._session is not call.outer:
            try:
                self._session.end(keep_compiled=self.keep_compiled)
            except Exception as error:
                if isinstance(error, Warning):  # a warning that the user has made an error
                    raise
                message = f"InductorCompile could not clean up after the run: {in_one_line(describe_failure(error))}"
                rank_zero_warn(message, category=CompileWarning)

    def _summarize(self, trainer: Trainer, report: CompileReport) -> None:
        """Warn of slow steps, and after a fit or the first call print the table."""
        if self._session is None or not report.has_figures:
            return
        self._session.warn_about_slow_steps()
        if trainer.is_global_zero and (trainer.state.fn == "fit" or not self._printed):
            self._printed = True
            print_report(report, self._name_in(trainer))

    # ------------------------------------------------------------------------------------------ several callbacks

    def _callbacks(self, trainer: Trainer) -> list[InductorCompile]:
        """The trainer's callbacks of this class. The first one that compiles a phase measures it."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # one of its connectors sets it
        found = [callback for callback in callbacks if isinstance(callback, InductorCompile)]
        return found if any(callback is self for callback in found) else [self]  # a callback around it calls its hooks

    def _check_together(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if refused := why_not_together(self._callbacks(trainer), pl_module):
            raise MisconfigurationException(refused)

    def _name_in(self, trainer: Trainer) -> str:
        """The name in scalars and files; empty for the trainer's first callback."""
        return "" if self._callbacks(trainer)[0] is self else name_of(self.targets)

    def _shared_baselines(self, trainer: Trainer) -> dict[Phase, Baseline]:
        """By phase, the baseline of the first callback that compiles it, unless that is this one."""
        callbacks = self._callbacks(trainer)
        firsts = {phase: next((c for c in callbacks if c.configs[phase]), callbacks[0]) for phase in PHASES}
        return {
            phase: first._session.baseline(phase) if first._session else Baseline(0)
            for phase, first in firsts.items()
            if first is not self
        }

    def _settings_to_log(self, trainer: Trainer) -> dict[str, str]:
        """The settings of all callbacks, which the first one logs: TensorBoard shows one set of hyperparameters."""
        first, *others = self._callbacks(trainer)
        settings = settings_to_log(first.configs, first.targets)
        for other in others:
            settings |= settings_to_log(other.configs, other.targets, name_of(other.targets))
        return settings if first is self else {}

    def _recorded_graphs(self) -> list[RecordedGraph]:
        configured = [config.passes for config in self.configs.values() if config is not None]
        recorders = {id(p): p for passes in (self.passes, *configured) for p in passes if isinstance(p, RecordGraphs)}
        return [graph for recorder in recorders.values() for graph in recorder.graphs]
