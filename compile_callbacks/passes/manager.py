"""`PassManager`: runs the passes of one hook point and one phase in order, and checks the graph after each pass."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from compile_callbacks import _torch
from compile_callbacks._utils.files import digest
from compile_callbacks._utils.messages import error_chain
from compile_callbacks._utils.phases import Phase
from compile_callbacks.passes.base import HOOK_OPTIONS, GraphPass, graph_kind, pass_name


class GraphPassError(RuntimeError):
    """Raised if a graph pass raises an exception or leaves an invalid graph."""


def find_pass_error(error: BaseException) -> GraphPassError | None:
    """Return the error of the graph pass that caused ``error``, or ``None`` if no pass caused it."""
    return next((cause for cause in error_chain(error) if isinstance(cause, GraphPassError)), None)


@dataclass(eq=False, repr=False)
class PassManager:
    """The pass that torch runs at a hook point. It runs the user's passes in order, and calls ``on_run`` after each."""

    passes: tuple[Any, ...]
    hook: str
    phase: Phase
    on_run: Callable[[dict[str, Any]], None]

    def __call__(self, graph: Graph) -> None:
        """Run the passes."""
        kind = graph_kind(self.hook, graph)
        # Before autograd, it is unknown whether an output requires grad.
        is_inference = kind == "inference" or (kind == "module" and not torch.is_grad_enabled())
        for graph_pass in self.passes:
            before, count, interface, started = str(graph), len(graph.nodes), _interface(graph), time.perf_counter()
            if isinstance(graph_pass, GraphPass):
                graph_pass.phase = self.phase
            gets_flag = len(inspect.signature(graph_pass).parameters) > 1  # torch has classes of passes without it
            try:
                graph_pass(graph, is_inference) if gets_flag else graph_pass(graph)
                seconds = time.perf_counter() - started
                graph.lint()
                _check_same(interface, _interface(graph))
            except Exception as error:
                where = f"graph pass {pass_name(graph_pass)!r} at {self.hook} in the {self.phase} phase"
                raise GraphPassError(f"{where} failed: {type(error).__name__}: {error}") from error
            run = {"name": pass_name(graph_pass), "hook": self.hook, "graph": kind, "is_inference": is_inference}
            run |= {"seconds": seconds, "nodes_before": count, "nodes_after": len(graph.nodes)}
            self.on_run(run | {"changed": before != str(graph)})

    def uuid(self) -> str | None:
        """Return a hash of the passes' uuids, the hook point and the phase, or ``None`` if a pass has no uuid."""
        uuids = [graph_pass.uuid() if hasattr(graph_pass, "uuid") else None for graph_pass in self.passes]
        return None if None in uuids else digest([self.hook, self.phase, *map(repr, uuids)])

    def __deepcopy__(self, memo: object) -> PassManager:
        return self

    def __reduce__(self) -> Any:
        # torch 2.11 pickles the options into its cache key, including the pass at "pre_grad".
        if (uuid := self.uuid()) is None:
            raise TypeError("a pass has no uuid, so torch must not cache its graphs")
        return str, (uuid,)


def with_passes(
    options: Mapping[str, Any],
    passes: Sequence[GraphPass],
    phase: Phase,
    on_run: Callable[[dict[str, Any]], None] = lambda run: None,
) -> dict[str, Any]:
    """Return Inductor options that also run these passes in one phase, after the user's own pass at a hook point."""
    _torch.inductor.register_pass_type(PassManager)
    changed = dict(options)
    for hook, option in HOOK_OPTIONS.items():
        first = options.get(option, getattr(_torch.inductor.settings(), option))
        at_hook = [*(first if isinstance(first, (list, tuple)) else [first]), *(p for p in passes if p.hook == hook)]
        if run := tuple(p for p in at_hook if p is not None):
            changed[option] = PassManager(run, hook, phase, on_run)
        elif first is not None:
            changed[option] = None
    return changed


def _interface(graph: Graph) -> list[str | None]:
    """Return the name of each input, and the dtype and shape of each output. ``None`` is unknown."""
    nodes = [node for node in tree_leaves(graph.output_node().args) if isinstance(node, Node)]
    values = [node.meta.get("val") for node in nodes]
    outputs = [f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else None for value in values]
    return [*(str(node.target) for node in graph.find_nodes(op="placeholder")), *outputs]


def _check_same(before: list[str | None], after: list[str | None]) -> None:
    """Refuse changes of the inputs and outputs of a graph."""
    for old, new in itertools.zip_longest(before, after, fillvalue="nothing"):
        if old != new and (None not in (old, new) or "nothing" in (old, new)):
            raise ValueError(f"the graph has {new} in place of {old} among its inputs and outputs")
