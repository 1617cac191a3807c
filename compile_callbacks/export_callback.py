"""`AOTInductorExport`: a Lightning callback that leaves a package of the trained module."""

from __future__ import annotations

import copy
import inspect
import os
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from typing_extensions import override

from compile_callbacks import _torch
from compile_callbacks.callback import InductorCompile
from compile_callbacks.choices import check_choice
from compile_callbacks.compiling.autocast import autocast_of
from compile_callbacks.compiling.errors import CompileWarning
from compile_callbacks.compiling.switch import compiled_call
from compile_callbacks.compiling.verify import Comparison
from compile_callbacks.exporting.example_call import ExampleCall
from compile_callbacks.exporting.export import (
    DiffersFromEagerError,
    as_deployed,
    check_equal,
    check_settings,
    export,
)
from compile_callbacks.exporting.exported import ExportedModule, ExportError
from compile_callbacks.exporting.package_files import check_path, check_writable
from compile_callbacks.exporting.trial import load_after_trial
from compile_callbacks.failures import describe_failure, in_one_line
from compile_callbacks.links import checks_settings, see
from compile_callbacks.loggers import log_export
from compile_callbacks.measuring.timing import median_ms
from compile_callbacks.reporting.export_report import ExportReport
from compile_callbacks.reporting.terminal import say
from compile_callbacks.settings.mode import Mode

Weights = Literal["best", "last"]
"""Which weights are exported."""


