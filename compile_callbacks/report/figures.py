"""The figures of a report. A decorated function declares, describes and computes each figure.

The docstrings of the functions are Markdown, because the page about the report shows them.
"""

# ruff: noqa: D205, D209  (the docstring of a figure is one paragraph, a cell of a table)

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from compile_callbacks._utils.phases import EAGER, WAITING, Phase
from compile_callbacks.profiling.comparison import median_ms, spread_ms
from compile_callbacks.profiling.events import Result, Verdict
from compile_callbacks.profiling.recompiles import short_reason
from compile_callbacks.report.declaration import COUNT, NOTHING, Figures, PhaseFacts, cell, chosen_candidate, figure


def _pair(left: str, right: str) -> Callable[[Any], str]:
    def form(report: PhaseReport) -> str:
        both = operator.attrgetter(left, right)(report)
        return "{} / {}".format(*(value or 0 for value in both)) if any(both) else NOTHING

    return form


def _with_spread(kind: str) -> Callable[[Any], str]:
    def form(report: PhaseReport) -> str:
        spread = getattr(report.diagnostics, f"{kind}_spread_ms")
        return cell(getattr(report, f"{kind}_step_ms"), "{:.2f}") + ("" if spread is None else f" ± {spread / 2:.2f}")

    return form


def _passes(runs: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for name in dict.fromkeys(run["name"] for run in runs):
        changed = [run.get("changed") for run in runs if run["name"] == name]  # None if torch's cache had the graph
        cached = changed.count(None)
        ran = f"{changed.count(True)} of {len(changed) - cached} graphs changed"
        ran = ran if cached < len(changed) else "did not run"
        lines.append(f"{name}: {ran}" + (f", {cached} from the cache" if cached else ""))
    return "\n".join(lines) or NOTHING


class PhaseDiagnostics(Figures):
    """The details of a `PhaseReport`. A figure that was not measured is ``None``."""

    facts: PhaseFacts

    @figure(default=0)
    def cache_misses(self) -> int:
        """Number of graphs that were not in torch's cache on disk."""
        return sum(self.values("cache_misses"))

    @figure()
    def eager_samples(self) -> int | None:
        """Number of eager samples."""
        return len(self.facts.times.eager_ms) if self.facts.times.workload else None

    @figure()
    def compiled_samples(self) -> int | None:
        """Number of compiled samples."""
        return len(self.facts.times.compiled_ms) if self.facts.times.workload else None

    @figure()
    def eager_spread_ms(self) -> float | None:
        """Interquartile range of the eager step times, in milliseconds."""
        return spread_ms(self.facts.times.eager_ms)

    @figure()
    def compiled_spread_ms(self) -> float | None:
        """Interquartile range of the compiled step times, in milliseconds."""
        return spread_ms(self.facts.times.compiled_ms)

    @figure(default=())
    def speedup_interval(self) -> tuple[float, ...]:
        """The two ends of the 95% confidence interval of `eager_step_ms / compiled_step_ms`. Empty for too few
        samples."""
        comparison = self.facts.times.comparison
        return (comparison.low, comparison.high) if comparison else ()

    @figure("speed", "{:.0f}")
    def eager_peak_memory_mib(self) -> float | None:
        """Peak GPU memory of an eager step, in MiB, with weights and optimizer state. `None` if these steps did not
        raise the peak of the process."""
        return self.facts.phase_times.peak_mib.get(EAGER)

    @figure("speed", "{:.0f}", row="compiled peak memory MiB", scalar="step/PHASE/peak_memory_mib")
    def peak_memory_mib(self) -> float | None:
        """Peak GPU memory of a compiled step, in MiB. `None` if these steps did not raise the peak of the process, as
        after eager steps or a comparison that need more: `baseline_steps=0` and `verify="off"` leave these out."""
        return self.facts.phase_times.peak_mib.get(self.facts.candidate)

    @figure()
    def load_seconds(self) -> float | None:
        """The share of `compile_seconds` that loaded code of the helper process. The rest captured the graphs."""
        loads = [event for event in self.events_of("compile") if event.get("part") == "load"]
        return sum(event.get("seconds", 0) for event in loads) if loads else None

    @figure("compile", COUNT, row="steps meanwhile", default=0)
    def waiting_steps(self) -> int:
        """Number of steps that ran eagerly while the helper process compiled."""
        return self.facts.phase_times.steps(WAITING).total()

    @figure("speed", "{:.2f}", row="step meanwhile ms")
    def waiting_step_ms(self) -> float | None:
        """Median time of these steps, in milliseconds. The helper process may slow them. `net_seconds_saved` contains
        the difference from `eager_step_ms`."""
        windows = self.facts.phase_times.windows(WAITING, "eager")
        ours = windows.get(self.facts.times.workload, ()) if self.facts.times.workload else ()
        return median_ms([ms for window in ours for ms in window])

    @figure("speed", lambda d: cell(round(d.saved_for_backward_mib or 0, 1) or None, "{:.1f}"))
    def saved_for_backward_mib(self) -> float | None:
        """Memory of the activations that graphs save for their backward pass, in MiB. Each target counts with the graph
        that saves the most. Graphs from torch's cache do not count."""
        known = sorted((event["saved_mib"], event["target"]) for event in self.events_of() if "saved_mib" in event)
        return sum({target: mib for mib, target in known}.values()) if known else None

    @figure("correctness", "{:.1e}")
    def max_abs_error(self) -> float | None:
        """Largest absolute difference from eager in any output element, at the first call of each graph. Rounding alone
        causes small differences; verification compares [relative to the size of the tensor](limits.md#verification)."""
        return max(self.values("max_abs_error"), default=None)

    @figure("compile", COUNT, default=0)
    def skipped_passes(self) -> int:
        """Number of graphs that run eagerly because a custom graph pass failed."""
        return len(self.events_of("pass_skipped"))

    @figure("compile", lambda d: _passes(d.passes), row="graph passes", default=())
    def passes(self) -> tuple[dict[str, Any], ...]:
        """One mapping for each graph and custom graph pass, in order: `target`, `name`, `hook`, and `graph` (the kind:
        `module`, `joint`, `forward`, `backward` or `inference`), `is_inference`, `seconds` of the pass, `nodes_before`,
        `nodes_after` and `changed`, or `from_cache` if the graph was loaded from torch's cache."""
        runs = self.facts.recorder.executions.pass_runs
        return tuple({"target": key.target, **run} for key, run in runs if self.facts.counts(key))

    @figure(default={})
    def steps(self) -> dict[str, int]:
        """Number of steps with the settings of the phase, by kind: `compiled` (a compiled graph ran) and `eager`."""
        return dict(self.facts.steps)

    @figure(default={})
    def eager_calls(self) -> dict[str, int]:
        """Number of calls by target that ran eagerly, entirely or in part, in steps with the settings of the phase."""
        calls: Counter[str] = Counter()
        for key, number in self.facts.recorder.executions.eager_calls.items():
            calls[key.target] += number if self.facts.counts(key) else 0
        return dict(+calls)

    @figure(default=())
    def torch_notes(self) -> tuple[str, ...]:
        """A sentence for each private part of torch that is missing, and one for a torch newer than the tested ones."""
        from compile_callbacks import _torch  # imported here, because some commands do not import torch

        return tuple(_torch.ports.notes())

    @figure(default=())
    def trials(self) -> tuple[dict[str, Any], ...]:
        """One mapping for each candidate of a `Tune`, eager first: `candidate`, `verdict`, `median_ms` and `p95_ms`
        (median and 95th percentile of the step times), `samples`, `compile_seconds`, `reason`. Each candidate has a row
        of the table."""
        return self.facts.trials

    @figure(default=())
    def series(self) -> tuple[dict[str, Any], ...]:
        """Step times in order, as one mapping for each `kind` of step (`eager`, `compiled` or `compiling`) and
        `candidate`: `steps` contains numbers of steps in the phase, and `ms` contains their times. A long run keeps
        windows of ten steps, spread evenly over the run."""
        return self.facts.phase_times.series()

    @figure(default=())
    def events(self) -> tuple[dict[str, Any], ...]:
        """The events of the phase in order, such as each graph break and each recompile with its reason. See
        `CompileEvent`."""
        return tuple(event.to_dict() for event in self.facts.recorder.events if event.phase == self.facts.phase)

    def events_of(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the events of a kind, or of all kinds. With a `Tune`, only those of the chosen candidate."""
        chosen = chosen_candidate(self.trials)
        of_kind = [event for event in self.events if kind in (None, event["kind"])]
        return [event for event in of_kind if chosen is None or event.get("candidate") in (None, chosen)]

    def values(self, attribute: str) -> list[Any]:
        """Return the values of an attribute of all events that have it."""
        return [event[attribute] for event in self.events_of() if attribute in event]


class PhaseReport(Figures):
    """The cost and the gain of compiling one phase. A figure that was not measured is ``None``.

    A *sample* is the time of one step. The page "Read the report" of the documentation describes the fields.
    """

    facts: PhaseFacts

    @figure("compile", default=EAGER)
    def mode(self) -> str:
        """The settings in one line, or `eager` if the phase is not compiled. With a `Tune`, the chosen candidate. The
        other figures are about that candidate, unless their description says otherwise."""
        return self.facts.candidate or self.facts.mode

    @figure()
    def mode_reason(self) -> str | None:
        """Why the mode `fast` became `mode`, and why torch records no CUDA graph. `None` with other settings."""
        skipped = self.diagnostics.events_of("cudagraph_skip") if self.facts.mode_reason else ()
        reasons = [short_reason(event.get("reason") or "torch gives no reason") for event in skipped]
        return self.facts.mode_reason and "; no CUDA graph: ".join([self.facts.mode_reason, *reasons[-1:]])

    @figure("compile", lambda report: ", ".join(report.targets) or NOTHING, default=())
    def targets(self) -> tuple[str, ...]:
        """Names of the compiled targets. Repeated blocks also have the number of blocks and of shared graphs."""
        graphs: Counter[str] = Counter()
        for event in self.diagnostics.events_of():
            graphs[event["target"]] += event.get("graphs", 0)
        labels = self.facts.target_labels if self.mode != EAGER else {}
        return tuple(label(graphs[name]) for name, label in labels.items())

    @figure()
    def verdict(self) -> Verdict | None:
        """The result of the comparison with eager steps, see [Verdict](#verdict). `None`: the settings leave the phase
        eager, or only its eager steps have run."""
        steps, comparison, compiles = self.facts.steps, self.facts.times.comparison, self.mode != EAGER
        if compiles and 2 * steps["eager"] > steps.total():
            events_of, loaded = self.diagnostics.events_of, self.diagnostics.load_seconds is not None
            not_called = loaded and not (steps["compiled"] or events_of("verify") or events_of("fallback"))
            return "still compiling" if self.facts.waits or not_called else "not compiled"
        if comparison is None:
            return "too few samples" if compiles and steps.total() else None
        unpaid = self.net_seconds_saved is not None and self.net_seconds_saved <= 0
        return "compile time not repaid" if comparison.outcome == "faster" and unpaid else comparison.outcome

    @figure("compile", "{:.1f}", scalar="compile/PHASE/seconds")
    def compile_seconds(self) -> float | None:
        """Seconds in which torch traced the code, compiled forward and backward graphs, and recorded CUDA graphs. With
        a `Tune`, the sum over all candidates. Does not include verification and compiles of your own functions."""
        compiles = [event for event in self.diagnostics.events if event["kind"] == "compile"]
        return sum(event.get("seconds", 0) for event in compiles) if compiles else None

    @figure("compile", "{:.1f}", row="compiled in the background s")
    def background_seconds(self) -> float | None:
        """Seconds in which the helper process of `background=True` compiled, while training went on."""
        events = self.diagnostics.events_of("background")
        return sum(event.get("seconds", 0) for event in events) if events else None

    @figure("compile", COUNT, scalar="compile/PHASE/graphs", default=0)
    def graphs(self) -> int:
        """Number of compiled graphs."""
        return sum(self.diagnostics.values("graphs"))

    @figure("compile", COUNT, scalar="compile/PHASE/graph_breaks", default=0)
    def graph_breaks(self) -> int:
        """Number of graph breaks."""
        return len(self.diagnostics.events_of("graph_break"))

    @figure("compile", COUNT, scalar="compile/PHASE/recompiles", default=0)
    def recompiles(self) -> int:
        """Number of compiles that a failed guard caused."""
        return len(self.diagnostics.events_of("recompile"))

    @figure("compile", COUNT, default=0)
    def fallbacks(self) -> int:
        """Number of times that a target or a graph was left to eager, for example after a compiler failure, after a
        difference from eager, or at the recompile limit."""
        return len(self.diagnostics.events_of("fallback"))

    @figure(
        "compile",
        _pair("cache_hits", "diagnostics.cache_misses"),
        row="cache hits / misses",
        scalar="compile/PHASE/cache_hits",
        default=0,
    )
    def cache_hits(self) -> int:
        """Number of graphs that were loaded from torch's cache on disk."""
        return sum(self.diagnostics.values("cache_hits"))

    @figure("correctness", row="compared with eager")
    def verified(self) -> str | None:
        """The number of graphs by result of the [comparison with eager](limits.md#verification), such as `equal 12, not
        compared 2 (dropout)`. `outputs only` means that gradients were not compared, and `58 of 62 tensors` that
        rounding alone decides the others. `None` if no graph was compared."""
        events = [event for event in self.diagnostics.events_of("verify") if "verdict" in event]
        tensors, noisy = (sum(self.diagnostics.values(name)) for name in ("tensors", "noisy_tensors"))
        counts = Counter((event["verdict"], event.get("why_not")) for event in events)
        ordered = sorted(counts.items(), key=lambda item: get_args(Result).index(item[0][0]))
        results = [f"{result} {count}" + (f" ({why_not})" if why_not else "") for (result, why_not), count in ordered]
        return ", ".join(results + [f"{tensors - noisy} of {tensors} tensors"] * (noisy > 0)) or None

    @figure("speed", _with_spread("eager"), scalar="step/PHASE/eager_ms")
    def eager_step_ms(self) -> float | None:
        """Median time of the eager baseline steps, in milliseconds, and [± the spread](measuring.md#spread)."""
        return median_ms(self.facts.times.eager_ms)

    @figure("speed", _with_spread("compiled"), scalar="step/PHASE/compiled_ms")
    def compiled_step_ms(self) -> float | None:
        """Median time of the compiled steps of the same workload, in milliseconds, and ± the spread."""
        return median_ms(self.facts.times.compiled_ms)

    @figure(
        "speed", _pair("diagnostics.eager_samples", "diagnostics.compiled_samples"), row="samples, eager / compiled"
    )
    def samples(self) -> int | None:
        """The number of eager samples or of compiled samples, whichever is smaller. Without a baseline, the number of
        compiled samples."""
        both = self.diagnostics.eager_samples, self.diagnostics.compiled_samples
        return min(filter(None, both), default=None)

    @figure("speed", "{:.2f}x", scalar="step/PHASE/speedup")
    def speedup(self) -> float | None:
        """`eager_step_ms / compiled_step_ms`. `None` if there are fewer than five eager or five compiled samples, if
        the [95% confidence interval](measuring.md#confidence-interval) of the ratio contains 1 or is too wide to help,
        or if the medians differ by more than 20 times."""
        differ = self.verdict in ("faster", "slower", "compile time not repaid")
        medians = self.eager_step_ms, self.compiled_step_ms
        return medians[0] / medians[1] if differ and medians[0] and medians[1] else None

    @figure("speed", "{:.1f}", scalar="step/PHASE/net_seconds_saved")
    def net_seconds_saved(self) -> float | None:
        """The seconds that all steps since the baseline [saved](measuring.md#break-even-steps). `None` if the baseline
        of the workload has fewer than five samples, or if the verdict is `not comparable`."""
        return self.facts.savings[0]

    @figure("speed", "{:.0f}", row="break-even steps", scalar="step/PHASE/break_even_steps")
    def break_even_steps(self) -> float | None:
        """Number of compiled steps after which `net_seconds_saved` is positive. Infinite if compiled steps are slower,
        and `None` without a speedup. [Not the quotient](measuring.md#break-even-steps) of compile time and median
        saving."""
        return self.facts.savings[1] if self.speedup else None

    @figure(default=PhaseDiagnostics())
    def diagnostics(self) -> PhaseDiagnostics:
        """The [details](#details-of-a-phase)."""
        return PhaseDiagnostics(facts=self.facts)

    def scalars(self, phase: Phase) -> dict[str, float]:
        """Return the figures by the names of the logged scalars."""
        if self.compile_seconds is None:
            return {}
        return super().scalars(phase) | self.diagnostics.scalars(phase)
