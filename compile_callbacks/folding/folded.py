"""A graph compiled in two halves: the weight half runs when weights changed, the main half on every call."""

from __future__ import annotations

import contextlib
import contextvars
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from compile_callbacks import _torch
from compile_callbacks.folding.fold_settings import FoldSettings
from compile_callbacks.folding.split import Split, split

_settings: contextvars.ContextVar[FoldSettings | None] = contextvars.ContextVar("fold", default=None)


@contextlib.contextmanager
def folding(settings: FoldSettings) -> Iterator[None]:
    """Let `compile_inner` fold graphs, and let torch's cache return folded graphs."""
    token = _settings.set(settings)
    try:
        # Folding depends on these settings, so that they belong to the key of torch's cache.
        with _torch.caches.bundled_cache(tag=f"fold_weights={settings.limit_mib}"):
            yield
    finally:
        _settings.reset(token)


def compile_inner(module: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a graph, in two halves if that saves work; the ``inner_compile`` of ``compile_fx``."""
    settings = _settings.get()
    if settings is not None and kwargs.get("is_inference"):
        try:
            halves = split(module, set(kwargs.get("static_input_idxs", ())), int(settings.limit_mib * 2**20))
            if halves is not None:
                weights = _compile_weight_half(halves, example_inputs)
        except Exception as error:
            settings.on_left_out(f"{type(error).__name__}: {error}")
            halves = None
        if halves is not None:
            inputs = [*halves.folded, *(example_inputs[place] for place in halves.keeps)]
            main = _torch.inductor.compile_inner(halves.main, inputs, **{**kwargs, "static_input_idxs": halves.static})
            folded = FoldedGraph(halves, weights, main)
            folded.announce(settings)
            return folded
    return _torch.inductor.compile_inner(module, example_inputs, **kwargs)


def _compile_weight_half(halves: Split, example_inputs: Sequence[Any]) -> Any:
    inputs = [*halves.folded, *(example_inputs[place] for place in halves.reads)]
    # The weight half runs rarely and writes to its own memory, so that autotuning and CUDA graphs gain nothing. Passes
    # are written for the user's graph, not for this one.
    with _torch.inductor.aside_of_main_graph():
        return _torch.inductor.compile_inner(
            halves.weights,
            inputs,
            static_input_idxs=range(len(inputs)),
            cudagraphs=_torch.inductor.no_cudagraphs(),
            is_inference=True,
        )


class FoldedGraph(_torch.inductor.output_code_class()):  # type: ignore[misc]
    """Calls the main half with tensors that the weight half computed from the current weights.

    Attributes:
        folded_bytes: The memory of the folded tensors.
    """

    def __init__(self, halves: Split, weights: Any, main: Any) -> None:
        super().__init__()
        self.folded_bytes = halves.folded_bytes
        self._layouts = [(tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for t in halves.folded]
        self._reads, self._keeps = halves.reads, halves.keeps
        self._weights, self._main = weights, main
        self._boxed_call = True
        self._begin()

    def _begin(self) -> None:
        self._on_refresh: Callable[[], None] = _nothing
        self._stale = True
        self._memory: list[torch.Tensor] = []
        self._seen: tuple[torch.Tensor, ...] = ()
        self._ids: set[int] = set()
        self._versions: list[int] = []
        self._hook: Any = None
        self._pick, self._keep = _picker(self._reads), _picker(self._keeps)

    def __call__(self, args: list[Any]) -> Any:
        """Call the graph and empty the list, as torch's calling convention for compiled graphs requires."""
        weights = self._pick(args)
        if self._stale or not self._knows(weights):
            self._refresh(weights)
        inputs = [*self._memory, *self._keep(args)]
        args.clear()
        return self._main(inputs)

    def announce(self, settings: FoldSettings) -> None:
        """Report this graph, and from now on each run of its weight half."""
        self._on_refresh = settings.on_refresh
        settings.on_folded(self)

    def free(self) -> None:
        """Free the memory of the folded tensors; the next call computes them again."""
        self._memory, self._seen, self._ids, self._stale = [], (), set(), True
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __del__(self) -> None:
        if getattr(self, "_hook", None) is not None:
            self._hook.remove()

    def invalidate_weights(self) -> None:
        """Run the weight half before the next call, even if no change of the weights is visible."""
        self._stale = True

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every optimizer step: fused optimizers change weights without changing their versions."""
        if not self._stale:  # as it is from the second step after a validation on
            stepped = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            self._stale = any(id(parameter) in self._ids for parameter in stepped)

    def _knows(self, weights: tuple[torch.Tensor, ...]) -> bool:
        # 16 µs for the 267 weights of a ResNet-50, mostly for the versions (docs/fold_weights.md). An edit through
        # ``.data`` changes neither identity nor version.
        return all(map(operator.is_, weights, self._seen)) and self._versions == [w._version for w in weights]

    def _refresh(self, weights: tuple[torch.Tensor, ...]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if not self._memory:
                self._memory = [
                    torch.empty_strided(size, stride, dtype=dtype, device=device)
                    for size, stride, dtype, device in self._layouts
                ]
            self._weights([*self._memory, *weights])
        if self._hook is None:
            method = weakref.WeakMethod(self.after_step)
            self._hook = _torch.autograd.after_optimizer_steps(
                lambda optimizer, *_: (live := method()) and live(optimizer)
            )
        # Inference tensors have no version, so that results computed from them may be outdated at any time.
        self._stale = any(weight.is_inference() for weight in weights)
        self._seen, self._ids = weights, set(map(id, weights))
        self._versions = [] if self._stale else [weight._version for weight in weights]
        self._on_refresh()

    # ------------------------------------------------------------------------------------------ torch's cache

    def prepare_for_serialization(self) -> None:
        """Called on a copy, before it is pickled into torch's cache."""
        self._weights, self._main = _torch.caches.serializable(self._weights), _torch.caches.serializable(self._main)
        self._begin()
        del self._pick, self._keep

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: dict[str, Any]) -> None:
        """Called after torch's cache returned the graph."""
        self._begin()
        with torch.inference_mode(False), torch.no_grad():
            folded = [_torch.graphs.fake_tensor(*layout) for layout in self._layouts]
        with _torch.inductor.aside_of_main_graph():
            self._weights = _torch.caches.restored(
                self._weights,
                [*folded, *(example_inputs[place] for place in self._reads)],
                {**graph_kwargs, "cudagraphs": _torch.inductor.no_cudagraphs()},
            )
        self._main = _torch.caches.restored(
            self._main, [*folded, *(example_inputs[place] for place in self._keeps)], graph_kwargs
        )
        if (settings := _settings.get()) is not None:
            self.announce(settings)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Do nothing: each half has its own bundle."""


def _picker(places: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(places) == 1:
        return lambda args: (args[places[0]],)
    return operator.itemgetter(*places) if places else lambda args: ()


def _nothing() -> None:
    pass
