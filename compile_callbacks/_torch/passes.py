"""Custom graph passes and the pattern matcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import custom_graph_pass as _custom_graph_pass

TORCH_PASSES_FLAG = hasattr(_custom_graph_pass, "CustomInferenceAwareGraphPass")
"""Whether torch passes ``is_inference`` to post-grad passes. Workaround (torch<2.13): later versions do."""

GRAPH_PASS_BASE: Any = getattr(_custom_graph_pass, "CustomInferenceAwareGraphPass", _custom_graph_pass.CustomGraphPass)

TORCH_PASS_TYPES: tuple[type, ...] = (_custom_graph_pass.CustomGraphPass,)


def pool_offsets_to_indices() -> Any:
    """Inductor's operator from the 8-bit offsets of a max pooling, within windows, to indices in the image."""
    from torch._inductor import inductor_prims

    return inductor_prims._low_memory_max_pool_offsets_to_indices


def inference_flag_of_caller() -> bool:
    """The ``is_inference`` that ``post_grad_passes`` was called with, read from its frame on the stack.

    Workaround (torch<2.13): torch does not pass the flag to custom passes, and a pass cannot reach it otherwise.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "post_grad_passes" and "is_inference" in frame.f_locals:
            return bool(frame.f_locals["is_inference"])
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("is_inference is known only while torch runs its post-grad passes")


def run_pass(graph_pass: Any, graph: torch.fx.Graph, is_inference: bool) -> Any:
    """Call a pass with the arguments that its class takes."""
    if TORCH_PASSES_FLAG and isinstance(graph_pass, GRAPH_PASS_BASE):
        return graph_pass(graph, is_inference)
    return graph_pass(graph)


def pattern_matcher(
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    example_inputs: Sequence[torch.Tensor],
    admits: Callable[[torch.Tensor, dict[str, Any]], bool],
    name: str,
) -> Callable[[torch.fx.Graph], int]:
    """Return torch's pattern matcher for one pattern: a function that changes a graph and counts the changes.

    ``admits`` decides on each match, by its output and its inputs as fake tensors.
    """
    from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def value(argument: Any) -> Any:
        return argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument

    def check(match: Any) -> bool:
        return admits(value(match.output_node()), {name: value(argument) for name, argument in match.kwargs.items()})

    matcher = PatternMatcherPass(pass_name=name)
    # torch's own patterns are traced in the middle of a compile too.
    with torch._guards.tracing(None), unset_fake_temporarily(), torch.no_grad():
        inputs = [tensor.detach().clone() for tensor in example_inputs]
        register_replacement(pattern, replacement, inputs, fwd_only, matcher, extra_check=check)
    return lambda graph: int(matcher.apply(graph))
