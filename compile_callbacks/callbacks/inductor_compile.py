"""`InductorCompile`: the Lightning callback. Its hooks tell the `Session` when stages and steps begin and end."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from typing_extensions import override

from compile_callbacks._utils.errors import warn_user, with_code
from compile_callbacks._utils.messages import check_type, describe_failure, in_one_line
from compile_callbacks._utils.phases import EAGER, Phase
from compile_callbacks.callbacks.trainer_calls import TrainerCalls
from compile_callbacks.callbacks.trainer_progress import remaining_steps
from compile_callbacks.graphs.target_log import OnError, Verify
from compile_callbacks.report.report import CompileReport
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.session.phase_run import Stage
from compile_callbacks.session.session import Session
from compile_callbacks.tuning.tune import PhaseMode

_warn = rank_zero_only(warn_user)


class InductorCompile(Callback):
    """Compile the module with one set of Inductor settings for training, and another for inference.

    The callback compiles the module in place while the trainer runs, and restores it afterwards. Checkpoints, copies
    and pickles always contain the original module.

    Args:
        train_mode: The settings for training: a mode of ``torch.compile`` (``"default"``, ``"reduce-overhead"``,
            ``"max-autotune"``, ``"max-autotune-no-cudagraphs"``, ``"lite"``), the name of a template, an
            `InductorConfig`, or a mapping of its fields. ``"auto"``, a `Tune` or a mapping of its fields measures
            several settings and selects the fastest. ``"eager"`` and ``None`` do not compile the phase: it runs as
            without the callback, with the modules that you compiled yourself.
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
            outputs, mutated inputs and gradients. ``"warn"`` warns, ``"eager"`` warns and runs the graph eagerly,
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

    def __init__(
        self,
        train_mode: PhaseMode = "default",
        infer_mode: PhaseMode = "default",
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
        given = dict(locals())  # the arguments, for the constructor of the settings and for `__repr__`
        self._given = {name: value for name, value in given.items() if name not in ("self", "__class__")}
        check_type("keep_compiled", keep_compiled, bool, "True or False")
        checked = {name: value for name, value in self._given.items() if name != "keep_compiled"}
        self.arguments = CompileArguments.checked(**checked)
        self.keep_compiled = keep_compiled
        for message in self.arguments.without_effect(keep_compiled=keep_compiled):
            _warn("CC204", message)
        self._calls = TrainerCalls(self.arguments, keep_compiled=keep_compiled)
        self._step_is_timed, self._global_step_before = False, 0

    def __repr__(self) -> str:
        configs = self.arguments.configs.items()
        modes = {f"{phase}_mode": config.describe() if config else EAGER for phase, config in configs}
        values, defaults = {**self._given, **modes}, inspect.signature(InductorCompile).parameters
        shown = [name for name, value in values.items() if name in modes or value != defaults[name].default]
        return f"{type(self).__name__}({', '.join(f'{name}={values[name]!r}' for name in shown)})"

    def __getstate__(self) -> dict[str, Any]:
        # A session belongs to its process. A strategy that spawns processes pickles the callback for each of them.
        calls = TrainerCalls(self.arguments, keep_compiled=self.keep_compiled, last_report=self._calls.last_report)
        state = {name: value for name, value in vars(self).items() if name != "on_after_backward"}
        return {**state, "_calls": calls}

    @property
    def session(self) -> Session | None:
        """The session of the current or last run."""
        return self._calls.session

    @property
    def report(self) -> CompileReport:
        """The measurements so far. On a GPU, reading them waits until the GPU has finished the current steps.

        If only a copy of this callback ran, this is the report of the copy.
        """
        return self._calls.report()

    # ------------------------------------------------------------------------------------------ a Trainer run

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if len(_named_by_script(trainer)) > 1:
            message = (
                "the Trainer has more than one InductorCompile. Name all modules to compile in one callback, as in "
                "InductorCompile(targets=['encoder', 'head']). For other settings of a part, call its compile(mode=...)"
            )
            raise MisconfigurationException(with_code("CC203", message))
        self._calls.begin(trainer, pl_module, fits=stage == "fit")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # No phase begins yet, because a model summary or log_graph may run the model before the first step.
        self._calls.prepare(trainer, pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_call(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # After a GPU error, even reading step times raises. That exception must not hide the run's exception.
        session = self._calls.active
        try:
            self._end_call(trainer, exception)
            if session is not None:
                session.add_note(exception)
        except Exception as error:
            exception.add_note(f"InductorCompile wrote no report: {in_one_line(describe_failure(error))}")

    # ------------------------------------------------------------------------------------------ train phase

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_stage(trainer, pl_module, "train")
        if (session := self._calls.active) is not None and session.gpu.on_gpu:
            # Only if it has an effect, because each hook takes time in each step.
            self.on_after_backward = self._keep_gradients  # type: ignore[method-assign]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (session := self._calls.active) is not None:
            self._step_is_timed = session.step_begins(first=batch_idx == 0)
            if self._step_is_timed:
                self._global_step_before = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        accumulated = ""
        if self._step_is_timed:
            optimizer_steps = trainer.global_step - self._global_step_before
            accumulated = f"{optimizer_steps} of {trainer.accumulate_grad_batches} accumulated"
        if (session := self._calls.active) is not None:
            try:
                session.step_ends("train", batch, accumulated)
            except Exception as error:
                self._calls.give_up("measure a step", error)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # one of its connectors sets it
        if every and (batch_idx + 1) % every == 0:
            self._calls.log_scalars(trainer, details=False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_stage("train")
        self._calls.log_scalars(trainer)

    # ------------------------------------------------------------- infer phase: validation, test and predict alike

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_stage(trainer, pl_module, "infer")

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if (session := self._calls.active) is not None:
            self._step_is_timed = session.step_begins(first=batch_idx == 0)

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
        if (session := self._calls.active) is not None:
            try:
                session.step_ends(f"{trainer.state.stage} {dataloader_idx}", batch)
            except Exception as error:
                self._calls.give_up("measure a step", error)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_stage("infer")
        if not trainer.sanity_checking:
            self._calls.log_scalars(trainer)
        if trainer.state.fn == "fit":
            self._begin_stage(trainer, pl_module, "train")

    on_test_end = on_predict_end = on_validation_end

    # ------------------------------------------------------------------------------------------ parts of the hooks

    def _keep_gradients(self, trainer: Trainer, pl_module: LightningModule) -> None:
        session = self._calls.active
        if session is not None and (trainer.accumulate_grad_batches > 1 or not pl_module.automatic_optimization):
            session.after_backward()

    def _begin_stage(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        if (session := self._calls.prepare(trainer, pl_module)) is not None:
            frozen = trainer.state.fn != "fit"
            if not trainer.sanity_checking:
                session.plan(remaining_steps(trainer))  # first, because another callback may call the module now
            session.stage_begins(Stage(phase=phase, eager=trainer.sanity_checking, weights_frozen=frozen))

    def _end_stage(self, phase: Phase) -> None:
        if (session := self._calls.active) is not None:
            session.stage_ends(phase)

    def _end_call(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        vars(self).pop("on_after_backward", None)
        self._calls.end(trainer, exception)


class CompileFromEnvironment(InductorCompile):
    """The callback of the variable ``COMPILE_CALLBACKS``. Next to another `InductorCompile`, it does nothing.

    Only when a run begins, all callbacks are known: Lightning adds those of entry points and of the module.
    """

    told = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not _named_by_script(trainer):
            super().setup(trainer, pl_module, stage)
        elif not self.told:
            self.told = True
            mode = self._given["train_mode"]
            rank_zero_info(f"COMPILE_CALLBACKS={mode} has no effect, because the script has its own InductorCompile")


def _named_by_script(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # one of its connectors sets it
    return [c for c in callbacks if isinstance(c, InductorCompile) and not isinstance(c, CompileFromEnvironment)]
