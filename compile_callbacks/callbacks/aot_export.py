"""`AOTInductorExport`: a Lightning callback that exports the trained module."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from compile_callbacks._utils.errors import CompileWarning, warn_user, with_code
from compile_callbacks._utils.files import atomic_write
from compile_callbacks._utils.messages import check_choice, check_type, describe_failure, in_one_line
from compile_callbacks.config.inductor_config import Mode, as_compiling_config
from compile_callbacks.exporting.loaded_package import ExportError
from compile_callbacks.exporting.package import ExportedCall, VerifyPackage, check_path, check_writable, evaluating
from compile_callbacks.profiling.clock import call_times_ms
from compile_callbacks.profiling.comparison import median_ms
from compile_callbacks.report.loggers import log, print_line
from compile_callbacks.report.report import ExportReport

Weights = Literal["best", "last"]
"""Which weights are exported."""


class AOTInductorExport(Callback):
    """Export the module to a ``.pt2`` package at the end of a fit, compare it with eager, and time it.

    The callback exports a copy of the module. It changes neither the module and its weights nor the random number
    generators. The callback takes the example inputs from the first available source:

    1. the result of ``inputs`` for the first validation batch;
    2. ``example_input_array``, if the callback exports the LightningModule;
    3. the first validation batch;
    4. the first training batch.

    If the batch is a tensor, ``forward`` gets the tensor. If the batch is a tuple or a list, ``forward`` gets the first
    element. If the batch is a mapping, ``forward`` gets the entries whose keys are its parameters as keyword arguments,
    or the whole mapping if no key is a parameter.

    The package computes in the trainer's precision. If the export fails, the callback warns and stores the error in
    ``report``, and the run continues. With several processes, rank zero exports while the other ranks continue.

    Args:
        path: The path of the package, which ends in ``.pt2``. The callback checks at the start of the fit that it can
            write the file.
        weights: ``"best"`` exports the best checkpoint of the first ``ModelCheckpoint``. If no best checkpoint exists,
            the callback warns and exports the last weights. ``"last"`` exports the weights at the end of the fit. In a
            resumed run, whose checkpoint may name any file, the callback loads the best checkpoint with
            ``torch.load(weights_only=True)``, because other ways to load a file can run code. If torch refuses the
            file, the callback warns and exports the last weights.
        target: The dotted name of the submodule to export. If ``None``, the callback exports the LightningModule.
        inputs: A function that takes a batch and returns the inputs of the exported module: a tuple of positional
            inputs, a mapping of inputs by name, or a single input.
        mode: The settings of the package. See `export`.
        verify: The reaction if the package differs from eager by more than rounding explains: ``"warn"`` warns, and
            ``"raise"`` raises an `ExportError` at the end of the fit. Such a package does not replace an older
            package. ``"off"`` skips the comparison.
        dynamic_batch: Whether the batch size may change from call to call. See `export`.

    Raises:
        ValueError: If an argument is not one of the choices, or the path does not end in ``.pt2``.
        TypeError: If a value has the wrong type.

    Example::

        >>> callback = AOTInductorExport("model.pt2", weights="last", mode="freezing")
        >>> callback.report.path is None
        True
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        weights: Weights = "best",
        target: str | None = None,
        inputs: Callable[[Any], Any] | None = None,
        mode: Mode = "default",
        verify: VerifyPackage = "warn",
        dynamic_batch: bool = True,
    ) -> None:
        self.path = check_path(path)
        check_choice("weights", weights, get_args(Weights))
        check_type("target", target, (str, type(None)), "the dotted name of a submodule, or None")
        if target == "":
            raise ValueError(with_code("CC201", "target='' names no submodule; None exports the LightningModule"))
        check_type("inputs", inputs, (Callable, type(None)), "a function of a batch, or None")  # type: ignore[arg-type]
        as_compiling_config(mode)
        check_choice("verify", verify, get_args(VerifyPackage))
        check_type("dynamic_batch", dynamic_batch, bool, "True or False")
        self.weights: Weights = weights
        self.target = target
        self.inputs = inputs
        self.mode = mode
        self.verify: VerifyPackage = verify
        self.dynamic_batch = dynamic_batch
        self.report = ExportReport()
        self._batches: dict[str, Any] = {}
        self._resumed = False  # whether a checkpoint may have named files that this process did not write

    # ------------------------------------------------------------------------------------------ hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.report, self._batches = ExportReport(), {}
        if trainer.is_global_zero:
            check_writable(self.path)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._find_target(pl_module)  # not in setup, because configure_model runs later and may create the submodule

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._resumed = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._store_batch(trainer, "train", batch)

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
            self._store_batch(trainer, "validate", batch)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in on_train_end, because other callbacks still average weights and write checkpoints there.
        if not trainer.is_global_zero:
            return
        try:
            self._export(trainer, pl_module)
            print_line(trainer, f"AOTInductorExport: {self.report.describe()}")
        except Exception as error:
            reason = in_one_line(str(error) if isinstance(error, ExportError) else describe_failure(error), 600)
            self.report = dataclasses.replace(self.report, error=reason)
            if isinstance(error, ExportError) and self.report.verified == "differs" and self.verify == "raise":
                raise
            message = f"AOTInductorExport: {self.path} was not written: {reason}"
            message = message if isinstance(error, ExportError) else with_code("CC601", message)
            rank_zero_warn(message, category=CompileWarning)
        self._batches = {}
        log(trainer.loggers, trainer.global_step, self.report.scalars(), {"export_report": str(self.report)})

    # ------------------------------------------------------------------------------------------ what hooks call

    def _export(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)):
            text = f"{type(trainer.strategy).__name__} shards the weights, and export needs unsharded weights"
            raise ExportError(with_code("CC601", text))
        started = time.perf_counter()
        device = trainer.strategy.root_device
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), self._example_call(pl_module))
        copied = copy.deepcopy(pl_module)  # a copy is not compiled
        checkpoint = self._load_best(trainer, copied)
        module = self._find_target(copied.to(device))
        with atomic_write(self.path) as temporary, evaluating(module), trainer.precision_plugin.forward_context():
            call = ExportedCall(module, args, kwargs, dynamic_batch=self.dynamic_batch)
            call.write(temporary, as_compiling_config(self.mode))
            package = call.load(temporary)
            if self.verify != "off":
                compared = call.compare(package)
                self.report = ExportReport(verified=compared.verdict, max_abs_error=compared.max_abs_error)
                if compared.verdict == "differs":
                    raise ExportError(with_code("CC602", f"the package differs from eager: {compared.reason}"))
            seconds = time.perf_counter() - started
            eager_ms = call_times_ms(lambda: module(*args, **kwargs), device=device)
            package_ms = call_times_ms(lambda: package(*args, **kwargs), device=device)
            size_mib = temporary.stat().st_size / 2**20
        if self.report.verified == "not compared":
            warn_user("CC602", f"package {self.path} was not compared with eager: {compared.reason}")
        self.report = dataclasses.replace(
            self.report,
            path=str(self.path),
            weights="last" if checkpoint is None else "best",
            checkpoint=checkpoint,
            size_mib=size_mib,
            export_seconds=seconds,
            eager_ms=median_ms(eager_ms),
            package_ms=median_ms(package_ms),
            samples=min(len(eager_ms), len(package_ms)),
        )

    def _load_best(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Load the best checkpoint and return its path, or return ``None`` if the module keeps the last weights."""
        if self.weights == "last":
            return None
        path = str(getattr(trainer.checkpoint_callback, "best_model_path", ""))
        checkpoint, reason = None, "no best checkpoint exists, because weights='best' needs a ModelCheckpoint"
        if path and not self._resumed:
            load = trainer.strategy.checkpoint_io.load_checkpoint
            # This process wrote the file, so loading it is safe. It may contain hyperparameters of any class.
            trusting = {"weights_only": False} if "weights_only" in inspect.signature(load).parameters else {}
            checkpoint = load(path, **trusting)
        elif path:
            try:
                with get_filesystem(path).open(path, "rb") as file:
                    checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:
                why = describe_failure(error).rpartition("WeightsUnpickler error: ")[2]  # after torch's advice
                reason = f"a resumed run loads only weights, and {path} cannot be loaded so: {in_one_line(why)}"
        if checkpoint is None:
            warn_user("CC610", f"{self.path} gets the last weights: {reason}. weights='last' does not warn")
            return None
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        return path

    def _find_target(self, pl_module: LightningModule) -> nn.Module:
        if self.target is None:
            return pl_module
        try:
            return pl_module.get_submodule(self.target)
        except AttributeError as error:
            raise ValueError(with_code("CC201", f"target={self.target!r} is not a submodule: {error}")) from None

    def _store_batch(self, trainer: Trainer, stage: str, batch: Any) -> None:
        """Keep the first batch of a stage, before a step changes it in place."""
        if stage not in self._batches and trainer.is_global_zero:
            self._batches[stage] = tree_map_only(torch.Tensor, lambda t: t.detach().to("cpu", copy=True), batch)

    def _example_call(self, pl_module: LightningModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
        example = pl_module.example_input_array if self.target is None else None
        if example is not None and self.inputs is None:
            return _args_and_kwargs(example)
        if not self._batches:
            text = "there is no example input: the fit ran no batch, and example_input_array is not set"
            raise ExportError(with_code("CC601", text))
        batch = self._batches.get("validate", self._batches.get("train"))
        if self.inputs is not None:
            return _args_and_kwargs(self.inputs(batch))
        if not isinstance(batch, Mapping):
            return (batch[0] if isinstance(batch, (tuple, list)) and batch else batch,), {}
        parameters = inspect.signature(self._find_target(pl_module).forward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        named = {name: value for name, value in batch.items() if takes_all or name in parameters}
        return _args_and_kwargs(named or (batch,))


def _args_and_kwargs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert a tuple of positional inputs, a mapping of inputs by name, or a single input."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return inputs if isinstance(inputs, tuple) else (inputs,), {}
