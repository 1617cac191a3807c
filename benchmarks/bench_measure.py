"""Times copies of a module in several modes, in alternating blocks of steps, for the benchmarks."""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import math
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from compile_callbacks._utils.errors import CompileWarning
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks._utils.phases import EAGER, Phase
from compile_callbacks.calls.phase_switch import PhaseSwitch
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.variant import Variant
from compile_callbacks.graphs.failures import TargetSettings
from compile_callbacks.profiling.comparison import compare, median_ms, spread_ms
from compile_callbacks.profiling.events import EVENT_KINDS, CompileEvent
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.report.file import environment
from compile_callbacks.targets.target import Callee, Target

_BLOCKS = 10
_WARMUP_STEPS = 4  # torch warms up a CUDA graph in the first step, records it in the second, then replays it


@dataclass(frozen=True)
class BenchmarkedModule:
    """A module on its device with its inputs. Each mode runs a copy of the module."""

    name: str
    device: torch.device
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def shapes(self) -> str:
        """Return the shapes of all input tensors, such as ``"4x3x224x224"``."""
        shapes = [tensor.shape for tensor in _tensors((self.args, self.kwargs))]
        return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes) or "no tensor"


@dataclass(eq=False)
class Candidate:
    """A copy of a module that runs in one mode: eager, or compiled with a config.

    An ``infer`` step runs a forward pass without gradients. A ``train`` step runs forward, loss, backward and SGD. With
    a ``dtype``, steps run under autocast. The library compares each compiled graph with eager.
    """

    name: str
    config: InductorConfig | None
    benchmarked: BenchmarkedModule
    phase: Phase
    dtype: torch.dtype | None = None
    recorder: CompileRecorder = field(default_factory=CompileRecorder)
    switch: PhaseSwitch | None = None
    failure: str | None = None
    peak_memory_mib: float | None = None

    def __post_init__(self) -> None:
        self._on_gpu = self.benchmarked.device.type == "cuda"

    def prepare(self) -> None:
        """Copy the module, compile the copy, and run the warm-up steps."""
        before_bytes = torch.cuda.memory_allocated() if self._on_gpu else 0
        self.module = copy.deepcopy(self.benchmarked.module).train(self.phase == "train")
        if self.phase == "train":  # a small learning rate keeps the loss finite on random labels
            self._optimizer = torch.optim.SGD([p for p in self.module.parameters() if p.requires_grad], lr=1e-4)
        if self.config is not None:
            targets, settings = [Target(self.name, (Callee(self.name, self.module),))], TargetSettings(verify="warn")
            self.switch = PhaseSwitch(targets, recorder=self.recorder, settings=settings)
            self.recorder.listen()
            self.switch.install()
            # Freezing is safe, because infer steps do not change the weights.
            self.switch.select(self.phase, Variant(self.config), weights_frozen=self.config.freezes)
        torch.manual_seed(0)
        self.step()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(_WARMUP_STEPS - 1):
            self.step()
        self.synchronize()
        if self._on_gpu:  # read before timed steps, because replaying a CUDA graph allocates nothing
            self.peak_memory_mib = (torch.cuda.max_memory_allocated() - before_bytes) / 2**20
        self.recorder.collect()

    def time(self, steps: int) -> float | None:
        """Run a block of steps. Return the milliseconds per step, or ``None`` if a step compiled."""
        self.step()  # not timed, because other candidates ran since the last block
        self.synchronize()
        compiles, started = self.recorder.compiles_seen, time.perf_counter()
        for _ in range(steps):
            self.step()
        self.synchronize()
        seconds = time.perf_counter() - started
        return seconds / steps * 1000 if self.recorder.compiles_seen == compiles else None

    def step(self) -> Any:
        """Run one step, and return the outputs of the module."""
        if self._on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(self.phase == "train"):
            # A new context for each call, as in a Trainer, because autocast caches its casts of weights in a context.
            with torch.autocast(self.benchmarked.device.type, self.dtype, enabled=self.dtype is not None):
                outputs = self.module(*self.benchmarked.args, **self.benchmarked.kwargs)
            if self.phase == "train":
                _loss(outputs).backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
        return outputs

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._on_gpu:
            torch.cuda.synchronize(self.benchmarked.device)

    def close(self) -> None:
        """Free the copy of the module and its compiled code."""
        self.recorder.stop()
        if self.switch is not None:
            self.switch.remove()
        self.module = self.benchmarked.module


