"""A module that is compiled in place for inference: moved, warmed up on samples, called, and put back."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.backend.samples import Sample, on_device
from compile_callbacks.compiling.region_settings import RegionSettings
from compile_callbacks.compiling.snapshot import Snapshot
from compile_callbacks.compiling.targets import Target
from compile_callbacks.devices.placement import Placement
from compile_callbacks.reporting.report import CompileReport
from compile_callbacks.session.session import CompileSession
from compile_callbacks.settings.config import InductorConfig


class CompiledInference:
    """A module in evaluation mode on a device, compiled with one config; where making it fails, as it was before.

    The module is compiled for as long as this object lives, or until `end`.

    Args:
        module: The module.
        samples: What it is compiled on; each runs through it once.
        device: Where it runs.
        config: The settings.
        settings: What to do on failures and new shapes.

    Raises:
        ValueError: The module's weights are on several devices.
        Exception: Whatever moving and calling the module raises.
    """

    def __init__(
        self,
        module: nn.Module,
        samples: Sequence[Sample],
        device: torch.device,
        config: InductorConfig,
        settings: RegionSettings,
    ) -> None:
        self._module = module
        self._device = device
        self._placement = Placement(module)
        self._session = CompileSession(
            module, [Target("forward", module)], {"train": None, "infer": config}, settings=settings
        )
        try:
            module.to(device).eval()
            self._session.begin_by_grad_mode(weights_stand_still=True, found_from_module=False)
            self._warm_up(samples)
        except BaseException:
            _end(self._session)
            self._placement.restore()
            raise
        self._end_session = weakref.finalize(self, _end, self._session)
        self._end_session.atexit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, compiled, with tensors moved to its device."""
        if self._placement.training:
            self._module.eval()
        with _no_autograd():
            return self._module(
                *[self._as_argument(value) for value in args],
                **{name: self._as_argument(value) for name, value in kwargs.items()},
            )

    def report(self) -> CompileReport:
        """What compiling cost so far; what ran and was not compiled is warned about here, once."""
        self._session.leave("infer")
        return self._session.report()

    def end(self) -> None:
        """Put the module back where it was, uncompiled, and give back the memory that compiled code takes."""
        self._end_session()
        self._placement.restore()

    def _warm_up(self, samples: Sequence[Sample]) -> None:
        before = Snapshot(self._module)
        try:
            for sample in samples:
                args, kwargs = on_device(sample, self._device)
                self._session.admit_shapes(args, kwargs)
                with _no_autograd():
                    self._module(*args, **kwargs)
        finally:
            before.restore()
        self._session.leave("infer")

    def _as_argument(self, value: Any) -> Any:
        """An argument with its tensors as `_as_input` gives them; a tensor by itself without a walk through a tree."""
        if isinstance(value, torch.Tensor):
            return self._as_input(value)
        return _torch.tree_map_tensors(self._as_input, value)

    def _as_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the kind that the samples are, which was compiled for, with the same memory where it can be."""
        if tensor.device != self._device:
            tensor = tensor.to(self._device)
        if tensor.is_inference():
            tensor = _outside_inference_mode(tensor)
        return tensor.detach() if tensor.requires_grad else tensor


def free_memory() -> None:
    """Give back what nothing holds any more, to Python and to the GPU's other users."""
    gc.collect()  # compiled code refers to itself
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _no_autograd() -> contextlib.AbstractContextManager[None]:
    # Inference mode, where it is the caller's, would be compiled for apart; its tensors cannot be used elsewhere.
    return _no_inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextlib.contextmanager
def _no_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def _outside_inference_mode(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor in the memory of one that was made in inference mode, where that memory tells all of it."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor
    memory = tensor.untyped_storage()
    return tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _end(session: CompileSession) -> None:
    session.end()
    session.free_compiled()
