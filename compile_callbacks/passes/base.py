"""Custom Inductor graph passes that are told whether they run on an inference graph, and for which phase."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar, overload

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.import_ref import class_and_arguments, resolve
from compile_callbacks._utils.messages import part_of, unknown
from compile_callbacks._utils.phases import Phase
from compile_callbacks.passes.hooks import DEFAULT_HOOK, HOOK_OPTIONS, is_inference_graph
from compile_callbacks.passes.identity import DescribedCall, describe_call, identity_of_call

_current_phase: contextvars.ContextVar[Phase | None] = contextvars.ContextVar("phase", default=None)

Function = TypeVar("Function", bound=Callable[[torch.fx.Graph, bool], None])


def _with_flag_filled_in(call: Callable[..., None]) -> Callable[..., None]:
    """``call`` with ``is_inference`` found out where torch does not give it."""

    @functools.wraps(call)
    def with_flag(self: GraphPass, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        return call(self, graph, is_inference_graph(self.hook, graph) if is_inference is None else is_inference)

    return with_flag


class GraphPass(_torch.passes.GRAPH_PASS_BASE):  # type: ignore[misc]
    """A custom Inductor graph pass, as a class.

    Derive from it, and change the graph in place in ``__call__(graph, is_inference)``. ``is_inference`` is
    torch's own meaning: the graph has no autograd graph behind it. It is ``True`` for every graph of
    validation, test and predict, and ``False`` for the forward and the backward graph of training; a module
    whose parameters are all frozen gives ``True`` in training too. A pass that wants the phase asks for
    ``self.phase``.

    A pass may be handed to `InductorCompile` and `InductorConfig`, or straight to
    ``torch.compile(options={"post_grad_custom_post_pass": my_pass})``, at the option of its hook point.

    Attributes:
        hook: Where it runs:

            - ``"pre_grad"``: on the graph that Dynamo traced, of torch's functions and methods; once for forward and
              backward;
            - ``"joint_pre"``, ``"joint_post"``: on ATen operators, before and after Inductor's own joint passes: in
              training on forward and backward in one graph, else on the inference graph;
            - ``"post_grad_pre"``, ``"post_grad_post"`` (the default): on ATen operators, before and after Inductor's
              own post-grad passes: on forward and backward by themselves, or the inference graph.

    Note:
        torch copies the options that it is given; a pass is copied by reference, so that what it records is seen
        by whoever made it. Keep no Trainer, module or logger in it. A pass does not run where torch finds
        the graph in its cache.

    Example::

        >>> class CountNodes(GraphPass):
        ...     def __call__(self, graph, is_inference):
        ...         print(len(graph.nodes), is_inference)
    """

    hook: ClassVar[str] = DEFAULT_HOOK
    _identity: DescribedCall | str | None

    def __new__(cls, *args: Any, **kwargs: Any) -> GraphPass:
        """Describe the arguments, for `uuid`."""
        self = super().__new__(cls)
        # Described now: an argument that is changed later must not change the identity of compiled code.
        self._identity = describe_call(args, kwargs)
        return self  # type: ignore[no-any-return]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.hook not in HOOK_OPTIONS:
            raise ValueError(unknown(f"{cls.__name__}.hook", cls.hook, HOOK_OPTIONS))
        if "__call__" in vars(cls):
            cls.__call__ = _with_flag_filled_in(cls.__call__)  # type: ignore[method-assign]

    @abstractmethod
    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        """Change the graph in place.

        Args:
            graph: The post-grad graph of ATen operators; a node's ``meta["val"]`` is its value as a fake tensor.
            is_inference: Whether the graph has no autograd graph behind it.
        """

    @property
    def phase(self) -> Phase | None:
        """The phase that is being compiled, ``"train"`` or ``"infer"``; ``None`` outside this library."""
        return _current_phase.get()

    @property
    def name(self) -> str:
        """What messages and reports call this pass."""
        return type(self).__name__

    def uuid(self) -> str | None:
        """The identity of this pass in the key of torch's compile cache.

        It covers the code of the class and of all its bases outside of torch, the functions, classes and values that
        this code refers to by a global name, the constructor's arguments, the hook point and this library's version.
        ``None`` if one of these cannot be described: an object of another kind than numbers, strings, dtypes,
        devices, enums, functions, classes, passes, and lists and mappings of those. Torch then skips its cache.

        The identity is taken once, at the first call.
        """
        if isinstance(self._identity, DescribedCall):
            self._identity = identity_of_call(self, [str(type(self).hook)], self._identity)
        return self._identity

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_identity": self.uuid()}

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPass:
        return self


PASS_TYPES = (GraphPass, *_torch.passes.TORCH_PASS_TYPES)
"""The classes of graph passes: this library's and torch's own."""


class FunctionPass(GraphPass):
    """A function as a pass; what `graph_pass` makes."""

    def __init__(self, function: Callable[[torch.fx.Graph, bool], None], hook: str = DEFAULT_HOOK) -> None:
        if hook not in HOOK_OPTIONS:
            raise ValueError(unknown("hook", hook, HOOK_OPTIONS))
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
def graph_pass(function: Callable[[torch.fx.Graph, bool], None], /) -> FunctionPass: ...


@overload
def graph_pass(*, hook: str = ...) -> Callable[[Callable[[torch.fx.Graph, bool], None]], FunctionPass]: ...


def graph_pass(
    function: Callable[[torch.fx.Graph, bool], None] | None = None, /, *, hook: str = DEFAULT_HOOK
) -> FunctionPass | Callable[[Callable[[torch.fx.Graph, bool], None]], FunctionPass]:
    """Make a function a graph pass.

    Args:
        function: Called with ``(graph, is_inference)``; changes the graph in place.
        hook: Where it runs; see `GraphPass`.

    Raises:
        TypeError: ``function`` cannot be called with two arguments.
        ValueError: An unknown hook point.

    Example::

        >>> @graph_pass
        ... def count_nodes(graph, is_inference):
        ...     print(len(graph.nodes), is_inference)
        >>> count_nodes.name
        'count_nodes'
    """
    if function is None:
        return functools.partial(graph_pass, hook=hook)
    if not callable(function):
        raise TypeError(f"function={function!r} must be a function of (graph, is_inference)")
    try:
        inspect.signature(function).bind(None, False)
    except TypeError as error:
        raise TypeError(f"function={function!r} must take (graph, is_inference): {error}") from None
    return FunctionPass(function, hook)


def as_passes(value: object, argument: str) -> tuple[Any, ...]:
    """The passes of an argument, checked; those that are given as data are made.

    Raises:
        TypeError: Not a list or tuple of passes.
        ValueError: Data that name what cannot be imported.
    """
    if isinstance(value, PASS_TYPES):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{argument}={value!r} must be a list of graph passes, not {type(value).__name__}")
    passes = tuple(_from_data(item, f"{argument}[{i}]") for i, item in enumerate(value))
    for graph_pass_ in passes:
        if isinstance(graph_pass_, PASS_TYPES):
            continue
        if isinstance(graph_pass_, type) and issubclass(graph_pass_, PASS_TYPES):
            advice = f"an object of it: {graph_pass_.__name__}(...)"
        elif callable(graph_pass_):
            advice = "it wrapped with compile_callbacks.graph_pass"
        else:
            advice = "a GraphPass, a function wrapped with graph_pass, or an object of torch's CustomGraphPass"
        raise TypeError(f"{argument} holds {graph_pass_!r}, which is no graph pass; give {advice}")
    return passes


def _from_data(value: object, argument: str) -> Any:
    """A pass that stands in a file of settings: by ``"module:name"``, or by ``class_path`` and ``init_args``."""
    if isinstance(value, str):
        with part_of(argument):
            return resolve(value)
    if isinstance(value, Mapping) and "class_path" in value:
        kind, arguments = class_and_arguments(value, argument, PASS_TYPES)
        with part_of(argument):
            return kind(**arguments)
    return value


def pass_name(graph_pass: Any) -> str:
    """What messages and reports call a pass, torch's own too."""
    return graph_pass.name if isinstance(graph_pass, GraphPass) else type(graph_pass).__name__


def pass_hook(graph_pass: Any) -> str:
    """Where a pass runs; those of torch's own classes do not say."""
    return getattr(graph_pass, "hook", DEFAULT_HOOK)


def pass_identity(graph_pass: Any) -> str:
    """A name and hash of a pass, for a config's key."""
    return f"{type(graph_pass).__module__}.{pass_name(graph_pass)}:{graph_pass.uuid()!r}"


@contextlib.contextmanager
def running_in(phase: Phase) -> Iterator[None]:
    """Have passes know the phase that is compiled."""
    token = _current_phase.set(phase)
    try:
        yield
    finally:
        _current_phase.reset(token)
