"""What figures of a run, and of runs before it, say about compiling the whole model or its repeated blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from compile_callbacks.compiling.targets import REPEATED, RepeatedBlocks, Scope, repeated_blocks
from compile_callbacks.reporting.costs_store import Cost, CostsStore, cold_if_known
from compile_callbacks.reporting.report import PhaseReport

LONG_COMPILE_SECONDS = 20.0
"""What compiling the whole model takes at least for its repeated blocks to be pointed out."""

SPARED_PART = 0.5
"""How much of the model, by its weights, a shared graph must spare compiling for the blocks to be pointed out: a ResNet
has pairs of equal blocks too, and would compile nearly all of them still."""

_NAMES: dict[Scope, str] = {"whole": "the whole model", "repeated": "repeated blocks"}
_ARGUMENTS: dict[Scope, str] = {"whole": "targets=None", "repeated": f"targets={REPEATED!r}"}


class Advisor:
    """Compares a run with what earlier runs of the same model measured, and keeps what it measured.

    Args:
        module: The model.
        scope: What of it is compiled; ``None`` for parts that were named, of which there is nothing to say.
        store: Where costs are kept; ``None`` keeps none.
    """

    def __init__(self, module: nn.Module, scope: Scope | None, store: CostsStore | None) -> None:
        self._module = module
        self._scope = scope
        self._store = store
        self._blocks: list[RepeatedBlocks] | None = None

    def advise(
        self, report: PhaseReport, made_for: Mapping[str, str] | None, *, loaded: bool = False
    ) -> tuple[str, ...]:
        """What there is to say of a phase.

        Args:
            report: The phase's report.
            made_for: What its figures hold for, without the targets; ``None`` where no steps were measured.
            loaded: Whether the run loaded kept artifacts.
        """
        now = _cost(report, loaded=loaded)
        if self._scope is None:
            return ()
        if now is not None and self._store and made_for:
            earlier = self._store.load(made_for, other_scope(self._scope))
            now = cold_if_known(replace(now, second=earlier is not None), self._store.load(made_for, self._scope))
            if earlier is not None:
                return tuple(compared(self._scope, now, earlier))
        if self._scope == "repeated":
            return tuple(not_compared(cache_dir=self._store is not None)) if now is not None else ()
        if report.compile_seconds is None or report.compile_seconds <= LONG_COMPILE_SECONDS:
            return ()
        if self._blocks is None:
            blocks = repeated_blocks(self._module)
            self._blocks = blocks if spared_part(self._module, blocks) >= SPARED_PART else []
        return tuple(blocks_to_share(report.compile_seconds, self._blocks))

    def keep(self, report: PhaseReport, made_for: Mapping[str, str] | None, *, loaded: bool = False) -> str | None:
        """Keep what was measured of a phase for later runs; arguments are those of `advise`.

        Returns:
            Why it could not be kept, or ``None``.
        """
        now = _cost(report, loaded=loaded)
        if self._scope is None or self._store is None or now is None or made_for is None:
            return None
        second = self._store.load(made_for, other_scope(self._scope)) is not None
        return self._store.save(made_for, self._scope, replace(now, second=second))


def other_scope(scope: Scope) -> Scope:
    """What a run is compared with."""
    return "repeated" if scope == "whole" else "whole"


def compared(scope: Scope, now: Cost, earlier: Cost) -> Iterator[str]:
    """This run beside one that compiled the other way.

    Args:
        scope: What this run compiled.
        now: What it measured.
        earlier: What the other measured.
    """
    other = other_scope(scope)
    line = f"{_NAMES[scope]}: {_in_words(now)}; {_NAMES[other]}, in an earlier run: {_in_words(earlier)}"
    if now.cold != earlier.cold:
        yield f"{line}. What was compiled from nothing and what came from a cache do not compare"
        return
    (quick, quick_name), (slow, slow_name) = sorted(
        [(now, _NAMES[scope]), (earlier, _NAMES[other])], key=lambda way: way[0].compile_seconds
    )
    saved_ms = quick.step_ms - slow.step_ms
    if saved_ms > 0:
        steps = (slow.compile_seconds - quick.compile_seconds) * 1000 / saved_ms
        line += f". Compiling {slow_name} is ahead after {steps:.0f} steps"
    else:
        line += f". Compiling {quick_name} is ahead from the first step on"
    yield line


def not_compared(*, cache_dir: bool) -> Iterator[str]:
    """How to learn whether repeated blocks are the better choice."""
    how = "the same cache_dir" if cache_dir else "one cache_dir for both runs"
    yield (
        "repeated blocks were not compared with the whole model: what is between blocks runs eagerly, and steps may be "
        f"slower. A run with {_ARGUMENTS['whole']} and {how} compares them"
    )


def spared_part(module: nn.Module, blocks: Sequence[RepeatedBlocks]) -> float:
    """The part of a model's weights in blocks that another one's graph would serve."""
    spared = {weight for found in blocks for block in found.members[1:] for weight in block.module.parameters()}
    return sum(w.numel() for w in spared) / max(sum(w.numel() for w in module.parameters()), 1)


def blocks_to_share(compile_seconds: float, blocks: Sequence[RepeatedBlocks]) -> Iterator[str]:
    """That a model which took long to compile has repeated blocks."""
    if blocks:
        most = max(blocks, key=lambda found: found.count)
        yield (
            f"compiling took {compile_seconds:.1f} s, and {most.name!r} are {most.count} blocks of one structure: "
            f"{_ARGUMENTS['repeated']} compiles one graph for all of them, whose steps may be slower"
        )


def _cost(report: PhaseReport, *, loaded: bool) -> Cost | None:
    """What was measured of a phase; of candidates, of the one that was chosen."""
    if report.compile_seconds is None or report.compiled_step_ms is None or report.samples is None:
        return None
    chosen = next((trial["candidate"] for trial in report.trials if trial["verdict"] == "chosen"), None)
    of_chosen = [e for e in report.events if e["kind"] == "compile" and e.get("settings") == chosen]
    return Cost(
        compile_seconds=report.compile_seconds if chosen is None else sum(e.get("seconds", 0) for e in of_chosen),
        cold=not (report.cache_hits or loaded),
        step_ms=report.compiled_step_ms,
        samples=report.samples,
    )


def _in_words(cost: Cost) -> str:
    cached = "" if cost.cold else " (in part from a cache)"
    if cost.cold and cost.second:
        cached = " (second, so less where torch's cache folder had kernels of the first)"
    return f"{cost.compile_seconds:.1f} s to compile{cached}, {cost.step_ms:.2f} ms a step"
