"""The data of reports: a `RunReport` has a `PhaseReport` for each phase."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.config.inductor_config import EAGER

Verdict = Literal["faster", "no difference", "slower", "too few samples", "compile time not repaid", "not compiled"]


class _Data:
    """A dataclass that converts itself to JSON-ready data and back."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data. An infinite number becomes ``"never"``."""
        return {
            name: list(value) if isinstance(value, tuple) else "never" if value == math.inf else value
            for name, value in asdict(self).items()  # type: ignore[call-overload]
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Create an object from `to_dict` data. A field that is missing or of a wrong type gets its default."""
        found: dict[str, Any] = {}
        for f in fields(cls):  # type: ignore[arg-type]
            value = data.get(f.name) if isinstance(data, Mapping) else None
            value = math.inf if value == "never" else value
            if value is not None and _fits(value, str(f.type)):
                found[f.name] = tuple(value) if isinstance(value, list) else value
        return cls(**found)


@dataclass(frozen=True, kw_only=True)
class PhaseDiagnostics(_Data):
    """The details of a `PhaseReport`. A figure that was not measured is ``None``.

    Attributes:
        cache_misses: Number of graphs that were not in torch's cache on disk.
        eager_samples: Number of eager samples.
        compiled_samples: Number of compiled samples.
        eager_spread_ms: Interquartile range of the eager step times, in milliseconds.
        compiled_spread_ms: Interquartile range of the compiled step times, in milliseconds.
        eager_peak_memory_mib: Peak GPU memory of an eager step, in MiB. See `PeakMemory`.
        eager_peak_memory_at_most_mib: An upper bound of this peak if eager steps did not raise the peak of the process.
        peak_memory_mib: Peak GPU memory of a compiled step, in MiB.
        peak_memory_at_most_mib: An upper bound of this peak if compiled steps did not raise the peak of the process.
        saved_for_backward_mib: Memory of the activations that graphs save for their backward pass, in MiB. Each target
            counts with the graph that saves the most. Graphs from torch's cache do not count.
        max_abs_error: Largest absolute difference from eager in any output element, at the first call of each graph.
        skipped_passes: Number of graphs that were compiled without a custom graph pass because the pass failed.
        passes: One mapping for each graph and custom graph pass, in order: ``target``, ``name``, ``hook``, and the
            fields of `PassRun`, or ``from_cache`` if the graph was loaded from torch's cache.
        steps: Number of steps with the settings of the phase, by kind: ``"compiled"``, ``"partly compiled"``
            (compiled graphs, and also a target that ran eagerly) and ``"eager"``.
        trials: One mapping for each candidate of a `Tune`, eager first: ``candidate``, ``verdict``, ``median_ms`` and
            ``p95_ms`` (median and 95th percentile of the step times), ``samples``, ``compile_seconds``, ``reason``.
        series: Step times in order, as one mapping for each ``kind`` of step (``"eager"``, ``"compiled"`` or
            ``"compiling"``) and ``candidate``: ``steps`` contains numbers of steps in the phase, and ``ms``
            contains their times. A long run keeps random steps.
        net_series: The net seconds saved over the steps, computed from ``series``: ``steps`` contains numbers of steps
            in the phase, and ``seconds`` contains the seconds saved until each of these steps.
        restored: Names of the figures that were loaded from the checkpoint of an earlier run.
        events: The events of the phase in order, such as each graph break and each recompile with its reason. See
            `CompileEvent`.
    """

    cache_misses: int = 0
    eager_samples: int | None = None
    compiled_samples: int | None = None
    eager_spread_ms: float | None = None
    compiled_spread_ms: float | None = None
    eager_peak_memory_mib: float | None = None
    eager_peak_memory_at_most_mib: float | None = None
    peak_memory_mib: float | None = None
    peak_memory_at_most_mib: float | None = None
    saved_for_backward_mib: float | None = None
    max_abs_error: float | None = None
    skipped_passes: int = 0
    passes: tuple[dict[str, Any], ...] = ()
    steps: dict[str, int] = field(default_factory=dict)
    trials: tuple[dict[str, Any], ...] = ()
    series: tuple[dict[str, Any], ...] = ()
    net_series: dict[str, Any] = field(default_factory=dict)
    restored: tuple[str, ...] = ()
    events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PhaseReport(_Data):
    """The cost and the gain of compiling one phase. A figure that was not measured is ``None``.

    A *sample* is the time of one step.

    Attributes:
        mode: The settings in one line, or ``"eager"`` if the phase is not compiled. With a `Tune`, the chosen
            candidate. The other figures are about that candidate, unless their description says otherwise.
        targets: Names of the compiled targets. Repeated blocks also have the number of blocks and of shared graphs.
        verdict: The result of the comparison with eager steps:

            - ``"faster"``: compiled steps are faster by more than noise, and saved more time than compiling took.
            - ``"compile time not repaid"``: compiled steps are faster, but saved less time than compiling took.
            - ``"slower"``: compiled steps are slower by more than noise.
            - ``"no difference"``: noise explains the difference.
            - ``"too few samples"``: too few steps were timed.
            - ``"not compiled"``: no compiled graph ran in most of the steps.
            - ``None``: the settings leave the phase eager, or only its eager steps have run.
        partly_compiled: Whether the verdict is about steps in which a target also ran eagerly.
        compile_seconds: Seconds spent on compiling so far: forward, backward and CUDA graph recording. With a `Tune`,
            the sum over all candidates.
        graphs: Number of compiled graphs.
        graph_breaks: Number of graph breaks.
        recompiles: Number of compiles that a failed guard caused.
        cache_hits: Number of graphs that were loaded from torch's cache on disk.
        fallbacks: Number of compiler failures after which a target or a graph ran eagerly.
        verified: The number of graphs by result of the comparison with eager, such as
            ``"equal 12, not compared 2 (dropout)"``. ``outputs only`` means that gradients were not compared. ``None``
            if no graph was compared.
        eager_step_ms: Median time of the eager baseline steps, in milliseconds.
        compiled_step_ms: Median time of the compiled steps of the same workload, in milliseconds.
        speedup: ``eager_step_ms / compiled_step_ms``. ``None`` if there are fewer than 5 eager or compiled samples, or
            if the 95% interval of the ratio contains 1.0.
        samples: The number of eager samples or of compiled samples, whichever is smaller. Without a baseline, the
            number of compiled samples.
        break_even_steps: Number of compiled steps after which `net_seconds_saved` is positive. Infinite if compiled
            steps are slower, and ``None`` without a speedup.
        net_seconds_saved: The seconds that all steps so far saved. Each step is compared with the mean eager step of
            its stage. Steps that compile count with their whole time. ``None`` if there are fewer than 5 eager samples.
        diagnostics: The details.
    """

    mode: str = EAGER
    targets: tuple[str, ...] = ()
    verdict: Verdict | None = None
    partly_compiled: bool = False
    compile_seconds: float | None = None
    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    cache_hits: int = 0
    fallbacks: int = 0
    verified: str | None = None
    eager_step_ms: float | None = None
    compiled_step_ms: float | None = None
    speedup: float | None = None
    samples: int | None = None
    break_even_steps: float | None = None
    net_seconds_saved: float | None = None
    diagnostics: PhaseDiagnostics = field(default_factory=PhaseDiagnostics)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready data. An infinite ``break_even_steps`` becomes ``"never"``."""
        return {**super().to_dict(), "diagnostics": self.diagnostics.to_dict()}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Create a report from `to_dict` data. A field that is missing or of a wrong type gets its default."""
        values = dict(data) if isinstance(data, Mapping) else {}
        return super().from_dict({**values, "diagnostics": PhaseDiagnostics.from_dict(values.get("diagnostics"))})

    def scalars(self, phase: Phase) -> dict[str, float]:
        """Return the figures by the names of the logged scalars."""
        if self.compile_seconds is None:
            return {}
        values: dict[str, float | None] = {
            f"compile/{phase}/seconds": self.compile_seconds,
            f"compile/{phase}/graphs": self.graphs,
            f"compile/{phase}/graph_breaks": self.graph_breaks,
            f"compile/{phase}/recompiles": self.recompiles,
            f"compile/{phase}/cache_hits": self.cache_hits,
            f"step/{phase}/eager_ms": self.eager_step_ms,
            f"step/{phase}/compiled_ms": self.compiled_step_ms,
            f"step/{phase}/speedup": self.speedup,
            f"step/{phase}/break_even_steps": self.break_even_steps,
            f"step/{phase}/net_seconds_saved": self.net_seconds_saved,
            f"step/{phase}/peak_memory_mib": self.diagnostics.peak_memory_mib,
        }
        return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The data of a `CompileReport`.

    Attributes:
        train: The train phase.
        infer: The infer phase.
        before: The report of the run that this run resumes, or ``None`` if this run resumes no other run.
    """

    train: PhaseReport = field(default_factory=PhaseReport)
    infer: PhaseReport = field(default_factory=PhaseReport)
    before: Self | None = None

    def phase(self, phase: Phase) -> PhaseReport:
        """Return the report of a phase by its name."""
        return self.train if phase == "train" else self.infer

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready data."""
        data: dict[str, Any] = {phase: self.phase(phase).to_dict() for phase in PHASES}
        data["before"] = self.before.to_dict() if self.before else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Create a report from `to_dict` data. A field that is missing or of a wrong type gets its default."""
        before = data.get("before")
        return cls(
            train=PhaseReport.from_dict(data.get("train")),
            infer=PhaseReport.from_dict(data.get("infer")),
            before=cls.from_dict(before) if isinstance(before, Mapping) else None,
        )

    def scalars(self) -> dict[str, float]:
        """Return the figures of both phases by the names of the logged scalars."""
        return self.train.scalars("train") | self.infer.scalars("infer")

    @property
    def compiled_phases(self) -> tuple[Phase, ...]:
        """The phases that have figures to show, or both phases if neither has."""
        found = tuple(
            phase for phase in PHASES if self.phase(phase).mode != EAGER or self.phase(phase).diagnostics.trials
        )
        return found or PHASES

    @property
    def has_figures(self) -> bool:
        """Whether a phase has a verdict, or a `Tune` has a verdict on a candidate."""
        phases = [self.phase(phase) for phase in PHASES]
        trials = [trial for phase in phases for trial in phase.diagnostics.trials]
        verdicts = any(phase.verdict for phase in phases) or any(trial["verdict"] != "undecided" for trial in trials)
        return verdicts or bool(self.scalars())


def _fits(value: object, annotation: str) -> bool:
    """Return whether a value read from JSON has the type of a field."""
    if annotation.startswith("tuple["):
        item = dict if "dict" in annotation else str
        return isinstance(value, list | tuple) and all(isinstance(part, item) for part in value)
    if annotation.startswith("dict["):
        return isinstance(value, dict)
    if annotation == "PhaseDiagnostics":
        return isinstance(value, PhaseDiagnostics)
    if annotation == "Verdict | None":
        return value in Verdict.__args__  # type: ignore[attr-defined]
    types: dict[str, Any] = {"str": str, "int": int, "float": int | float, "bool": bool}
    fits = isinstance(value, types[annotation.removesuffix(" | None")])
    return fits and (annotation == "bool" or not isinstance(value, bool))
