"""`CompiledInference`: moves, compiles, warms up, calls and restores the module of an `InductorBackend`."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.graphs.failures import TargetSettings
from compile_callbacks.graphs.snapshot import Snapshot
from compile_callbacks.inference.saved_state import Sample, on_device
from compile_callbacks.report.report import CompileReport
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.session.grad_mode import GradModeSession
from compile_callbacks.targets.target import Target

_is_training = operator.attrgetter("training")


class Placement:
    """Save the device of a module and the training flags of its submodules, to restore them later.

    Raises:
        ValueError: If the module has weights on several devices, or on the device ``"meta"``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.parts = list(module.modules())
        """The module and its submodules."""
        self._training = list(map(_is_training, self.parts))
        found = sorted({str(tensor.device) for tensor in (*module.parameters(), *module.buffers())})
        if len(found) > 1:
            text = f"module has weights on several devices, {', '.join(found)}; move it to one of them first"
            raise ValueError(with_code("CC608", text))
        if found == ["meta"]:
            text = "module has weights on the device 'meta', without values; load them first"
            raise ValueError(with_code("CC608", text))
        self.device = torch.device(found[0]) if found else None
        """The device, or ``None`` if the module has no weights."""

    def restore(self) -> None:
        """Move the module back, and reset the training flags."""
        if self.device is not None:
            self._module.to(self.device)
        for part, training in zip(self.parts, self._training, strict=True):
            part.training = training


class CompiledInference:
    """Compile a module with one config in evaluation mode on a device, until `end` or until this object is deleted.

    The constructor runs each sample once. If it cannot move, compile or call the module, it restores the module.
    """

    def __init__(
        self,
        module: nn.Module,
        samples: Sequence[Sample],
        device: torch.device,
        config: InductorConfig,
        settings: TargetSettings,
    ) -> None:
        self._module = module
        self._device = device
        self._placement = Placement(module)
        arguments = CompileArguments(
            configs={"train": None, "infer": config}, target_settings=settings, mode_argument="mode"
        )
        self._session = GradModeSession(module, [Target("forward", module)], arguments)
        try:
            module.to(device).eval()
            self._session.begin_by_grad_mode(weights_frozen=True, found_from_module=False)
            self._warm_up(samples)
        except BaseException:
            _end(self._session)
            self._placement.restore()
            raise
        self._end_session = weakref.finalize(self, _end, self._session)
        self._end_session.atexit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled module, with tensors moved to its device."""
        if True in map(_is_training, self._placement.parts):  # faster than any(...), because each call checks this
            self._module.eval()
        # In inference mode, Inductor would compile another graph, and code outside could not use the outputs.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self(*args, **kwargs)
        with_grad = torch.is_grad_enabled()
        _torch.autograd.set_grad_enabled(False)
        try:
            converted = [self._convert(value) for value in args]
            if kwargs:
                kwargs = {name: self._convert(value) for name, value in kwargs.items()}
            return self._module(*converted, **kwargs)
        finally:
            _torch.autograd.set_grad_enabled(with_grad)

    def report(self) -> CompileReport:
        """Return the report so far, and warn once about each target that ran without being compiled."""
        self._session.check("infer")
        return self._session.report()

    def end(self) -> None:
        """Restore the original module, and free the memory of compiled code."""
        self._end_session()
        self._placement.restore()

    def _warm_up(self, samples: Sequence[Sample]) -> None:
        before = Snapshot(self._module)
        try:
            for sample in samples:
                args, kwargs = on_device(sample, self._device)
                self._session.allow_shapes(args, kwargs)
                self(*args, **kwargs)
        finally:
            before.restore()
        self._session.check("infer")

    def _convert(self, value: Any) -> Any:
        """Return a value with tensors that the compiled graphs accept. They share memory with the value if possible."""
        if not isinstance(value, torch.Tensor):
            return tree_map_only(torch.Tensor, self._convert, value)
        if value.device != self._device:
            value = value.to(self._device)
        if value.is_inference():
            value = _as_normal_tensor(value)
        return value.detach() if value.requires_grad else value


def free_memory() -> None:
    """Free unreferenced memory, so that other processes can use it on the GPU, too."""
    gc.collect()  # because compiled code has reference cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _as_normal_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a normal tensor that shares the memory of an inference tensor, if the tensor has storage and strides."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor
    memory = tensor.untyped_storage()
    return tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _end(session: GradModeSession) -> None:
    session.end()
    session.free_compiled()
