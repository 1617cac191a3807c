"""`InductorCompile`: the Lightning callback; its hooks, and nothing else."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from compile_callbacks.checkpoint import KeyMatcher
from compile_callbacks.choices import check_choice
from compile_callbacks.compiling.errors import CompileWarning
from compile_callbacks.compiling.region_settings import ON_ERROR, OnError, RegionSettings
from compile_callbacks.compiling.shapes import NEW_SHAPES, NewShapes
from compile_callbacks.compiling.sharding import why_refused, why_strategy_refused
from compile_callbacks.compiling.targets import adopt_compiled, check_names, find_targets, scope_of
from compile_callbacks.compiling.verify import VERIFY, Verify
from compile_callbacks.links import checks_settings, see
from compile_callbacks.loggers import join_hparams, log_scalars, log_summary
from compile_callbacks.measuring.work import work_of
from compile_callbacks.pass_library.record_graphs import RecordedGraph, RecordGraphs
from compile_callbacks.passes import as_passes
from compile_callbacks.phases import Phase
from compile_callbacks.reporting.report import CompileReport, uncompiled_report
from compile_callbacks.reporting.terminal import print_report, say
from compile_callbacks.session.session import CompileSession
from compile_callbacks.settings.tune import Mode, Settings, as_settings
from compile_callbacks.stack_room import StackRoom
from compile_callbacks.stages import is_last_of_loader, seconds_to_come, steps_to_come
from compile_callbacks.warm_start.artifacts import check_folder

_USERS_LINE = 6  # the stack level at which a warning of the constructor names the line that calls it


class InductorCompile(Callback):
    """Compile the module with one set of Inductor settings for training, and another for inference.

    Training runs with ``train_mode``; sanity check, validation, test and predict run with ``infer_mode``. The
    module is compiled in place while the trainer runs, and is an ordinary module again after it: checkpoints,
    copies and pickles look as if nothing had been compiled.

    Args:
        train_mode: Settings for training: a mode of ``torch.compile`` (``"default"``, ``"reduce-overhead"``,
            ``"max-autotune"``, ``"max-autotune-no-cudagraphs"``, ``"lite"``), a template's name, an
            `InductorConfig`, a mapping of its fields, or ``None`` or ``"eager"`` for not compiled. ``"auto"`` or a
            `Tune`, or a mapping of its fields: what measurements choose.
        infer_mode: Settings for sanity check, validation, test and predict; the same choices.
        targets: What to compile: dotted names of submodules or methods (``"net"``, ``"training_step"``), or
            globs (``"encoder.layers.*"``); ``"forward"`` is the LightningModule's own call. ``None`` takes that
            if the module overrides it, and each direct child that holds parameters; what FSDP shards in parts is
            compiled part by part. ``"repeated"``: blocks that are repeated, such as a transformer's layers, which share
            one graph; what is between them stays eager.
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
        cache_dir: A folder in which compile artifacts are kept across runs and machines: made where it is not there,
            and loaded from only where nobody else can write to it (docs/warm_start.md). What was chosen among
            candidates is kept in ``choices`` below it, and checked in a few steps by the next run; what compiling cost
            and steps took, in ``costs``. ``None`` keeps none.
        keep_compiled: Leave the module compiled after the trainer is done. Calls then choose the phase by
            whether grad is enabled.

    Raises:
        ValueError: A value that is none of the choices. Targets are looked up when the trainer starts.
        TypeError: A value of the wrong type.
        MisconfigurationException: When the trainer starts: under DeepSpeed, or CUDA graphs of sharded weights.

    Example::

        >>> callback = InductorCompile(train_mode="reduce-overhead", infer_mode={"mode": "max-autotune"})
        >>> callback.report.infer.mode
        'max-autotune'
    """

    @checks_settings
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
        self.targets = check_names(targets)
        self.passes = as_passes(passes, "passes")
        for settings in self.configs.values():
            if settings is not None:
                settings.check_beside(self.passes)
        if isinstance(baseline_steps, bool) or not isinstance(baseline_steps, int):
            raise TypeError(f"baseline_steps={baseline_steps!r} must be an integer, 0 or more")
        if baseline_steps < 0:
            raise ValueError(f"baseline_steps={baseline_steps} must be 0 or more; 0 measures no baseline")
        check_choice("on_error", on_error, ON_ERROR)
        check_choice("verify", verify, VERIFY)
        check_choice("new_shapes", new_shapes, NEW_SHAPES)
        self.cache_dir = check_folder("cache_dir", cache_dir)
        if not isinstance(keep_compiled, bool):
            raise TypeError(f"keep_compiled={keep_compiled!r} must be True or False")
        if self.configs["train"] is not None and self.configs["train"].freezes:
            message = "train_mode's option 'freezing' has no effect: weights that are trained are not baked in"
            rank_zero_warn(see(message, "freezing-has-no-effect"), stacklevel=_USERS_LINE, category=CompileWarning)
        given = {"passes": self.passes, "cache_dir": self.cache_dir, "keep_compiled": keep_compiled}
        if not any(self.configs.values()) and (idle := next((name for name, value in given.items() if value), None)):
            message = f"{idle} has no effect: neither train_mode nor infer_mode compiles"
            rank_zero_warn(see(message, "nothing-compiles"), stacklevel=_USERS_LINE, category=CompileWarning)
        self.baseline_steps = baseline_steps
        self.on_error: OnError = on_error
        self.verify: Verify = verify
        self.new_shapes: NewShapes = new_shapes
        self.keep_compiled = keep_compiled
        self._session: CompileSession | None = None
        self._key_matcher: KeyMatcher | None = None
        self._stack_room = StackRoom()
        self._global_step_before = 0
        self._printed = False
        self._earlier_state: dict[str, Any] | None = None

    @property
    def report(self) -> CompileReport:
        """What was measured so far; on a GPU, asking waits for the steps done so far."""
        return self._session.report() if self._session else uncompiled_report(self.configs)

    def __getstate__(self) -> dict[str, Any]:
        # What runs or ran belongs to its process: a strategy that spawns processes sends each of them a callback.
        return {**vars(self), "_session": None, "_key_matcher": None, "_stack_room": StackRoom()}

    # ------------------------------------------------------------------------------------------ a trainer run

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if refused := why_strategy_refused(trainer.strategy):
            raise MisconfigurationException(see(refused, "sharded-weights"))
        self._key_matcher = KeyMatcher(pl_module)
        self._stack_room.install(trainer.fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        self._adopt(pl_module)
        join_hparams(trainer.loggers, lambda: self.report)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._prepare(trainer, pl_module)  # no phase yet: a model summary may run the model, and so may log_graph

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._session.state_dict() if self._session else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # What LearningRateFinder restores in the middle of a run is no resume.
        running = self._session is not None and self._session.running
        self._earlier_state = None if running else state_dict or None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()
        self._log(trainer)
        self._summarize(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()
        self._log(trainer)
        log_summary(trainer.loggers, self.report, trainer.global_step, self._recorded_graphs())

    # ------------------------------------------------------------------------------------------ train phase

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, pl_module, "train")
        self._expect(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._global_step_before = trainer.global_step
        self._step_begins(trainer, batch_idx)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        # Under no_sync, in an accumulation, DDP does not reduce gradients; other strategies do not say.
        if self._session and getattr(trainer.model, "require_backward_grad_sync", True):
            self._session.backward_begins()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session:
            accumulates = trainer.accumulate_grad_batches > 1 or not pl_module.automatic_optimization
            self._session.gradients_ready(kept=accumulates)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        optimizer_steps = trainer.global_step - self._global_step_before
        self._step_ends("train", batch, f"{optimizer_steps} of {trainer.accumulate_grad_batches} accumulated")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave("train")
        self._log(trainer)

    # ------------------------------------------------------------------------------------------ infer phase

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, pl_module, "infer")
        self._expect(trainer)

    @override
    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._step_begins(trainer, batch_idx, dataloader_idx)

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
        self._step_ends(f"validate {dataloader_idx}", batch)
        self._loader_ends(trainer, batch_idx, dataloader_idx)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session:
            self._session.last_step_ended()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave("infer")
        if trainer.state.fn == "fit":
            self._begin(trainer, pl_module, "train")

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, pl_module, "infer")
        self._expect(trainer)

    @override
    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._step_begins(trainer, batch_idx, dataloader_idx)

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._step_ends(f"test {dataloader_idx}", batch)
        self._loader_ends(trainer, batch_idx, dataloader_idx)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave("infer")

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, pl_module, "infer")
        self._expect(trainer)

    @override
    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._step_begins(trainer, batch_idx, dataloader_idx)

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._step_ends(f"predict {dataloader_idx}", batch)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave("infer")

    # ------------------------------------------------------------------------------------------ what hooks call

    def _adopt(self, pl_module: LightningModule) -> None:
        """Take over what the user compiled by hand: our settings, clean keys."""
        if adopted := adopt_compiled(pl_module):
            rank_zero_info(
                f"InductorCompile takes over {', '.join(adopted)}, compiled by hand: the original module stands "
                "there again, compiled with train_mode and infer_mode while a trainer runs"
            )

    def _begin(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        """Enter a phase."""
        self._prepare(trainer, pl_module).enter(phase, weights_stand_still=trainer.state.fn != "fit")

    def _prepare(self, trainer: Trainer, pl_module: LightningModule) -> CompileSession:
        """The session of the run; the first time in a run it is made to begin, and what is compiled installed."""
        session = self._session
        if session is None or session.module is not pl_module:
            if session is not None:
                session.end()
                session.free_compiled()
            self._adopt(pl_module)  # what configure_model made came after setup
            if refused := why_refused(pl_module, self.configs):
                raise MisconfigurationException(see(refused, "sharded-weights"))
            targets = find_targets(pl_module, self.targets, LightningModule)
            session = self._session = CompileSession(
                pl_module,
                targets,
                self.configs,
                passes=self.passes,
                baseline_steps=self.baseline_steps,
                settings=RegionSettings(on_error=self.on_error, verify=self.verify, new_shapes=self.new_shapes),
                cache_dir=self.cache_dir,
                say=functools.partial(say, trainer),
                scope=scope_of(self.targets),
            )
        if not session.running:
            session.begin(precision=str(trainer.precision), together=trainer.world_size > 1)
        if self._earlier_state is not None:  # now it is known how many processes there are
            session.resume(self._earlier_state)
            self._earlier_state = None
        return session

    def _expect(self, trainer: Trainer) -> None:
        """Tell how many steps are to come: what is tried out, or measured eagerly, must not take most of them."""
        if self._session and not trainer.sanity_checking:
            timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
            self._session.expect(steps_to_come(trainer), seconds_to_come(trainer, timers))

    def _step_begins(self, trainer: Trainer, batch_idx: int, loader: int = 0) -> None:
        if self._session:
            self._session.step_begins(first=batch_idx == 0, measured=not trainer.sanity_checking, loader=loader)

    def _step_ends(self, stage: str, batch: Any, part: str = "") -> None:
        if self._session:
            self._session.step_ends(work_of(stage, batch, part))

    def _loader_ends(self, trainer: Trainer, batch_idx: int, loader: int) -> None:
        """After a batch: if it was its loader's last one, the trainer reduces next what is logged for all processes."""
        if self._session and is_last_of_loader(trainer, batch_idx, loader):
            self._session.loader_ended(loader)

    def _leave(self, phase: Phase) -> None:
        if self._session:
            self._session.leave(phase)

    def _end(self) -> None:
        self._stack_room.remove()
        if self._session:
            self._session.end(keep_compiled=self.keep_compiled)
        if self._key_matcher:
            self._key_matcher.remove()
            self._key_matcher = None

    def _log(self, trainer: Trainer) -> None:
        log_scalars(trainer.loggers, self.report.scalars(), trainer.global_step)

    def _summarize(self, trainer: Trainer) -> None:
        """The table in the loggers, and after a fit or a first run in the terminal."""
        report = self.report
        log_summary(trainer.loggers, report, trainer.global_step, self._recorded_graphs())
        if self._session is None or not report.has_figures:
            return
        self._session.judge()
        if trainer.is_global_zero and (trainer.state.fn == "fit" or not self._printed):
            self._printed = True
            print_report(report)

    def _recorded_graphs(self) -> list[RecordedGraph]:
        configured = [config.passes for config in self.configs.values() if config is not None]
        recorders = {id(p): p for passes in (self.passes, *configured) for p in passes if isinstance(p, RecordGraphs)}
        return [graph for recorder in recorders.values() for graph in recorder.graphs]
