"""`PassManager`: runs the passes of one hook point and one phase in order, and checks the graph after each pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from compile_callbacks import _torch
from compile_callbacks._utils.fingerprints import digest
from compile_callbacks._utils.phases import Phase
from compile_callbacks.passes.base import (
    HOOK_OPTIONS,
    GraphKind,
    GraphPass,
    current_phase,
    graph_kind,
    pass_hook,
    pass_name,
    with_inference_flag,
)


class GraphPassError(RuntimeError):
    """Raised if a graph pass raises an exception or leaves an invalid graph.

    Attributes:
        failed: The pass that failed.
    """

    failed: Any = None


def find_pass_error(error: BaseException) -> GraphPassError | None:
    """Return the error of the graph pass that caused ``error``, or ``None`` if no pass caused it."""
    return next((cause for cause in _torch.dynamo.error_chain(error) if isinstance(cause, GraphPassError)), None)


@dataclass(frozen=True, kw_only=True)
class PassRun:
    """The run of one pass on one graph.

    Attributes:
        name: The name of the pass.
        hook: The hook point.
        graph: The kind of the graph.
        is_inference: Whether the graph has no backward pass.
        seconds: The duration of the pass in seconds.
        nodes_before: The number of nodes before the pass.
        nodes_after: The number of nodes after the pass.
        changed: Whether the pass changed the graph.
    """

    name: str
    hook: str
    graph: GraphKind
    is_inference: bool
    seconds: float
    nodes_before: int
    nodes_after: int
    changed: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the run as JSON-ready data."""
        return asdict(self)


@dataclass(eq=False, repr=False)
class PassManager:
    """The pass that torch runs at a hook point. It runs the user's passes in order, and calls ``on_run`` after each."""

    passes: tuple[Any, ...]
    hook: str
    phase: Phase
    on_run: Callable[[PassRun], None]

    @with_inference_flag
    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Run the passes."""
        token = current_phase.set(self.phase)
        try:
            for graph_pass in self.passes:
                self._run(graph_pass, graph, is_inference)
        finally:
            current_phase.reset(token)

    def _run(self, graph_pass: Any, graph: Graph, is_inference: bool) -> None:
        before, inputs, outputs, started = _nodes(graph), _inputs(graph), _outputs(graph), time.perf_counter()
        try:
            takes_flag = isinstance(graph_pass, (GraphPass, *_torch.inductor.pass_types()[1:]))
            returned = graph_pass(graph, is_inference) if takes_flag else graph_pass(graph)
        except Exception as error:
            raise self._error(graph_pass, f"raised {type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - started
        if (problem := _problem(inputs, outputs, graph, returned)) is not None:
            raise self._error(graph_pass, problem)
        self.on_run(
            PassRun(
                name=pass_name(graph_pass),
                hook=self.hook,
                graph=graph_kind(self.hook, graph),
                is_inference=is_inference,
                seconds=seconds,
                nodes_before=len(before),
                nodes_after=len(graph.nodes),
                changed=before != _nodes(graph),
            )
        )

    def _error(self, graph_pass: Any, what: str) -> GraphPassError:
        error = GraphPassError(f"graph pass {pass_name(graph_pass)!r} at {self.hook} in the {self.phase} phase {what}")
        error.failed = graph_pass
        return error

    def uuid(self) -> str | None:
        """Return a hash of the passes' uuids, the hook point and the phase, or ``None`` if a pass has no uuid."""
        uuids = [self._uuid_of(graph_pass) for graph_pass in self.passes]
        return None if None in uuids else digest([self.hook, self.phase, *map(repr, uuids)])

    def _uuid_of(self, graph_pass: Any) -> Any:
        try:
            return graph_pass.uuid() if hasattr(graph_pass, "uuid") else None
        except Exception as error:
            raise self._error(graph_pass, f"has a uuid() that raised {type(error).__name__}: {error}") from error

    def __deepcopy__(self, memo: object = None) -> PassManager:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        # torch 2.11 pickles the options into its cache key, including the pass at "pre_grad".
        if (uuid := self.uuid()) is None:
            raise TypeError("a pass has no uuid, so torch must not cache its graphs")
        return str, (uuid,)


def pass_options(
    passes: Sequence[Any],
    phase: Phase,
    on_run: Callable[[PassRun], None] = lambda run: None,
    *,
    skipped: Collection[Any] = (),
) -> dict[str, PassManager]:
    """Return the Inductor options that run these passes, except ``skipped``, in one phase.

    A pass that the user or another library has set in ``torch._inductor.config`` runs before the passes at its hook.
    """
    _torch.inductor.register_pass_type(PassManager)
    options, settings = {}, _torch.inductor.settings()
    for hook, option in HOOK_OPTIONS.items():
        at_hook = [graph_pass for graph_pass in passes if pass_hook(graph_pass) == hook]
        of_process = [set_pass] if at_hook and (set_pass := getattr(settings, option)) is not None else []
        run = tuple(p for p in (*of_process, *at_hook) if not any(p is failed for failed in skipped))
        if run:
            options[option] = PassManager(run, hook, phase, on_run)
    return options


def _problem(inputs: list[Any], outputs: list[tuple[str, str | None]], graph: Graph, returned: Any) -> str | None:
    """Return the reason why a graph that had these inputs and outputs is invalid after a pass, or ``None``."""
    if returned is not None:
        return f"returned {type(returned).__name__}: a pass changes the graph in place and returns nothing"
    try:
        graph.lint()
    except Exception as error:
        return f"left a graph that is not well formed: {error}"
    if (new_inputs := _inputs(graph)) != inputs:
        return f"changed the graph's inputs from {inputs} to {new_inputs}"
    if len(new_outputs := _outputs(graph)) != len(outputs):
        return f"changed the number of the graph's outputs from {len(outputs)} to {len(new_outputs)}"
    for place, ((name, kind), (new_name, new_kind)) in enumerate(zip(outputs, new_outputs, strict=True)):
        if None not in (kind, new_kind) and kind != new_kind:
            return f"changed output {place} from {kind} ({name}) to {new_kind} ({new_name})"
    return None


def _nodes(graph: Graph) -> list[Any]:
    return [(node, node.op, node.target, node.args, node.kwargs) for node in graph.nodes]


def _inputs(graph: Graph) -> list[Any]:
    return [node.target for node in graph.find_nodes(op="placeholder")]


def _outputs(graph: Graph) -> list[tuple[str, str | None]]:
    """Return the name of each output, and its dtype and shape if known."""
    outputs = []
    for value in tree_leaves([node.args for node in graph.find_nodes(op="output")]):
        tensor = value.meta.get("val") if isinstance(value, Node) else None
        kind = f"{tensor.dtype}{list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else None
        outputs.append((str(value), kind and kind.removeprefix("torch.")))
    return outputs
