"""A pass that writes down each graph it sees, to read and to compare."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch.fx import Graph

from compile_callbacks._utils.messages import unknown
from compile_callbacks.passes.base import GraphPass
from compile_callbacks.passes.hooks import DEFAULT_HOOK, HOOK_OPTIONS, GraphKind, graph_kind
from compile_callbacks.passes.nodes import count_ops


@dataclass(frozen=True)
class RecordedGraph:
    """A graph as text.

    Attributes:
        title: Number, phase, what the graph holds, and hook point: ``"000_infer_inference_post_grad_post"``.
        kind: What the graph holds.
        is_inference: Whether no autograd graph is behind it.
        text: A line for each node.
        ops: The number of calls of each operator, by name: ``"aten.mul.Tensor"``.
    """

    title: str
    kind: GraphKind
    is_inference: bool
    text: str
    ops: Counter[str]


class RecordGraphs(GraphPass):
    """Writes each graph to a file of its own, and to TensorBoard's text tab at the end of a run.

    It changes nothing, in training and in inference. Torch's compile cache is left alone, so that it sees every
    graph. A line of a graph looks like this::

        mul: "f32[4, 16]" = torch.ops.aten.mul.Tensor(linear, 0.5)

    Args:
        folder: Where the files go, named as `RecordedGraph.title`; ``None`` writes none.
        hook: The hook point at which it looks; see `GraphPass`. Give one for each point of interest: those of one hook
            point run in the order of ``passes``, so that one before and one after a pass show what it did.

    Raises:
        TypeError: A folder that is no path.
        ValueError: An unknown hook point.
        OSError: The folder cannot be made.

    Example::

        >>> record = RecordGraphs(hook="joint_post")
        >>> record.graphs
        []
    """

    def __init__(self, folder: str | Path | None = None, *, hook: str = DEFAULT_HOOK) -> None:
        if hook not in HOOK_OPTIONS:
            raise ValueError(unknown("hook", hook, HOOK_OPTIONS))
        if folder is not None and not isinstance(folder, (str, Path)):
            raise TypeError(f"folder={folder!r} must be a path or None, not {type(folder).__name__}")
        self.hook = hook  # type: ignore[misc]
        self.folder = None if folder is None else Path(folder)
        self.graphs: list[RecordedGraph] = []
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Write the graph down."""
        kind = graph_kind(self.hook, graph)
        title = f"{len(self.graphs):03d}_{self.phase or 'no_phase'}_{kind}_{self.hook}"
        recorded = RecordedGraph(title, kind, is_inference, graph_text(graph), count_ops(graph))
        self.graphs.append(recorded)
        if self.folder is not None:
            (self.folder / f"{title}.txt").write_text(recorded.text)

    def uuid(self) -> None:
        """None: torch's cache would have the graphs compiled without being seen."""
        return


def graph_text(graph: Graph) -> str:
    """A graph as text, as torch's own logs show graphs: a line of code for each node, with dtypes and shapes."""
    return graph.python_code("self", verbose=True).src
