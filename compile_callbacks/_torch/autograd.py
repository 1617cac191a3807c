"""Wraps autograd and AOTAutograd: backward passes, hooks on saved tensors, and modes that captured graphs enter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from compile_callbacks._torch.graphs import add_node
from compile_callbacks._torch.ports import optional


@optional("versions", lambda: contextlib.nullcontext)
def preserve_versions() -> Callable[[Any], contextlib.AbstractContextManager[Any]]:
    """Return a class of context managers in which writes do not raise the version counters of tensors.

    Each call of a graph uses the class, which needs no frame of ours.
    """
    return torch.autograd.grad_mode._unsafe_preserve_version_counter


def outside_activation_checkpoints() -> contextlib.AbstractContextManager[Any]:
    """Hide the saved tensors of a ``with`` block from an activation checkpoint around it, which counts them."""
    # Autograd only calls the innermost hooks. Setting hooks raises an error if the user has disabled them.
    hooks = [lambda tensor: tensor] * 2
    return torch.autograd.graph.saved_tensors_hooks(*hooks) if saves_through_hooks() else contextlib.nullcontext()


@optional("backward", lambda: False)
def in_backward() -> bool:
    """Return whether the current thread runs a backward pass, in which activation checkpoints call modules again."""
    return torch._C._current_graph_task_id() != -1


@optional("backward", lambda: True)
def saves_through_hooks() -> bool:
    """Return whether hooks handle the tensors that are saved for backward, as in an activation checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@optional("backward", lambda: True)
def graph_is_kept() -> bool:
    """Return whether the running backward pass keeps its graph (``retain_graph=True``).

    Workaround (until torch has public functions for this, `in_backward` and `saves_through_hooks`; pytorch#131038).
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def save_copies(forward_graph: torch.fx.GraphModule, buffers: Collection[int]) -> None:
    """Change a training graph so that it saves copies of its buffers, and of the inputs that it overwrites.

    Workaround (until the partitioner does not save inputs that are written before the backward pass; pytorch#197039):
    if the backward pass needs the former value of an input that the graph writes, torch 2.11 to 2.15 save the input
    itself, and its gradients are wrong. Both kinds of spectral norm do this. If the user's code copies a buffer,
    Inductor removes the copy and saves the buffer, which later code may write, as a queue of keys::

        before:  copy_(u, new_u); return y, u
        after:   saved = clone(u); copy_(u, new_u); return y, saved
    """
    graph, aten = forward_graph.graph, torch.ops.aten
    writes = graph.find_nodes(op="call_function", target=aten.copy_.default)
    inputs = graph.find_nodes(op="placeholder")
    overwritten = {_memory(value) for write in writes for value in write.args[:2]} | {
        _memory(inputs[i]) for i in buffers
    }
    if not overwritten:
        return
    # Inductor compiles ``lift_fresh_copy`` as a copy, but removes ``clone`` if it knows no reason for a copy. In the
    # mode "lite", it removes nothing, and would run the copy after the write, because an operator of torch writes.
    runs_operators = torch._inductor.config.fallback_by_default
    copy = aten.clone.default if runs_operators else aten.lift_fresh_copy.default
    output: Any = graph.output_node()
    results = list(output.args[0])
    count: int = torch._guards.TracingContext.get().fw_metadata.num_forward  # type: ignore[union-attr]
    assert 0 < count <= len(results), "torch counts the outputs of a forward graph in another way"
    for i in range(count, len(results)):
        saved = results[i]
        if not isinstance(saved, torch.fx.Node) or _memory(saved) not in overwritten:
            continue
        with graph.inserting_after(inputs[-1] if saved.op == "placeholder" else saved):
            results[i] = add_node(graph, copy, (saved,))
    output.args = (tuple(results),)
    forward_graph.recompile()


def _memory(node: Any) -> object:
    """Return an object that is equal for all views of one tensor."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


@optional("backward")
def overwrite_no_saved_tensors() -> None:
    """Let the backward pass of the graph that AOTAutograd compiles run more than once (``retain_graph=True``).

    Workaround (until AOTAutograd supports ``retain_graph=True`` with donated buffers; pytorch#130580): if the graph is
    kept and ``donated_buffer`` is ``True`` when the backward pass runs, it raises an error, unless the list of the
    saved tensors that it overwrites is empty instead of missing (2.11 to 2.15).
    """
    torch._guards.TracingContext.get().fw_metadata.bw_donated_idxs = []  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------ modes


@contextlib.contextmanager
def restored_after_error() -> Iterator[None]:
    """Restore the current modes if the ``with`` block raises: levels of torch.func and forward AD, grad mode, autocast.

    Eager code uses context managers. In a captured graph, one operator enters a mode and another one leaves it. If an
    operator between them raises, the mode stays active in later calls.

    Workaround (until torch has public functions for the levels of `torch.func` and forward-mode AD; no issue).
    """
    transforms, leave_transform, exit_forward_ad = _transforms()
    autocast = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    ]
    grad, nesting, level = torch.is_grad_enabled(), _autocast_nesting(), transforms()
    try:
        yield
    except BaseException:
        while transforms() > level:
            leave_transform()
        if not level:  # no transform has entered forward AD before
            with contextlib.suppress(RuntimeError):  # torch raises if the level is not active
                exit_forward_ad(level=0)
        torch.set_grad_enabled(grad)
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        for _ in range(_autocast_nesting() - nesting):
            torch.autocast_decrement_nesting()
        raise


@optional("transform levels", lambda: (int, int, lambda level: None))
def _transforms() -> tuple[Callable[[], int], Callable[[], Any], Callable[..., None]]:
    """Return functions for the number of active transforms, to leave the innermost one, and to leave forward AD."""
    functorch, exit_level = torch._C._functorch, torch._C._exit_dual_level
    return functorch.get_dynamic_layer_stack_depth, functorch.pop_dynamic_layer_stack, exit_level


def _autocast_nesting() -> int:
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting


@optional("modes", str)
def dispatch_mode() -> str:
    """Return the name of the innermost `TorchDispatchMode` of the user, or an empty string. Dynamo skips all frames."""
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    return "" if mode is None or mode.ignore_compile_internals() else type(mode).__name__.strip("_")
