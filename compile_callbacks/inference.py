"""A module that is compiled in place for inference: moved, warmed up on samples, called, and put back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.config import InductorConfig
from compile_callbacks.placement import Placement
from compile_callbacks.region import RegionSettings
from compile_callbacks.report import CompileReport
from compile_callbacks.samples import Sample, on_device
from compile_callbacks.session import CompileSession
from compile_callbacks.snapshot import Snapshot
from compile_callbacks.targets import Target


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
        args, kwargs = _torch.tree_map_tensors(self._as_input, (args, kwargs))
        return self._call(args, kwargs)

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
                self._call(args, kwargs)
        finally:
            before.restore()
        self._session.leave("infer")

    def _call(self, args: Any, kwargs: Any) -> Any:
        # Inference mode, where it is the caller's, would be compiled for apart; its tensors cannot be used elsewhere.
        with torch.inference_mode(False), torch.no_grad():
            return self._module(*args, **kwargs)

    def _as_input(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != self._device:
            tensor = tensor.to(self._device)
        return tensor.detach() if tensor.requires_grad else tensor  # as samples are, for whose kind it is compiled


def free_memory() -> None:
    """Give back what nothing holds any more, to Python and to the GPU's other users."""
    gc.collect()  # compiled code refers to itself
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _end(session: CompileSession) -> None:
    session.end()
    session.free_compiled()
