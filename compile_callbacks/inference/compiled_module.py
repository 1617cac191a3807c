"""`CompiledInference`: an `InductorBackend`'s module, compiled in place: moved, warmed up, called, and restored."""

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
from compile_callbacks.inference.saved_state import Sample, on_device
from compile_callbacks.report.report import CompileReport
from compile_callbacks.runtime.arguments import CompileArguments
from compile_callbacks.runtime.compile_phases import GradModeSession
from compile_callbacks.runtime.snapshot import Snapshot
from compile_callbacks.runtime.target import Target
from compile_callbacks.runtime.target_settings import TargetSettings

_is_training = operator.attrgetter("training")


class Placement:
    """The device of a module and the training flags of its submodules, saved to be restored.

    Raises:
        ValueError: The module has weights on several devices, or on ``"meta"``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = list(module.modules())
        self._training = list(map(_is_training, self._parts))
        found = sorted({str(tensor.device) for tensor in (*module.parameters(), *module.buffers())})
        if len(found) > 1:
            text = f"module has weights on several devices, {', '.join(found)}; move it to one of them first"
            raise ValueError(with_code("CC608", text))
        if found == ["meta"]:
            text = "module has weights on the device 'meta', without values; load them first"
            raise ValueError(with_code("CC608", text))
        self.device = torch.device(found[0]) if found else None
        """The device, or ``None`` if the module has no weights."""

    @property
    def training(self) -> bool:
        """Whether a submodule is in training mode now."""
        return True in map(_is_training, self._parts)  # checked in each call: faster than any(...)

    def restore(self) -> None:
        """Move the module back, and reset the training flags."""
        if self.device is not None:
            self._module.to(self.device)
        for part, training in zip(self._parts, self._training, strict=True):
            part.training = training


class CompiledInference:
    """A module in evaluation mode on a device, compiled with one config while this object lives, or until `end`.

    Each sample runs once. If moving, compiling or calling the module fails, the module is restored.
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
        arguments = CompileArguments(configs={"train": None, "infer": config}, target_settings=settings)
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
        if self._placement.training:
            self._module.eval()
        # In inference mode, Inductor would compile another graph, and the outputs could not be used elsewhere.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self._call(*args, **kwargs)
        return _torch.autograd.call_without_grad(self._call, *args, **kwargs)

    def report(self) -> CompileReport:
        """The report so far. A target that ran and was not compiled is warned about once."""
        self._session.check("infer")
        return self._session.report()

    def end(self) -> None:
        """Restore the module, uncompiled, and free the memory of compiled code."""
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

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        converted = [self._convert(value) for value in args]
        if kwargs:
            kwargs = {name: self._convert(value) for name, value in kwargs.items()}
        return self._module(*converted, **kwargs)

    def _convert(self, value: Any) -> Any:
        # A single tensor avoids the overhead of a tree.
        if isinstance(value, torch.Tensor):
            return self._convert_tensor(value)
        return tree_map_only(torch.Tensor, self._convert_tensor, value)

    def _convert_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that the samples' graphs accept, with the same memory if possible."""
        if tensor.device != self._device:
            tensor = tensor.to(self._device)
        if tensor.is_inference():
            tensor = _as_normal_tensor(tensor)
        return tensor.detach() if tensor.requires_grad else tensor


def free_memory() -> None:
    """Free unreferenced memory, also for other processes on the GPU."""
    gc.collect()  # compiled code has reference cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _as_normal_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a normal tensor with the memory of an inference tensor, if memory and strides describe the tensor."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor
    memory = tensor.untyped_storage()
    return tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _end(session: GradModeSession) -> None:
    session.end()
    session.free_compiled()