def measure(
    benchmarked: BenchmarkedModule,
    modes: Mapping[str, InductorConfig | None],
    phase: Phase,
    *,
    steps: int,
    dtype: torch.dtype | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Time at least ``steps`` steps of eager and of each mode.

    The modes run in alternating blocks, so that a disturbance of the machine affects all modes. The function passes
    lines about its progress to ``say``.
    """
    candidates = [Candidate(name, modes.get(name), benchmarked, phase, dtype) for name in (EAGER, *modes)]
    on_device = torch.cuda.device(benchmarked.device) if benchmarked.device.type == "cuda" else contextlib.nullcontext()
    blocks = min(steps, _BLOCKS)
    try:
        with on_device, warnings.catch_warnings():
            warnings.simplefilter("ignore", CompileWarning)  # because the rows contain the same reasons
            for candidate in candidates:
                say(f"preparing {candidate.name} for {phase}")
                _attempt(candidate, candidate.prepare)
                if candidate.name == EAGER and candidate.failure:
                    raise ValueError(
                        f"{benchmarked.name!r} fails in eager mode on {benchmarked.shapes()}: {candidate.failure}"
                    )
                candidate.failure = candidate.failure or _why_not_compiled(candidate)
            say(f"timing {phase} steps")
            timers = {c.name: partial(_attempt, c, c.time, math.ceil(steps / blocks)) for c in candidates}
            samples = alternate(timers, blocks)
        return [_row(candidate, samples) for candidate in candidates]
    finally:
        for candidate in candidates:
            candidate.close()


def _attempt(candidate: Candidate, run: Callable[..., float | None], *args: Any) -> float | None:
    """Call a function unless the candidate has failed. Store an exception as the failure of the candidate."""
    try:
        return run(*args) if candidate.failure is None else None
    except Exception as error:
        candidate.failure = in_one_line(describe_failure(error))
        return None


def alternate(timers: Mapping[str, Callable[[], float | None]], blocks: int) -> dict[str, list[float]]:
    """Call each timer once per round, and reverse the order after each round. Ignore a timer that returns ``None``."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(blocks):
        for name in reversed(samples) if number % 2 else samples:
            if (milliseconds := timers[name]()) is not None:
                samples[name].append(milliseconds)
    return samples


def summarize(block_ms: Sequence[float]) -> dict[str, Any]:
    """Return the median and the interquartile range of block times, and the number of blocks."""
    samples = tuple(block_ms)
    return {"step_ms": median_ms(samples), "spread_ms": spread_ms(samples), "samples": len(samples)}


def compare_blocks(eager_ms: Sequence[float], block_ms: Sequence[float]) -> dict[str, Any]:
    """Return the ratio of two medians, its 95% interval, and whether the interval is above 1; ``None`` if unknown."""
    found = compare([eager_ms], [block_ms])
    if found is None or found.outcome == "not comparable":
        return {"speedup": None, "speedup_interval": None, "faster": None}
    return {"speedup": found.ratio, "speedup_interval": [found.low, found.high], "faster": found.outcome == "faster"}


def commit() -> str | None:
    """Return the variable COMMIT if it is set, for a copy of the files, or the commit of this clone."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        found = ""
    return found or None


def as_result(
    title: str, rows: Sequence[Mapping[str, Any]], command: str, found: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return rows as JSON-ready data. ``found`` is the `environment` of the process that ran the steps."""
    found = found or environment()
    versions = {name: found.get(name) for name in ("python", "torch", "triton", "lightning")}
    date = dt.datetime.now(dt.UTC).date().isoformat()
    head = {"title": title, "commit": commit(), "date": date, "device": found["device"]}
    return {**head, "versions": versions, "command": command, "rows": list(rows)}


def _why_not_compiled(candidate: Candidate) -> str | None:
    """Return the reason why no graph was compiled, or ``None`` for eager or if a graph was compiled."""
    events = [event for event in candidate.recorder.events if event.phase == candidate.phase]
    if candidate.config is None or any(event.graphs for event in events):
        return None
    reasons = [event.reason for kind in ("fallback", "graph_break") for event in events if event.kind == kind]
    return in_one_line(next(filter(None, reasons), "no graph was compiled, and torch gives no reason"))


def _row(candidate: Candidate, samples: Mapping[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"mode": candidate.name, "phase": candidate.phase, "failure": candidate.failure}
    if candidate.failure:
        return row
    row |= summarize(samples[candidate.name]) | {"peak_memory_mib": candidate.peak_memory_mib}
    if candidate.config is None:
        return row
    events = {kind: candidate.recorder.events_of(candidate.phase, kind) for kind in EVENT_KINDS}
    seconds = sum(event.seconds or 0.0 for event in events["compile"])
    compared, break_even_steps = compare_blocks(samples[EAGER], samples[candidate.name]), None
    if compared["faster"]:
        saved_ms = summarize(samples[EAGER])["step_ms"] - row["step_ms"]
        break_even_steps = math.ceil(seconds * 1000 / saved_ms)
    runs = [run for _, run in candidate.recorder.pass_runs if run.get("changed") or run.get("from_cache")]
    return row | {
        **compared,
        "compile_seconds": seconds,
        "break_even_steps": break_even_steps,
        "verified": sorted({event.verdict for event in events["verify"] if event.verdict}),
        "graphs": sum(event.graphs for event in events["compile"]),
        "graph_breaks": len(events["graph_break"]),
        "fallbacks": len(events["fallback"]),
        "passes": sorted({run["name"] for run in runs}),
        "notes": list(_notes(candidate, events)),
    }


def _notes(candidate: Candidate, events: Mapping[str, Sequence[CompileEvent]]) -> Iterator[str]:
    """Yield settings that have no effect in this run, and reasons that torch and verification report."""
    config = candidate.config
    if config is not None and config.uses_cudagraphs and candidate.peak_memory_mib is None:
        yield "CUDA graphs have no effect without a GPU"
    if config is not None and config.freezes and candidate.phase == "train":
        yield "freezing has no effect in training"
    for kind in ("template", "fallback", "cudagraph_skip", "pass_skipped", "verify"):
        found = {(event.verdict or kind.replace("_", " "), event.reason) for event in events[kind] if event.reason}
        yield from (f"{name}: {in_one_line(reason)}" for name, reason in sorted(found))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _loss(outputs: Any) -> torch.Tensor:
    """Return the cross-entropy with labels 0, 1, 2, ... if the output looks like logits, else the mean of outputs."""
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1:
        labels = torch.arange(outputs.shape[0], device=outputs.device) % outputs.shape[1]
        return nn.functional.cross_entropy(outputs.float(), labels)
    differentiable = [tensor.float().mean() for tensor in _tensors(outputs) if tensor.requires_grad]
    if not differentiable:
        raise ValueError("no output requires a gradient")
    return torch.stack(differentiable).mean()
