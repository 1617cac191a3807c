"""`GraphPass` and `graph_pass`: custom Inductor graph passes that know the phase and the kind of graph."""

from __future__ import annotations

import contextvars
import functools
import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, overload

import torch
from torch.fx import Graph

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_choice, check_type
from compile_callbacks._utils.phases import Phase
from compile_callbacks.passes.identity import identity_of, sources_of

HOOK_OPTIONS: Mapping[str, str] = {
    "pre_grad": "pre_grad_custom_pass",
    "joint_pre": "joint_custom_pre_pass",
    "joint_post": "joint_custom_post_pass",
    "post_grad_pre": "post_grad_custom_pre_pass",
    "post_grad_post": "post_grad_custom_post_pass",
}
"""The hook points, the points at which Inductor runs custom passes, in their order. Each has an Inductor option."""

DEFAULT_HOOK = "post_grad_post"

_numbers = itertools.count()

GraphKind = Literal["module", "joint", "forward", "backward", "inference"]
"""The content of a graph: ``"module"``, the module's calls before autograd; ``"joint"``, forward and backward in one
graph; ``"forward"`` or ``"backward"``; and ``"inference"``, a graph without a backward pass."""


def graph_kind(hook: str, graph: Graph) -> GraphKind:
    """Return the kind of a graph at a hook point. AOTAutograd's names for the inputs show the kind."""
    if hook == "pre_grad":
        return "module"
    inputs = [str(node.target) for node in graph.find_nodes(op="placeholder")]
    if hook.startswith("joint"):
        return "joint" if any(name.startswith(("primals", "tangents")) for name in inputs) else "inference"
    if any(name.startswith("tangents") for name in inputs):
        return "backward"
    return "forward" if any(name.startswith("primals") for name in inputs) else "inference"


def is_inference_graph(hook: str, graph: Graph) -> bool:
    """Return whether a graph has no backward pass, as the flag of torch's own passes says."""
    if hook != "pre_grad":
        return graph_kind(hook, graph) == "inference"
    # Autograd has not run yet. AOTAutograd also creates an inference graph if no output requires grad, but that is
    # unknown here.
    owner = graph.owning_module
    values = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    values += owner.parameters() if owner is not None else []
    requires_grad = any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
    return not (torch.is_grad_enabled() and requires_grad)


current_phase: contextvars.ContextVar[Phase | None] = contextvars.ContextVar("phase", default=None)

Function = Callable[[torch.fx.Graph, bool], None]


