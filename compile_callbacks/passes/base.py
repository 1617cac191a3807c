"""`GraphPass` and `graph_pass`: custom Inductor graph passes, and their identity for torch's compile cache."""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import operator
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.files import digest, installed_version
from compile_callbacks._utils.messages import check_choice, check_type
from compile_callbacks._utils.phases import Phase

HOOK_OPTIONS: Mapping[str, str] = {
    "pre_grad": "pre_grad_custom_pass",
    "joint_pre": "joint_custom_pre_pass",
    "joint_post": "joint_custom_post_pass",
    "post_grad_pre": "post_grad_custom_pre_pass",
    "post_grad_post": "post_grad_custom_post_pass",
}
"""The hook points, the points at which Inductor runs custom passes, in their order. Each has an Inductor option."""

DEFAULT_HOOK = "post_grad_post"

_PLAIN: tuple[type, ...] = (
    *(bool, int, float, str, bytes, type(None), enum.Enum, torch.dtype, torch.device),
    *_torch.graphs.OPERATOR_TYPES,
)

_numbers = itertools.count()


def graph_kind(hook: str, graph: Graph) -> str:
    """Return the kind of a graph at a hook point. AOTAutograd's names for the inputs show the kind."""
    if hook == "pre_grad":
        return "module"
    names = {str(node.target).partition("_")[0] for node in graph.find_nodes(op="placeholder")}
    if names.isdisjoint({"primals", "tangents"}):
        return "inference"
    if hook.startswith("joint"):
        return "joint"
    return "backward" if "tangents" in names else "forward"


def _sources_of(kind: type) -> dict[type, str] | None:
    """Return the sources of a class and its bases, without those of torch and Python, or ``None`` in a notebook."""
    excluded = {"torch", *sys.stdlib_module_names}
    try:
        return {base: _source(base) for base in kind.__mro__ if base.__module__.partition(".")[0] not in excluded}
    except (OSError, TypeError, KeyError):  # no file
        return None


def _source(value: Any) -> str:
    """Return the source file of a class or a function, which contains the code that it calls in the same file."""
    return inspect.getsource(sys.modules[value.__module__])


class GraphPass(ABC):
    """A custom Inductor graph pass, as a class.

    Derive from this class, and change the graph in place in ``__call__(graph, is_inference)``. ``is_inference`` has the
    same meaning as in torch: the graph has no backward pass. It is ``True`` for each graph of validation, test and
    predict, and ``False`` for the forward and the backward graphs of training. If all parameters of a module are
    frozen, its graphs are inference graphs in training, too. ``self.phase`` is ``"train"`` or ``"infer"``.

    Pass an object of the class to `InductorCompile` or `InductorConfig`. The hook point must be set in the class or in
    the constructor.

    Attributes:
        hook: The point at which Inductor runs the pass:

            - ``"pre_grad"``: on the graph of torch functions and methods that Dynamo traced, before autograd.
              ``is_inference`` then only tells if grad is disabled;
            - ``"joint_pre"``, ``"joint_post"``: on ATen operators, before and after Inductor's own joint passes. In
              training the graph has both forward and backward; otherwise it is the inference graph;
            - ``"post_grad_pre"``, ``"post_grad_post"`` (the default): on ATen operators, before and after Inductor's
              own post-grad passes. In training the forward and the backward graph are separate.
        phase: The phase that was compiled last, ``"train"`` or ``"infer"``.

    Note:
        torch copies its options, but copying a pass returns the same object, so you can read the data that the pass
        recorded. Do not store a Trainer, module or logger in a pass. A pass does not run if torch's cache has the
        compiled graph.

    Example::

        >>> class CountNodes(GraphPass):
        ...     def __call__(self, graph, is_inference):
        ...         print(len(graph.nodes), is_inference)
    """

    hook: str = DEFAULT_HOOK
    phase: Phase | None = None
    _sources: dict[type, str] | None
    _identity: str | None
    _key: str | int

    def __new__(cls, *args: Any, **kwargs: Any) -> GraphPass:
        """Create the pass, and compute its identity, because its arguments may change later."""
        self = super().__new__(cls)
        self._identity = _identity_of(cls, [args, kwargs])
        self._key = self._identity or next(_numbers)
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._sources = _sources_of(cls)  # read while Python imports the file, because the user may edit it later

    @abstractmethod
    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        """Change the graph in place.

        Args:
            graph: The graph. At ``"joint_pre"`` and later, ``meta["val"]`` of a node is its value as a fake tensor.
            is_inference: Whether the graph has no backward pass.
        """

    @property
    def name(self) -> str:
        """The name of the pass in messages and reports."""
        return type(self).__name__

    def uuid(self) -> str | None:
        """Return the identity of this pass for the key of torch's compile cache.

        The identity covers the source file of the class and of its base classes outside torch, their plain attributes,
        the constructor's arguments, the hook point and this library's version. It does not cover other files that the
        code imports or reads.

        An argument or a class attribute can be a number, string, enum, dtype, device, operator, function with a source
        file, or a list, tuple or dict of these. For any other value, and for a class that is defined in a function or
        in a notebook, this method returns ``None``, and torch does not cache the graph.
        """
        return self._identity

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPass:
        return self


