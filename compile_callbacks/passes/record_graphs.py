"""`RecordGraphs`: a graph pass that writes graphs to files and to TensorBoard."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch.fx import Graph

from compile_callbacks._utils.messages import check_choice, check_type
from compile_callbacks.passes.base import DEFAULT_HOOK, HOOK_OPTIONS, GraphKind, GraphPass, graph_kind
from compile_callbacks.passes.rewriting import count_ops


@dataclass(frozen=True)
class RecordedGraph:
    """A graph as text.

    Attributes:
        title: The number, phase, kind and hook point, such as ``"000_infer_inference_post_grad_post"``.
        kind: The kind of the graph.
        is_inference: Whether the graph has no backward pass.
        text: The text, with one line for each node.
        ops: The number of calls of each operator, by operator name, such as ``"aten.mul.Tensor"``.
    """

    title: str
    kind: GraphKind
    is_inference: bool
    text: str
    ops: Counter[str]


class RecordGraphs(GraphPass):
    """Writes each graph to a file, and to TensorBoard's text tab at the end of a run.

    The pass does not change the graph. With this pass, torch does not use its compile cache, so the pass gets each
    graph. A line of a graph looks like this::

        mul: "f32[4, 16]" = torch.ops.aten.mul.Tensor(linear, 0.5)

    Args:
        folder: The folder for the files, whose names are `RecordedGraph.title`. If ``None``, the pass writes no files.
        hook: The hook point. See `GraphPass`. Passes at one hook point run in the order of ``passes``. To see the
            changes of a pass, put one `RecordGraphs` before the pass and one after it.

    Raises:
        TypeError: If the folder is not a path.
        ValueError: If the hook point is unknown.
        OSError: If the folder cannot be created.

    Example::

        >>> record = RecordGraphs(hook="joint_post")
        >>> record.graphs
        []
    """

    def __init__(self, folder: str | Path | None = None, *, hook: str = DEFAULT_HOOK) -> None:
        check_choice("hook", hook, list(HOOK_OPTIONS))
        check_type("folder", folder, (str, Path, type(None)), "a path or None")
        self.hook = hook  # type: ignore[misc]
        self.folder = None if folder is None else Path(folder)
        self.graphs: list[RecordedGraph] = []
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Record the graph."""
        kind = graph_kind(self.hook, graph)
        title = f"{len(self.graphs):03d}_{self.phase or 'no_phase'}_{kind}_{self.hook}"
        text = graph.python_code("self", verbose=True).src
        self.graphs.append(RecordedGraph(title, kind, is_inference, text, count_ops(graph)))
        if self.folder is not None:
            (self.folder / f"{title}.txt").write_text(text)

    def uuid(self) -> None:
        """Return ``None``, so that torch compiles each graph again instead of loading it from its cache."""
        return
