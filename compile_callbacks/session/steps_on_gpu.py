"""`StepsOnGpu`: prepares the steps of a session for CUDA graphs, and frees unused memory."""

from __future__ import annotations

from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import Variant


class StepsOnGpu:
    """Prepares the steps of a session for CUDA graphs. The session calls `step_begins` only `on_gpu`.

    Backward passes of compiled training steps run in the thread that starts them, and not in autograd's thread for each
    GPU. In CPU-bound steps on an H200, the switches to a core without the step's data took a fifth of the time.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.on_gpu, self._frees_at_end, self._uses_one_thread, self._module = False, False, True, module
        self._copies: dict[int, int] = {}  # the addresses of copied gradients, by the id of the parameter
        self._one_thread: torch.autograd.set_multithreading_enabled | None = None
        self._end_marks: Any = None  # a function, after the first mark of a run

    def begin(self, device: torch.device) -> None:
        """Begin a Trainer run on a device."""
        self.on_gpu = device.type == "cuda"
        self._uses_one_thread = len({weight.device for weight in self._module.parameters()}) <= 1

    def step_begins(self, phase: Phase, variant: Variant) -> None:
        """Begin a step."""
        if variant.config is not None and variant.config.uses_cudagraphs:
            # These marks belong to the process, so they also end the steps of the user's own CUDA graphs.
            self._end_marks = self._end_marks or _torch.inductor.begin_marks()
            if self._end_marks is not None:
                torch.compiler.cudagraph_mark_step_begin()
        # Another callback of the trainer may have changed the setting already.
        is_separate = torch.autograd.is_multithreading_enabled()
        if phase == "train" and variant.config is not None and self._uses_one_thread and is_separate:
            self._one_thread = torch.autograd.set_multithreading_enabled(False)  # the constructor changes it

    def step_ends(self) -> None:
        """End a step, also after an exception within the step."""
        if self._one_thread is not None:
            self._one_thread.__exit__(None, None, None)
            self._one_thread = None
        if self._frees_at_end:
            self.free_cached()

    def free_cached(self, *, again: bool = False) -> None:
        """Free cached blocks, which seldom fit other steps, and ``again`` when the step has freed earlier gradients."""
        if self.on_gpu:
            torch.cuda.empty_cache()
            self._frees_at_end = again

    def keep_gradients(self) -> None:
        """Copy gradients out of the memory of CUDA graphs, which the next step would overwrite.

        Later backward passes of an accumulation add to the copy in place, so each optimizer step needs one copy.
        """
        for parameter in self._module.parameters():
            gradient = parameter.grad
            if gradient is not None and gradient.is_cuda and self._copies.get(id(parameter)) != gradient.data_ptr():
                parameter.grad = gradient.clone()
                self._copies[id(parameter)] = parameter.grad.data_ptr()

    def end(self) -> None:
        """End the run, also after an exception within a step."""
        self._frees_at_end = False  # freeing memory raises after a GPU error
        self.step_ends()
        self._end_marks = self._end_marks and self._end_marks()
        # After an exception, a later graph may have overwritten gradients. Moving them would hide the exception.
        for parameter in self._module.parameters() if self.on_gpu else ():
            try:
                _ = parameter.grad is not None and parameter.grad.data_ptr()
            except RuntimeError as error:
                if "CUDAGraphs" in str(error):  # sparse gradients have no address either
                    parameter.grad = None
