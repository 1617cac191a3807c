"""Creates the module to measure, and runs a copy of it in one mode."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from compile_callbacks._utils.import_ref import resolve
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.profiling.compile_events import CompileRecorder
from compile_callbacks.runtime.dispatcher import PhaseSwitch
from compile_callbacks.runtime.target import Target

_WARMUP_STEPS = 4  # a CUDA graph is warmed up in the first step, recorded in the second, then replayed


@dataclass(frozen=True)
class Subject:
    """A module on its device, and its inputs. Each measured mode gets a copy of the module."""

    name: str
    device: torch.device
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def shapes(self) -> str:
        """The shapes of all input tensors, such as ``"4x3x224x224"``."""
        tensors = [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]
        return ", ".join("x".join(map(str, x.shape)) or "scalar" for x in tensors) or "no tensor"


def load(name: str, device: torch.device, input_shape: Sequence[int] | None = None) -> Subject:
    """Call a factory, and move its module and inputs to a device.

    Args:
        name: ``package:factory``, a function without arguments that returns a module, or a module and its inputs.
        device: The device.
        input_shape: The shape of a random input, for a factory that returns only a module.

    Raises:
        ValueError: There is no such factory, it fails, or not exactly one of factory and ``input_shape`` gives inputs.
    """
    torch.manual_seed(0)
    factory = _find(name)
    try:
        made = factory()
    except Exception as error:
        raise ValueError(f"MODULE={name!r}: the factory fails: {in_one_line(describe_failure(error))}") from error
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        expected = "a torch.nn.Module, or a tuple of a module and its inputs"
        raise ValueError(f"MODULE={name!r}: the factory must return {expected}, not {type(made).__name__}")
    if inputs is None and input_shape is None:
        raise ValueError(f"MODULE={name!r} returns no inputs: give the shape of one, such as --input 4x3x224x224")
    if inputs is not None and input_shape is not None:
        raise ValueError(f"--input has no effect: {name!r} returns its own inputs")
    inputs = torch.randn(*input_shape) if input_shape is not None else inputs
    inputs = tree_map_only(torch.Tensor, lambda x: x.to(device), inputs)
    if isinstance(inputs, Mapping):
        return Subject(name, device, module.to(device), kwargs=inputs)
    return Subject(name, device, module.to(device), tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))


def _find(name: str) -> Any:
    package, _, attribute = name.partition(":")
    if not (package and attribute):
        raise ValueError(f"MODULE={name!r} must have the form package:factory, such as torchvision.models:resnet18")
    if str(Path.cwd()) not in sys.path:
        # The installed command does not search the current directory. It comes last, so that a file in it cannot
        # replace an installed package.
        sys.path.append(str(Path.cwd()))
    try:
        factory = resolve(name)
    except Exception as error:  # a torchvision built for another torch raises RuntimeError
        reason = (
            str(error) if isinstance(error, ValueError) else f"{name!r} cannot be imported: {describe_failure(error)}"
        )
        raise ValueError(f"MODULE={in_one_line(reason)}") from error
    if not callable(factory):
        raise ValueError(f"MODULE={name!r} is not a function, but a {type(factory).__name__}")
    return factory


class Candidate:
    """A copy of a module that runs in one mode.

    An ``infer`` step is a forward pass without gradients. A ``train`` step is forward, loss, backward and SGD.

    Args:
        name: The name of the mode.
        config: The settings; ``None`` for eager.
        subject: The module and its inputs.
        phase: The phase to run.
        dtype: The dtype of autocast; ``None`` for no autocast.
    """

    def __init__(
        self, name: str, config: InductorConfig | None, subject: Subject, phase: Phase, dtype: torch.dtype | None = None
    ) -> None:
        self.name, self.config, self.phase, self.dtype = name, config, phase, dtype
        self.module, self._subject = subject.module, subject
        self.recorder = CompileRecorder()
        self.switch: PhaseSwitch | None = None
        self.failure: str | None = None
        self.first_step_seconds = 0.0
        self.peak_memory_mib: float | None = None
        self.draws_random_numbers = False
        self.results: list[list[torch.Tensor]] = []
        """Outputs of the first step and, in training, the gradients of all weights."""
        self._on_gpu = subject.device.type == "cuda"

    def attempt(self, run: Callable[..., float | None], *args: Any) -> float | None:
        """Call a function, and store an exception as the failure of this candidate. No call after a failure."""
        try:
            return run(*args) if self.failure is None else None
        except Exception as error:
            self.failure = in_one_line(describe_failure(error))
            return None

    def prepare(self) -> None:
        """Copy the module, compile the copy, and run the warm-up steps."""
        before_bytes = torch.cuda.memory_allocated() if self._on_gpu else 0
        self.module = copy.deepcopy(self._subject.module).train(self.phase == "train")
        if self.phase == "train":  # the learning rate is small, so that the loss stays finite on random labels
            self._optimizer = torch.optim.SGD([p for p in self.module.parameters() if p.requires_grad], lr=1e-4)
        if self.config is not None:
            targets = [Target(self.name, self.module)]
            self.switch = PhaseSwitch(targets, {self.phase: self.config}, recorder=self.recorder)
            self.recorder.listen()
            self.switch.install()
            self.switch.select(self.phase, frozen=self.config.freezes)  # the weights of infer steps are constant
        torch.manual_seed(0)
        generators = self._generator_states()
        self.synchronize()
        started = time.perf_counter()
        self.step(keep_results=True)
        self.synchronize()
        self.first_step_seconds = time.perf_counter() - started
        self.draws_random_numbers = not all(map(torch.equal, generators, self._generator_states()))
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(_WARMUP_STEPS - 1):
            self.step()
        self.synchronize()
        if self._on_gpu:  # of a CUDA graph, the peak of its recording: a replay allocates nothing
            self.peak_memory_mib = (torch.cuda.max_memory_allocated() - before_bytes) / 2**20
        self.recorder.collect()

    def time(self, steps: int) -> float | None:
        """Run a block of steps; returns the milliseconds of a step, or ``None`` if something compiled."""
        self.step()  # not timed, because other candidates ran since the last block
        self.synchronize()
        compiles, started = self.recorder.compiles_seen, time.perf_counter()
        for _ in range(steps):
            self.step()
        self.synchronize()
        seconds = time.perf_counter() - started
        return seconds / steps * 1000 if self.recorder.compiles_seen == compiles else None

    def step(self, *, keep_results: bool = False) -> Any:
        """Run one step, and return the outputs of the module."""
        if self._on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(self.phase == "train"):
            # One context for each call, as in a Trainer: within a context, autocast caches its casts of weights.
            with torch.autocast(self._subject.device.type, self.dtype, enabled=self.dtype is not None):
                outputs = self.module(*self._subject.args, **self._subject.kwargs)
            if keep_results:
                self._keep(_tensors(outputs))
            if self.phase == "train":
                _loss(outputs).backward()
                if keep_results:
                    self._keep([p.grad for p in self.module.parameters() if p.grad is not None])
                self._optimizer.step()
                self._optimizer.zero_grad()
        return outputs

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._on_gpu:
            torch.cuda.synchronize(self._subject.device)

    def close(self) -> None:
        """Free the copy of the module and its compiled code."""
        self.recorder.stop()
        if self.switch is not None:
            self.switch.remove()
        self.module = self._subject.module

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        self.results.append([tensor.detach().to("cpu", copy=True) for tensor in tensors])

    def _generator_states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self._on_gpu else [])]


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _loss(outputs: Any) -> torch.Tensor:
    """Cross-entropy with the labels 0, 1, 2, ... if the output looks like logits, else the mean of the outputs."""
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1:
        labels = torch.arange(outputs.shape[0], device=outputs.device) % outputs.shape[1]
        return nn.functional.cross_entropy(outputs.float(), labels)
    differentiable = [tensor.float().mean() for tensor in _tensors(outputs) if tensor.requires_grad]
    if not differentiable:
        raise ValueError("no output requires a gradient")
    return torch.stack(differentiable).mean()
