"""Everything that only torch 2.11 and 2.12 need. Delete the file and its calls when torch 2.13 is the oldest."""

from __future__ import annotations

import types
from typing import Any

import torch

from compile_callbacks._torch import graphs

IS_2_11 = torch.__version__.startswith("2.11.")
IS_OLDER_THAN_2_13 = IS_2_11 or torch.__version__.startswith("2.12.")


# ------------------------------------------------------------------------------------------ recompiles


def function_with_own_cache(function: types.FunctionType, name: str) -> types.FunctionType:
    """Copy a function with its code object, because Dynamo stores compiled graphs and counts recompiles by code object.

    Workaround (torch<2.13; pytorch#178351): later, ``torch.compile(isolate_recompiles=True)`` does the same.
    """
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def trace_settings(*, frozen: bool) -> dict[str, bool]:
    """Return the settings of Dynamo without which it does not notice some changes of a module.

    Workaround (torch<2.12; pytorch#139476, pytorch#163064): with the first shortcut, torch does not notice a new
    ``requires_grad``, a new dtype set through ``.data``, and a buffer that is an input and changes in the call. With
    the second one, it does not notice the first parameter of a module.
    """
    shortcuts = "skip_tensor_guards_with_matching_dict_tags", "use_recursive_dict_tags_for_guards"
    return dict.fromkeys(shortcuts, False) if IS_2_11 and not frozen else {}


# ------------------------------------------------------------------------------------------ wrong results


def is_captured_wrongly(graph_module: torch.fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo contains a `torch.autograd.Function` that torch captures with wrong gradients.

    Workaround (torch<2.13; pytorch#184113): if an operator in ``forward`` changes a tensor in place, the captured
    function returns the tensor twice, and the gradient of the first copy gets lost.
    """
    apply = torch.ops.higher_order.autograd_function_apply
    for node in graphs.all_nodes(graph_module) if IS_OLDER_THAN_2_13 else ():
        if node.target is apply:
            forward: Any = getattr(node.graph.owning_module, node.args[0].target)  # type: ignore[union-attr,arg-type]
            outputs, _ = forward.graph.output_node().args[0]  # and the saved tensors
            values = [output.meta.get("example_value") for output in outputs if isinstance(output, torch.fx.Node)]
            memory = [value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)]
            if len(set(memory)) < len(memory):
                return True
    return False


def ends_at_gradient(graph_module: torch.fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo ends because the code calls `torch.autograd.grad`.

    Workaround (torch<2.13; pytorch#91469): older versions compile the code before such a call as a graph, whose
    gradient cannot be differentiated. Later versions compile none of it, or trace the call.
    """
    reason = getattr(getattr(graph_module, "compile_subgraph_reason", None), "reason", "")
    return "`torch.autograd.grad`" in reason


def autocast_state() -> str:
    """Return the enabled autocast, by device, as a tag for the cache.

    Workaround (torch<2.12; pytorch#181564): AOTAutograd's key contains whether autocast is enabled, but not its dtype.
    The cache would return a graph for bfloat16 under float16.
    """
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return " ".join(f"autocast_{device}={torch.get_autocast_dtype(device)}" for device in devices)
