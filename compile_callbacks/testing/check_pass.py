"""`check_pass`: tests a graph pass. It records the graphs before and after the pass, and compares results with eager.

Example::

    def test_my_pass():
        result = check_pass(MyPass(), torch.nn.Linear(4, 4), torch.randn(2, 4), phase="infer")
        assert result.ops_after["aten.mul.Tensor"] == 0
        result.assert_close()
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from compile_callbacks._utils.errors import CompileError
from compile_callbacks._utils.messages import check_choice, check_type
from compile_callbacks._utils.phases import MODE_ARGUMENTS, PHASES, Phase
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.passes.base import as_passes, pass_hook
from compile_callbacks.passes.manager import find_pass_error
from compile_callbacks.passes.record_graphs import RecordedGraph, RecordGraphs
from compile_callbacks.session.grad_mode import compile_phases, restore


@dataclass(frozen=True)
class PassCheck:
    """The result of `check_pass`: the graphs before and after the pass, and the compiled and eager outputs.

    Attributes:
        before: The graphs before the pass.
        after: The graphs after the pass.
        actual: The compiled outputs. In the train phase, also the gradients of inputs and parameters.
        expected: The eager outputs. In the train phase, also the gradients of inputs and parameters.
    """

    before: tuple[RecordedGraph, ...]
    after: tuple[RecordedGraph, ...]
    actual: Any
    expected: Any

    @property
    def changed(self) -> bool:
        """Whether the pass changed a graph."""
        return [graph.text for graph in self.before] != [graph.text for graph in self.after]

    @property
    def ops_before(self) -> Counter[str]:
        """The number of calls of each operator in all graphs before the pass."""
        return sum((graph.ops for graph in self.before), Counter())

    @property
    def ops_after(self) -> Counter[str]:
        """The number of calls of each operator in all graphs after the pass."""
        return sum((graph.ops for graph in self.after), Counter())

    @property
    def max_abs_error(self) -> float:
        """The largest absolute difference from eager in any element."""
        pairs = zip(tree_leaves(self.actual), tree_leaves(self.expected), strict=True)
        errors = [(a.to(torch.complex128) - b).abs().max() for a, b in pairs if torch.is_tensor(a) and a.numel()]
        return float(max(errors, default=0.0))

    def assert_close(self, *, rtol: float | None = None, atol: float | None = None) -> None:
        """Compare the compiled results with eager by `torch.testing.assert_close`.

        Raises:
            AssertionError: If a result differs from eager by more than the tolerances.
        """
        torch.testing.assert_close(self.actual, self.expected, rtol=rtol, atol=atol)


def check_pass(
    graph_pass: Any,
    module: nn.Module,
    *inputs: Any,
    phase: Phase = "infer",
    options: Mapping[str, Any] | None = None,
) -> PassCheck:
    """Compile a copy of a module with a pass, call the copy once, and compare the results with eager.

    Args:
        graph_pass: The pass.
        module: The module. Its copy is in training mode in the train phase, and in evaluation mode in the infer phase.
        inputs: The positional inputs of the call.
        phase: ``"infer"`` calls the module without gradients. ``"train"`` calls it with gradients, and runs backward
            through the sum of its outputs.
        options: Inductor options to compile with.

    Raises:
        TypeError: If ``graph_pass`` is not a graph pass, or ``module`` is not a ``torch.nn.Module``.
        ValueError: If the phase is unknown.
        GraphPassError: If the pass raises an exception or leaves an invalid graph.
    """
    (graph_pass,) = as_passes((graph_pass,), "graph_pass")
    check_type("module", module, nn.Module, "a torch.nn.Module")
    check_choice("phase", phase, PHASES)
    before, after = RecordGraphs(hook=pass_hook(graph_pass)), RecordGraphs(hook=pass_hook(graph_pass))
    config = InductorConfig(options=options or {}, passes=(before, graph_pass, after))
    modes: dict[str, Any] = {argument: config if phase == of else None for of, argument in MODE_ARGUMENTS.items()}
    compiled = compile_phases(copy.deepcopy(module), **modes, on_error="raise", verify="off")
    try:
        actual = _results(compiled, inputs, phase)
    except CompileError as error:
        raise find_pass_error(error) or error from None
    finally:
        restore(compiled)
    expected = _results(copy.deepcopy(module), inputs, phase)
    return PassCheck(tuple(before.graphs), tuple(after.graphs), actual, expected)


def _results(module: nn.Module, inputs: tuple[Any, ...], phase: Phase) -> Any:
    module, inputs = module.train(phase == "train"), copy.deepcopy(inputs)
    torch.manual_seed(0)
    with torch.set_grad_enabled(phase == "train"):
        outputs = module(*inputs)
    if phase == "infer":
        return outputs
    differentiable = [out for out in tree_leaves(outputs) if isinstance(out, torch.Tensor) and out.requires_grad]
    if differentiable:
        torch.autograd.backward([out.sum() for out in differentiable])
    leaves = [*module.parameters(), *(x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor))]
    gradients = [leaf.grad for leaf in leaves if leaf.requires_grad]
    return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), gradients