def with_inference_flag(call: Callable[..., None]) -> Callable[..., None]:
    """Wrap a pass's ``__call__`` to determine ``is_inference``, because torch does not pass it at each hook point."""

    @functools.wraps(call)
    def with_flag(self: Any, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        return call(self, graph, is_inference_graph(self.hook, graph) if is_inference is None else is_inference)

    return with_flag


class GraphPass(ABC):
    """A custom Inductor graph pass, as a class.

    Derive from this class, and change the graph in place in ``__call__(graph, is_inference)``. ``is_inference`` has the
    same meaning as in torch: the graph has no backward pass. It is ``True`` for each graph of validation, test and
    predict, and ``False`` for the forward and the backward graphs of training. If all parameters of a module are
    frozen, its graphs are inference graphs in training, too. ``self.phase`` is ``"train"`` or ``"infer"``.

    Pass an object of the class to `InductorCompile` or `InductorConfig`. Without this library, set the Inductor option
    of its hook point: ``torch.compile(options={"post_grad_custom_post_pass": my_pass})``.

    Attributes:
        hook: The point at which Inductor runs the pass:

            - ``"pre_grad"``: on the graph of torch functions and methods that Dynamo traced, before autograd;
            - ``"joint_pre"``, ``"joint_post"``: on ATen operators, before and after Inductor's own joint passes. In
              training the graph has both forward and backward; otherwise it is the inference graph;
            - ``"post_grad_pre"``, ``"post_grad_post"`` (the default): on ATen operators, before and after Inductor's
              own post-grad passes. In training the forward and the backward graph are separate.

    Note:
        torch copies its options, but copying a pass returns the same object, so you can read the data that the pass
        recorded. Do not store a Trainer, module or logger in a pass. A pass does not run if torch's cache has the
        compiled graph.

    Example::

        >>> class CountNodes(GraphPass):
        ...     def __call__(self, graph, is_inference):
        ...         print(len(graph.nodes), is_inference)
    """

    hook: ClassVar[str] = DEFAULT_HOOK
    _sources: ClassVar[list[str] | None]
    _identity: str | None
    _number: int

    def __new__(cls, *args: Any, **kwargs: Any) -> GraphPass:
        """Create the pass, and compute its identity, because its arguments may change later."""
        _torch.inductor.register_pass_type(GraphPass)
        self = super().__new__(cls)
        self._identity = identity_of(cls, vars(cls).get("_sources"), [args, kwargs])
        self._number = next(_numbers)
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._sources = sources_of(cls)  # read while Python imports the file, because the user may edit it later
        check_choice(f"{cls.__name__}.hook", cls.hook, list(HOOK_OPTIONS))
        if "__call__" in vars(cls):
            cls.__call__ = with_inference_flag(cls.__call__)  # type: ignore[method-assign]

    @abstractmethod
    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        """Change the graph in place.

        Args:
            graph: The graph. At ``"joint_pre"`` and later, ``meta["val"]`` of a node is its value as a fake tensor.
            is_inference: Whether the graph has no backward pass.
        """

    @property
    def phase(self) -> Phase | None:
        """The phase that is being compiled, ``"train"`` or ``"infer"``. ``None`` outside this library."""
        return current_phase.get()

    @property
    def name(self) -> str:
        """The name of the pass in messages and reports."""
        return type(self).__name__

    def uuid(self) -> str | None:
        """Return the identity of this pass for the key of torch's compile cache.

        The identity covers the source file of the class and of its base classes outside torch, their plain attributes,
        the constructor's arguments, the hook point and this library's version. It does not cover other files that the
        code imports or reads.

        An argument or a class attribute can be a number, string, enum, dtype, device, operator, small tensor, function
        with a source file, or a list, tuple or dict of these. For any other value, and for a class that is defined in a
        function or in a notebook, this method returns ``None``, and torch does not cache the graph.
        """
        return self._identity

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPass:
        return self


def pass_types() -> tuple[type, ...]:
    """Return the classes of graph passes, from this library and from torch."""
    return (GraphPass, *_torch.inductor.pass_types())


class FunctionPass(GraphPass):
    """A pass that calls a function. `graph_pass` creates it."""

    def __init__(self, function: Function, hook: str = DEFAULT_HOOK) -> None:
        check_choice("hook", hook, list(HOOK_OPTIONS))
        self.function = function
        self.hook = hook  # type: ignore[misc]

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        """Call the function."""
        return self.function(graph, is_inference)

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", type(self.function).__name__)


@overload
def graph_pass(function: Function, /) -> FunctionPass: ...


@overload
def graph_pass(*, hook: str = ...) -> Callable[[Function], FunctionPass]: ...


def graph_pass(
    function: Function | None = None, /, *, hook: str = DEFAULT_HOOK
) -> FunctionPass | Callable[[Function], FunctionPass]:
    """Make a function a graph pass.

    Args:
        function: The function, which takes ``(graph, is_inference)`` and changes the graph in place.
        hook: The hook point. See `GraphPass`.

    Raises:
        TypeError: If ``function`` does not accept two arguments.
        ValueError: If the hook point is unknown.

    Example::

        >>> @graph_pass
        ... def count_nodes(graph, is_inference):
        ...     print(len(graph.nodes), is_inference)
        >>> count_nodes.name
        'count_nodes'
    """
    if function is None:
        return functools.partial(graph_pass, hook=hook)
    check_type("function", function, Callable, "a function of (graph, is_inference)")  # type: ignore[arg-type]
    try:
        inspect.signature(function).bind(None, False)
    except TypeError as error:
        text = f"function={function!r} must take (graph, is_inference): {error}"
        raise TypeError(with_code("CC202", text)) from None
    return FunctionPass(function, hook)


def as_passes(value: Any, argument: str) -> tuple[Any, ...]:
    """Check the passes of an argument."""
    if isinstance(value, pass_types()):
        return (value,)
    check_type(argument, value, (list, tuple), "a list of graph passes")
    for item in value:
        if isinstance(item, pass_types()):
            continue
        if isinstance(item, type) and issubclass(item, pass_types()):
            hint = f"an object of the class: {item.__name__}(...)"
        elif callable(item):
            hint = "the function wrapped with compile_callbacks.graph_pass"
        else:
            hint = "a GraphPass, a function wrapped with graph_pass, or an object of torch's CustomGraphPass"
        text = f"{argument} contains {item!r}, which is not a graph pass; use {hint}"
        raise TypeError(with_code("CC202", text))
    return tuple(value)


def pass_name(graph_pass: Any) -> str:
    """Return the name of a pass for messages and reports. The pass may be an object of torch's own pass classes."""
    if isinstance(graph_pass, GraphPass):
        return graph_pass.name
    return getattr(graph_pass, "__name__", type(graph_pass).__name__)  # a function of `torch._inductor.config`


def pass_hook(graph_pass: Any) -> str:
    """Return the hook point of a pass. Passes of torch's own classes run at the default hook point."""
    return getattr(graph_pass, "hook", DEFAULT_HOOK)


def pass_identity(graph_pass: Any) -> str:
    """Return the name and the uuid of a pass, for the key of a config.

    Passes without a uuid differ by their number in this process, which is the same on all ranks.
    """
    uuid = graph_pass.uuid()
    identity = getattr(graph_pass, "_number", None) if uuid is None else uuid
    return f"{type(graph_pass).__module__}.{pass_name(graph_pass)}:{identity!r}"