class FunctionPass(GraphPass):
    """A pass that calls a function, with the function's name. `graph_pass` creates it."""

    name = ""

    def __init__(self, function: Callable[[Graph, bool], None], hook: str = DEFAULT_HOOK) -> None:
        self.function, self.hook, self.name = function, hook, pass_name(function)

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Call the function."""
        return self.function(graph, is_inference)


def graph_pass(function: Callable[[Graph, bool], None] | None = None, /, *, hook: str = DEFAULT_HOOK) -> Any:
    """Make a function a graph pass.

    Args:
        function: The function, which takes ``(graph, is_inference)`` and changes the graph in place.
        hook: The hook point. See `GraphPass`.

    Example::

        >>> @graph_pass
        ... def count_nodes(graph, is_inference):
        ...     print(len(graph.nodes), is_inference)
        >>> count_nodes.name
        'count_nodes'
    """
    return functools.partial(graph_pass, hook=hook) if function is None else FunctionPass(function, hook)


def as_passes(value: Any) -> tuple[GraphPass, ...]:
    """Check the argument ``passes``."""
    value = [value] if isinstance(value, GraphPass) else value
    check_type("passes", value, (list, tuple), "a list of graph passes")
    for item in value:
        if not isinstance(item, GraphPass):
            hint = "an object of a class that is derived from GraphPass, or a function in graph_pass(...)"
            raise TypeError(with_code("CC202", f"passes contains {item!r}, which is not a graph pass; use {hint}"))
        check_choice(f"{item.name}.hook", item.hook, list(HOOK_OPTIONS))
    return tuple(value)


def pass_name(graph_pass: Any) -> str:
    """Return the name of a pass, also of a function or an object of torch's own pass classes."""
    return str(getattr(graph_pass, "name", None) or getattr(graph_pass, "__name__", type(graph_pass).__name__))


def pass_identity(graph_pass: Any) -> str:
    """Return the name and the key of a pass for the key of a config, which is the same on all ranks."""
    key = graph_pass._key if isinstance(graph_pass, GraphPass) else getattr(graph_pass, "uuid", lambda: None)()
    return f"{getattr(graph_pass, '__module__', '')}.{pass_name(graph_pass)}:{key!r}"


def _identity_of(kind: type[GraphPass], arguments: Any) -> str | None:
    """Return a hash of a class and its constructor's arguments, or ``None`` if a value has no description."""
    described: list[Any] = [installed_version("compile-callbacks"), f"{kind.__module__}.{kind.__qualname__}"]
    try:
        for base in kind.__mro__:
            if operator.attrgetter(base.__qualname__)(sys.modules[base.__module__]) is not base:
                return None  # code created the class, so its source does not describe it
        for base, source in vars(kind)["_sources"].items():
            described.append(source)
            for name, value in vars(base).items():
                is_method = callable(value) or hasattr(type(value), "__get__")
                if not is_method and not name.startswith(("__", "_abc_", "_sources")):
                    described.append([name, _described(value)])
        return digest([*described, _described(arguments)])
    except Exception:  # a value has no description, or a file cannot be read
        return None


def _described(value: Any) -> str:
    """Return a text that differs for different values, and is the same in each process."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{','.join(map(_described, value))}]"
    if isinstance(value, dict):
        return f"dict[{','.join(sorted(map(_described, value.items())))}]"
    if isinstance(value, types.FunctionType):
        captured = [cell.cell_contents for cell in value.__closure__ or ()]
        # The positions distinguish functions of the same name, such as two lambdas in one file.
        code = [_source(value), value.__qualname__, list(value.__code__.co_positions())]
        return f"{code} {_described([captured, value.__defaults__, value.__kwdefaults__])}"
    raise TypeError(f"{value!r} has no description")