class AOTInductorExport(Callback):
    """Leave a ``.pt2`` package of the module when a fit is done, compared with eager and timed.

    Exported is a copy of the module, so that the module, its weights and the random number generators are as without
    this callback. Its inputs are, the first of these that there is: what ``inputs`` makes of the first validation
    batch; ``example_input_array``, where the LightningModule is what is exported; the first validation batch, or where
    nothing is validated the first training batch. Of a batch, ``forward`` gets

    - a tensor as it is;
    - of a tuple or list, the first element;
    - of a mapping, the entries that it names as parameters, by name; all of it as one argument, where it names none.

    The package computes in the trainer's precision, or under the autocast that ``config`` sets. A package that differs
    from eager by more than rounding explains (docs/correctness.md) does not replace an older one. A failure is a
    warning and is in ``report``, never an error of the run. Under several processes rank zero exports while the others
    go on.

    Args:
        path: Where to, ending in ``.pt2``. It is tried out when the fit begins.
        weights: ``"best"``: those of the best checkpoint of the first ``ModelCheckpoint``, or the last ones with a
            warning where there is none; ``"last"``: those of the module when the fit is done.
        target: The dotted name of the submodule that is exported; ``None``: the LightningModule.
        inputs: Takes a batch, and returns what the exported module is called with: a tuple of positional inputs, a
            mapping of inputs by name, or a single input.
        config: The settings that it is compiled with, as `export` takes them.
        dynamic_batch: Whether the batch size may change from call to call, as `export` takes it.
        verify: Whether it is compared with eager.

    Raises:
        ValueError: A value that is none of the choices, or another ending than ``.pt2``.
        TypeError: A value of the wrong type.

    Example::

        >>> callback = AOTInductorExport("model.pt2", weights="last", config="freezing")
        >>> callback.report.path is None
        True
    """

    @checks_settings
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        weights: Weights = "best",
        target: str | None = None,
        inputs: Callable[[Any], Any] | None = None,
        config: Mode = None,
        dynamic_batch: bool = True,
        verify: bool = True,
    ) -> None:
        self.path = check_path(path)
        check_choice("weights", weights, get_args(Weights))
        if target is not None and not isinstance(target, str):
            raise TypeError(f"target={target!r} must be the dotted name of a submodule, or None")
        if target == "":
            raise ValueError("target='' names no submodule; None exports the LightningModule")
        if inputs is not None and not callable(inputs):
            raise TypeError(f"inputs={inputs!r} must be a function of a batch, or None")
        self._settings = check_settings(config, dynamic_batch)
        if not isinstance(verify, bool):
            raise TypeError(f"verify={verify!r} must be True or False")
        self.weights: Weights = weights
        self.target = target
        self.inputs = inputs
        self.config = config
        self.dynamic_batch = dynamic_batch
        self.verify = verify
        self.report = ExportReport()
        self._batches: dict[str, Any] = {}
        self._compiled_ms: tuple[float, ...] = ()

    # ------------------------------------------------------------------------------------------ hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.report, self._batches, self._compiled_ms = ExportReport(), {}, ()
        if trainer.is_global_zero:
            check_writable(self.path)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._find_target(pl_module)  # setup is before configure_model, which may make the submodule

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._keep(trainer, "train", batch)

    @override
    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn == "fit":
            self._keep(trainer, "validate", batch)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Later the trainer moves the module to the CPU, and what is compiled with it.
        if not trainer.is_global_zero:
            return
        try:
            self._compiled_ms = self._time_compiled(trainer, pl_module)
        except Exception as error:
            reason = in_one_line(describe_failure(error))
            message = f"AOTInductorExport: no time of the compiled module: {reason}"
            rank_zero_warn(see(message, "no-time-of-the-compiled-module"), category=CompileWarning)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Other callbacks average weights and write checkpoints up to on_train_end.
        if not trainer.is_global_zero:
            return
        try:
            self.report = self._export(trainer, pl_module)
            say(trainer, f"AOTInductorExport: {self.report.describe()}")
        except Exception as error:
            reason = in_one_line(str(error) if isinstance(error, ExportError) else describe_failure(error), 600)
            compared = error.compared if isinstance(error, DiffersFromEagerError) else None
            self.report = ExportReport(error=reason, **_verdict(compared))
            message = f"AOTInductorExport: {self.path} was not made: {reason}"
            rank_zero_warn(see(message, "no-package"), category=CompileWarning)
        self._batches = {}
        log_export(trainer.loggers, self.report, trainer.global_step)

    # ------------------------------------------------------------------------------------------ what hooks call

    def _export(self, trainer: Trainer, pl_module: LightningModule) -> ExportReport:
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)):
            raise ExportError(f"{type(trainer.strategy).__name__} shards the weights, and export takes whole ones")
        started = time.perf_counter()
        device = trainer.strategy.root_device
        call = self._example(pl_module).on(device)
        whole = copy.deepcopy(pl_module)  # compiled calls are left behind
        checkpoint = self._load_best(trainer, whole)
        module = self._find_target(whole.to(device))
        beside = self.path.with_name(f".{self.path.stem}.{os.getpid()}.new.pt2")
        try:
            with as_deployed(module), trainer.precision_plugin.forward_context():
                export(
                    module,
                    call.args,
                    beside,
                    example_kwargs=call.kwargs,
                    config=self.config,
                    dynamic_batch=self.dynamic_batch,
                    verify=False,  # it is compared below, for the figures
                )
                package = load_after_trial(beside, call.args, call.kwargs, device)
                with autocast_of(self._settings, device.type):
                    compared = self._compare(module, package, call)
                    seconds = time.perf_counter() - started
                    eager_ms = call.times_ms(module, device)
                package_ms = call.times_ms(package, device)
            size_mb = beside.stat().st_size / 2**20
            beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)
        return ExportReport(
            path=str(self.path),
            weights="last" if checkpoint is None else "best",
            checkpoint=checkpoint,
            size_mb=size_mb,
            export_seconds=seconds,
            eager_ms=median_ms(eager_ms),
            compiled_ms=median_ms(self._compiled_ms),
            package_ms=median_ms(package_ms),
            samples=min(len(times) for times in (eager_ms, self._compiled_ms, package_ms) if times),
            **_verdict(compared),
        )

    def _compare(self, module: nn.Module, package: ExportedModule, call: ExampleCall) -> Comparison | None:
        if not self.verify:
            return None
        compared = check_equal(module, module, package, call.args, call.kwargs)
        if compared.left_out:
            message = f"{self.path} is not compared with eager: {compared.left_out}"
            rank_zero_warn(see(message, "a-package-is-not-compared"), category=CompileWarning)
        return compared

    def _load_best(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Give a module the best checkpoint's weights; returns its path, or ``None`` where the last ones stay."""
        if self.weights == "last":
            return None
        path = str(getattr(trainer.checkpoint_callback, "best_model_path", ""))
        if not path:
            message = (
                f"{self.path} gets the last weights: there is no best checkpoint "
                "(weights='best' takes that of a ModelCheckpoint; weights='last' asks for the last ones)"
            )
            rank_zero_warn(see(message, "last-weights-in-a-package"), category=CompileWarning)
            return None
        load = trainer.strategy.checkpoint_io.load_checkpoint
        # The run itself wrote the file: hyperparameters of any class may be in it.
        trusting = {"weights_only": False} if "weights_only" in inspect.signature(load).parameters else {}
        module.load_state_dict(load(path, **trusting)["state_dict"], strict=module.strict_loading)
        return path

    def _time_compiled(self, trainer: Trainer, pl_module: LightningModule) -> tuple[float, ...]:
        """Times of the module as it is compiled in place; none where that would have to compile first."""
        compiler = next((c for c in _callbacks(trainer) if isinstance(c, InductorCompile)), None)
        call = compiled_call(self._find_target(pl_module), "infer")
        validated = "validate" in self._batches and (self.inputs is not None or self._example_array(pl_module) is None)
        if compiler is None or call is None or not validated or not compiler.report.infer.graphs:
            return ()
        device = trainer.strategy.root_device
        inputs = self._example(pl_module).on(device)
        with as_deployed(pl_module), trainer.precision_plugin.forward_context():
            return inputs.times_ms(call, device)

    @checks_settings
    def _find_target(self, pl_module: LightningModule) -> nn.Module:
        if self.target is None:
            return pl_module
        try:
            return pl_module.get_submodule(self.target)
        except AttributeError as error:
            raise ValueError(f"target={self.target!r} is no submodule: {error}") from None

    def _keep(self, trainer: Trainer, stage: str, batch: Any) -> None:
        """Keep the first batch of a stage, before a step changes it in place."""
        if stage not in self._batches and trainer.is_global_zero:
            self._batches[stage] = _torch.tree_map_tensors(lambda t: t.detach().to("cpu", copy=True), batch)

    def _example_array(self, pl_module: LightningModule) -> Any:
        return pl_module.example_input_array if self.target is None else None

    def _example(self, pl_module: LightningModule) -> ExampleCall:
        """What the exported module is called with."""
        example = self._example_array(pl_module)
        if example is not None and self.inputs is None:
            return ExampleCall.of(example)
        if not self._batches:
            raise ExportError("no batch was seen, and example_input_array is not set")
        batch = self._batches.get("validate", self._batches.get("train"))
        if self.inputs is not None:
            return ExampleCall.of(self.inputs(batch))
        return ExampleCall.of_batch(batch, self._find_target(pl_module))


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # one of its connectors sets it
    return callbacks


def _verdict(compared: Comparison | None) -> dict[str, Any]:
    if compared is None:
        return {}
    verdict = "left out" if compared.left_out else "differs" if compared.problem else "equal"
    return {"verified": verdict, "max_abs_error": compared.max_abs_error}
