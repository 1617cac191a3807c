"""Compiles an inference graph as two subgraphs. The backend calls `compile_inner` instead of Inductor's function."""

from __future__ import annotations

import contextlib
import contextvars
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_post_hook

from compile_callbacks import _torch
from compile_callbacks.folding.split import Split, split


@dataclass(frozen=True)
class Folding:
    """Folds the graphs of one compile."""

    limit_mib: float  # the maximum memory for the folded tensors of a graph
    on_refresh: Callable[[], None] = lambda: None  # called each time a graph has computed its folded tensors
    graphs: list[FoldedGraph] = field(default_factory=list)  # the folded graphs, including graphs from torch's cache
    failures: list[str] = field(default_factory=list)  # the reasons why graphs are not folded

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within the ``with`` block, `compile_inner` folds graphs, and torch's cache returns folded graphs."""
        token = _active.set(self)
        try:
            # The result depends on the limit, so the key of torch's cache contains it.
            with _torch.inductor.bundled_cache(tag=f"fold_weights={self.limit_mib}"):
                yield
        finally:
            _active.reset(token)


_active: contextvars.ContextVar[Folding | None] = contextvars.ContextVar("folding", default=None)


def compile_inner(module: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a graph as two subgraphs if that saves work. This function is the ``inner_compile`` of ``compile_fx``."""
    folding = _active.get()
    parts = None
    if folding is not None and kwargs.get("is_inference"):
        try:
            parts = split(module, set(kwargs.get("static_input_idxs", ())), int(folding.limit_mib * 2**20))
            constants = _compile_constants(parts, example_inputs) if parts is not None else None
        except Exception as error:
            folding.failures.append(f"{type(error).__name__}: {error}")
            parts = None
    if folding is None or parts is None:
        return _torch.inductor.compile_inner(module, example_inputs, **kwargs)
    inputs = [*parts.folded, *(example_inputs[place] for place in parts.keeps)]
    main = _torch.inductor.compile_inner(parts.main, inputs, **{**kwargs, "static_input_idxs": parts.static})
    graph = FoldedGraph(parts, constants, main)
    graph.join(folding)
    return graph


def _compile_constants(parts: Split, example_inputs: Sequence[Any]) -> Any:
    inputs = [*parts.folded, *(example_inputs[place] for place in parts.reads)]
    # The constant subgraph runs rarely and writes to its own memory, so autotuning and CUDA graphs gain nothing. Users
    # write passes for their own graph, not for this subgraph.
    with _torch.inductor.separate_compile():
        return _torch.inductor.compile_inner(
            parts.constants,
            inputs,
            static_input_idxs=range(len(inputs)),
            cudagraphs=_torch.inductor.no_cudagraphs(),
            is_inference=True,
        )


class FoldedGraph(_torch.inductor.output_code_class()):  # type: ignore[misc]
    """Calls the main subgraph with tensors that the constant subgraph computed from the current weights.

    The memory of these tensors keeps its address, so that CUDA graphs can replay on it.
    """

    def __init__(self, parts: Split, constants: Any, main: Any) -> None:
        super().__init__()
        self.folded_bytes = sum(tensor.nbytes for tensor in parts.folded)
        self._layouts = [(tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for t in parts.folded]
        self._reads, self._keeps = parts.reads, parts.keeps
        self._constants, self._main = constants, main
        self._boxed_call = True
        self._reset()

    def _reset(self) -> None:
        self._on_refresh: Callable[[], None] | None = None
        self._hook: Any = None
        self._pick, self._keep = _picker(self._reads), _picker(self._keeps)
        self.free()

    def __call__(self, args: list[Any]) -> Any:
        """Call the graph and empty the list, as torch's calling convention for compiled graphs requires."""
        weights = self._pick(args)
        if self._stale or not self._knows(weights):
            self._refresh(weights)
        inputs = [*self._memory, *self._keep(args)]
        args.clear()
        return self._main(inputs)

    def join(self, folding: Folding) -> None:
        """Add this graph to the graphs of a compile."""
        self._on_refresh = folding.on_refresh
        folding.graphs.append(self)

    def free(self) -> None:
        """Free the memory of the folded tensors. The next call computes them again."""
        self._stale = True
        self._memory: list[torch.Tensor] = []
        self._seen: tuple[torch.Tensor, ...] = ()
        self._ids: set[int] = set()
        self._versions: list[int] = []
        self.__del__()

    def __del__(self) -> None:
        if getattr(self, "_hook", None) is not None:
            self._hook.remove()
            self._hook = None

    def invalidate_weights(self) -> None:
        """Compute the folded tensors again at the next call, even if the weights look unchanged."""
        self._stale = True

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the parameters after an optimizer step, because fused optimizers do not increment versions."""
        if not self._stale:
            stepped = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            self._stale = any(id(parameter) in self._ids for parameter in stepped)

    def _knows(self, weights: tuple[torch.Tensor, ...]) -> bool:
        # This takes 16 µs for the 267 weights of a ResNet-50, mostly for the versions (docs/how_to/cuda_graphs.md). An
        # edit through ``.data`` changes neither identity nor version.
        return all(map(operator.is_, weights, self._seen)) and self._versions == [w._version for w in weights]

    def _refresh(self, weights: tuple[torch.Tensor, ...]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if not self._memory:
                self._memory = [torch.empty_strided(*sizes, dtype=d, device=on) for *sizes, d, on in self._layouts]
            self._constants([*self._memory, *weights])
        if self._hook is None:
            method = weakref.WeakMethod(self.after_step)
            self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: (live := method()) and live(optimizer))
        # Inference tensors have no version, so we cannot detect their changes, and the results are always stale.
        self._stale = any(weight.is_inference() for weight in weights)
        self._seen, self._ids = weights, set(map(id, weights))
        self._versions = [] if self._stale else [weight._version for weight in weights]
        if self._on_refresh is not None:
            self._on_refresh()

    def prepare_for_serialization(self) -> None:
        """Called by torch on a copy, before torch pickles the copy into its cache."""
        self._hook = None  # because the hook belongs to the original
        self._reset()
        del self._pick, self._keep
        self._constants = _torch.inductor.serializable(self._constants)
        self._main = _torch.inductor.serializable(self._main)

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: dict[str, Any]) -> None:
        """Called by torch after its cache has returned the graph."""
        self._reset()
        with torch.inference_mode(False), torch.no_grad():
            folded = [_torch.graphs.fake_tensor(*layout) for layout in self._layouts]
        inputs = [*folded, *(example_inputs[place] for place in self._reads)]
        with _torch.inductor.separate_compile():
            without_cudagraphs = {**graph_kwargs, "cudagraphs": _torch.inductor.no_cudagraphs()}
            self._constants = _torch.inductor.restored(self._constants, inputs, without_cudagraphs)
        inputs = [*folded, *(example_inputs[place] for place in self._keeps)]
        self._main = _torch.inductor.restored(self._main, inputs, graph_kwargs)
        if (folding := _active.get()) is not None:
            self.join(folding)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Do nothing, because each subgraph has its own bundle of Triton kernels."""


def _picker(places: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(places) == 1:
        return lambda args: (args[places[0]],)
    return operator.itemgetter(*places) if places else lambda args: ()
