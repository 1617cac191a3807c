"""A pass as a pattern and what replaces it, on torch's own pattern matcher."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph

from compile_callbacks import _torch
from compile_callbacks._utils.messages import unknown
from compile_callbacks._utils.phases import Phase
from compile_callbacks.passes.base import GraphPass
from compile_callbacks.passes.hooks import DEFAULT_HOOK, HOOK_OPTIONS

_HOOKS = [hook for hook in HOOK_OPTIONS if hook != "pre_grad"]


@dataclass(frozen=True, kw_only=True)
class PatternMatch:
    """A place in a graph where a pattern is found.

    Attributes:
        is_inference: Whether the graph has no autograd graph behind it.
        phase: The phase that is compiled; ``None`` outside this library.
        output: The pattern's result as a fake tensor: ``output.dtype``, ``output.device``, ``output.shape``.
        inputs: What is there for each of the pattern's arguments, as a fake tensor or a number.
    """

    is_inference: bool
    phase: Phase | None
    output: torch.Tensor
    inputs: dict[str, Any]


class PatternPass(GraphPass):
    """Replaces what a function computes by what another computes; `pattern_pass` makes it.

    Attributes:
        replaced: How often it found its pattern, in all graphs so far.
    """

    def __init__(
        self,
        pattern: Callable[..., torch.Tensor],
        replacement: Callable[..., torch.Tensor],
        example_inputs: Sequence[torch.Tensor],
        where: Callable[[PatternMatch], bool] | None = None,
        hook: str = DEFAULT_HOOK,
    ) -> None:
        for name, value in (("pattern", pattern), ("replacement", replacement)):
            if not callable(value):
                raise TypeError(f"{name}={value!r} must be a function of tensors")
            try:
                inspect.signature(value)
            except ValueError:
                raise TypeError(
                    f"{name}={value!r} is built in, and tells nothing of its arguments; give a function that calls it"
                ) from None
        if where is not None and not callable(where):
            raise TypeError(f"where={where!r} must be a function of a PatternMatch")
        if isinstance(example_inputs, torch.Tensor) or not isinstance(example_inputs, (list, tuple)):
            raise TypeError(f"example_inputs={example_inputs!r} must be a list of tensors, one for each argument")
        if hook not in _HOOKS:
            raise ValueError(unknown("hook", hook, _HOOKS))
        _check_same(pattern, replacement, example_inputs)
        self.pattern = pattern
        self.replacement = replacement
        self.example_inputs = tuple(example_inputs)
        self.where = where
        self.hook = hook  # type: ignore[misc]
        self.replaced = 0
        self._is_inference = False
        self._matcher: Any = None

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Replace the pattern wherever it is found and ``where`` agrees."""
        if self._matcher is None:
            self._matcher = _torch.passes.pattern_matcher(
                self.pattern, self.replacement, self.example_inputs, self._admits, self.name
            )
        self._is_inference = is_inference
        self.replaced += self._matcher(graph)

    def _admits(self, output: torch.Tensor, inputs: dict[str, Any]) -> bool:
        if self.where is None:
            return True
        return bool(
            self.where(PatternMatch(is_inference=self._is_inference, phase=self.phase, output=output, inputs=inputs))
        )

    @property
    def name(self) -> str:
        """The pattern's name."""
        return getattr(self.pattern, "__name__", type(self.pattern).__name__)


def pattern_pass(
    pattern: Callable[..., torch.Tensor],
    replacement: Callable[..., torch.Tensor],
    example_inputs: Sequence[torch.Tensor],
    *,
    where: Callable[[PatternMatch], bool] | None = None,
    hook: str = DEFAULT_HOOK,
) -> PatternPass:
    """A pass that replaces what one function computes by what another computes.

    Both are traced to ATen operators. The pattern is found where the same operators stand, whatever the shapes, and
    where nothing else reads what lies between its inputs and its output.

    Args:
        pattern: What to look for: a function of tensors that returns one.
        replacement: What to compute instead, with the same arguments.
        example_inputs: A tensor for each argument, of the number of dimensions and the dtype that the pattern has; they
            are small, as both functions are called with them.
        where: Asked for each place where the pattern is found; see `PatternMatch`.
        hook: Where the pass runs, ``"joint_pre"`` or later: before autograd there are no ATen operators.

    Raises:
        TypeError: An argument of the wrong type, or a function that cannot be called with the example inputs.
        ValueError: The two functions do not give tensors of the same shape and dtype, or an unknown hook point.

    Example::

        >>> double = pattern_pass(lambda x: x * 2, lambda x: x + x, [torch.ones(3)])
        >>> double.hook
        'post_grad_post'
    """
    return PatternPass(pattern, replacement, example_inputs, where, hook)


def _check_same(pattern: Callable[..., Any], replacement: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
    results = []
    for name, function in (("pattern", pattern), ("replacement", replacement)):
        try:
            with torch.no_grad():
                result = function(*inputs)
        except Exception as error:
            raise TypeError(f"{name} cannot be called with example_inputs: {type(error).__name__}: {error}") from error
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"{name} must return a tensor, not {type(result).__name__}")
        results.append(f"{result.dtype}{list(result.shape)}")
    if results[0] != results[1]:
        raise ValueError(f"pattern gives {results[0]} for example_inputs, and replacement {results[1]}")
