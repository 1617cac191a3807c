"""One way of running a module: eagerly, or compiled with one set of settings, in one phase."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.bench.settings import PRECISIONS, BenchSettings
from compile_callbacks.bench.subject import Subject
from compile_callbacks.compiling.autocast import autocast_of
from compile_callbacks.compiling.snapshot import Snapshot
from compile_callbacks.compiling.switch import PhaseSwitch
from compile_callbacks.compiling.targets import Target
from compile_callbacks.compiling.verify import tolerance
from compile_callbacks.measuring.events import CompileRecorder
from compile_callbacks.measuring.memory import PeakMemory
from compile_callbacks.measuring.progress import CompileProgress
from compile_callbacks.phases import Phase
from compile_callbacks.settings.config import InductorConfig

WARMUP_STEPS = 4
"""Steps before those that are timed, the first one among them: a CUDA graph is warmed up, recorded, then replayed."""

_LEARNING_RATE = 1e-4  # small, so that the loss on random labels stays finite for as many steps as there are


class Way:
    """A copy of a module that runs in one way.

    Args:
        name: What the way is called.
        subject: The module and its inputs.
        phase: What a step is: a forward pass without grad; or forward, loss, backward and an SGD step.
        config: The settings; ``None`` for eager.
        settings: Where and in which precision.
        say: Takes a line of text while something compiles.
    """

    def __init__(
        self,
        name: str,
        subject: Subject,
        phase: Phase,
        config: InductorConfig | None,
        settings: BenchSettings,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name = name
        self.phase = phase
        self.config = config
        self.block_ms: list[float] = []
        """Milliseconds a step, a value for each timed block."""
        self.timed_steps = 0
        self.first_step_seconds: float | None = None
        self.drew_random_numbers = False
        self.memory = PeakMemory()
        progress = CompileProgress(say)
        self.recorder = CompileRecorder(on_start=progress.compile_begins, on_end=progress.compile_ends)
        self._subject = subject
        self._device = settings.device
        self._dtype = PRECISIONS[settings.precision]
        self._other_memory_mb = torch.cuda.memory_allocated() / 2**20 if self._on_gpu else 0.0
        self._module = copy.deepcopy(subject.module).train(phase == "train")
        self._results: list[list[torch.Tensor]] | None = None
        self._switch: PhaseSwitch | None = None
        if phase == "train":
            weights = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            self._optimizer = torch.optim.SGD(weights, lr=_LEARNING_RATE)
            self._scaler = torch.amp.GradScaler(self._device.type, enabled=self._dtype is torch.float16)
        if config is not None:
            self._switch = PhaseSwitch([Target(name, self._module)], {phase: config}, recorder=self.recorder)
            self.recorder.listen()
            self._switch.install()
            self._switch.select(phase, frozen=config.freezes)  # between two steps of inference no weight changes

    def prepare(self) -> list[list[torch.Tensor]]:
        """Run the steps that are not timed.

        Returns:
            What the first step computed: outputs, and in training the gradients of all weights.
        """
        torch.manual_seed(0)
        before = Snapshot(self._module)
        self._results = []
        self._synchronize()
        started = time.perf_counter()
        self._step()
        self._synchronize()
        self.first_step_seconds = time.perf_counter() - started
        self.drew_random_numbers = before.drew()
        results, self._results = self._results, None
        for _ in range(WARMUP_STEPS - 1):
            self._measured_step()
        self._synchronize()
        self.recorder.collect()
        return results

    def time(self, steps: int) -> None:
        """Time a block of steps, after one that is left out: others have run since the last block.

        A block in which anything compiles is no sample.
        """
        self._step()
        self._synchronize()
        compiles_before = self.recorder.compiles_seen
        started = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._synchronize()
        seconds = time.perf_counter() - started
        if self.recorder.compiles_seen == compiles_before:
            self.block_ms.append(seconds / steps * 1000)
            self.timed_steps += steps

    def tolerance(self) -> float:
        """The relative difference from eager that rounding may make."""
        own = autocast_of(self.config, self._device.type) if self.config else contextlib.nullcontext()
        with self._autocast(), own:
            return tolerance(self._module, _torch.tree_leaves((self._subject.args, self._subject.kwargs)))

    def peak_memory_mb(self) -> float | None:
        """Peak GPU memory of a step in MiB, without what other ways hold; ``None`` on a CPU."""
        peak_mb = self.memory.peak_mb(self.phase, compiled=self.config is not None)
        return None if peak_mb is None else peak_mb - self._other_memory_mb

    def end(self) -> None:
        """Give back what torch and the GPU hold for this way."""
        self.recorder.stop()
        if self._switch is not None:
            self._switch.remove()
        del self._module

    # ------------------------------------------------------------------------------------------ one step

    def _measured_step(self) -> None:
        traces_before = self.recorder.traces_seen
        if self._on_gpu:
            self.memory.start(self.phase, compiled=self.config is not None)
        self._step()
        if self._on_gpu:
            self.memory.stop(traced=self.recorder.traces_seen != traces_before)

    def _step(self) -> None:
        if self._on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        if self.phase == "infer":
            with torch.no_grad():
                self._keep(_tensors(self._forward()))
            return
        outputs = self._forward()
        self._scaler.scale(_loss(outputs)).backward()
        self._keep(_tensors(outputs))
        self._keep([p.grad for p in self._module.parameters() if p.grad is not None])
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()

    def _forward(self) -> Any:
        with self._autocast():
            return self._module(*self._subject.args, **self._subject.kwargs)

    def _autocast(self) -> torch.autocast:
        # Anew for each step, as in a Trainer: within one, autocast remembers its casts of weights.
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not None)

    def _keep(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._results is not None:
            # Off the GPU, whose memory is measured next.
            self._results.append([tensor.detach().to("cpu", copy=True) for tensor in tensors])

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _torch.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _loss(outputs: Any) -> torch.Tensor:
    """Cross-entropy of what looks like logits, with one class after the other as labels; else the mean of outputs."""
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1:
        labels = torch.arange(outputs.shape[0], device=outputs.device) % outputs.shape[1]
        return nn.functional.cross_entropy(outputs.float(), labels)
    differentiable = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
    if not differentiable:
        raise ValueError("none of its outputs requires grad")
    return torch.stack([tensor.float().mean() for tensor in differentiable]).mean()
