"""Custom Inductor graph passes that are told whether they run on an inference graph, and for which phase."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import types
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar, overload

import torch

from compile_callbacks import _torch
from compile_callbacks.choices import unknown
from compile_callbacks.phases import Phase

HOOK_OPTIONS: Mapping[str, str] = {
    "post_grad_pre": "post_grad_custom_pre_pass",
    "post_grad_post": "post_grad_custom_post_pass",
}
"""The hook points at which a pass can run, and the Inductor option behind each."""

_current_phase: contextvars.ContextVar[Phase | None] = contextvars.ContextVar("phase", default=None)

Function = TypeVar("Function", bound=Callable[[torch.fx.Graph, bool], None])


def _with_flag_of_torch(call: Callable[..., None]) -> Callable[..., None]:
    """``call`` with ``is_inference`` filled in where torch, before 2.13, does not give it."""

    @functools.wraps(call)
    def with_flag(self: GraphPass, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        return call(self, graph, _torch.inference_flag_of_caller() if is_inference is None else is_inference)

    return with_flag


class GraphPassError(RuntimeError):
    """A custom graph pass raised or left a graph that is not well formed."""


class GraphPass(_torch.GRAPH_PASS_BASE):  # type: ignore[misc]
    """A custom Inductor pass over the post-grad graph, as a class.

    Derive from it, and change the graph in place in ``__call__(graph, is_inference)``. ``is_inference`` is
    torch's own meaning: the graph has no autograd graph behind it. It is ``True`` for every graph of
    validation, test and predict, and ``False`` for the forward and the backward graph of training; a module
    whose parameters are all frozen gives ``True`` in training too. A pass that wants the phase asks for
    ``self.phase``.

    A pass may be handed to `InductorCompile` and `InductorConfig`, or straight to
    ``torch.compile(options={"post_grad_custom_post_pass": my_pass})``.

    Attributes:
        hook: Where it runs: ``"post_grad_pre"`` (before Inductor's own post-grad passes) or
            ``"post_grad_post"`` (after them, the default).

    Note:
        torch copies the options that it is given; a pass is copied by reference, so that what it records is seen
        by whoever made it. Keep no Trainer, module or logger in it. A pass does not run where torch finds
        the graph in its cache.

    Example::

        >>> class CountNodes(GraphPass):
        ...     def __call__(self, graph, is_inference):
        ...         print(len(graph.nodes), is_inference)
    """

    hook: ClassVar[str] = "post_grad_post"
    _identity: str | None

    def __new__(cls, *args: Any, **kwargs: Any) -> GraphPass:
        """Describe the pass by its class and arguments, for `uuid`."""
        self = super().__new__(cls)
        # Described now: an argument that is changed later must not change what was compiled.
        self._identity = _describe_call(cls, args, kwargs)
        return self  # type: ignore[no-any-return]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.hook not in HOOK_OPTIONS:
            raise ValueError(unknown(f"{cls.__name__}.hook", cls.hook, HOOK_OPTIONS))
        if not _torch.TORCH_PASSES_FLAG and "__call__" in vars(cls):
            cls.__call__ = _with_flag_of_torch(cls.__call__)  # type: ignore[method-assign]

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
        """What torch's compile cache knows this pass by.

        It covers the source of the class and its bases up to `GraphPass`, the constructor's arguments, the
        hook point and this library's version. ``None``, which has torch skip its cache, where one of these
        cannot be described (a class without source, an argument that is an object of another kind than
        numbers, strings, dtypes, devices, enums, functions, passes, and lists and mappings of those).
        """
        return self._identity

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPass:
        return self


class FunctionPass(GraphPass):
    """A function as a pass; what `graph_pass` makes."""

    def __init__(self, function: Callable[[torch.fx.Graph, bool], None], hook: str = "post_grad_post") -> None:
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
    function: Callable[[torch.fx.Graph, bool], None] | None = None, /, *, hook: str = "post_grad_post"
) -> FunctionPass | Callable[[Callable[[torch.fx.Graph, bool], None]], FunctionPass]:
    """Make a function a graph pass.

    Args:
        function: Called with ``(graph, is_inference)``; changes the graph in place.
        hook: Where it runs: ``"post_grad_pre"`` or ``"post_grad_post"``.

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


class PassSequence(_torch.GRAPH_PASS_BASE):  # type: ignore[misc]
    """The passes of one hook point and one phase, in order: the one pass that torch is given for it."""

    def __init__(self, passes: tuple[Any, ...], hook: str, phase: Phase) -> None:
        self.passes = passes
        self.hook = hook
        self.phase = phase

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Run the passes; torch before 2.13 does not give the flag."""
        if is_inference is None:
            is_inference = _torch.inference_flag_of_caller()
        with _phase(self.phase):
            for graph_pass in self.passes:
                self._run(graph_pass, graph, is_inference)

    def _run(self, graph_pass: Any, graph: torch.fx.Graph, is_inference: bool) -> None:
        where = f"graph pass {_name(graph_pass)!r} at {self.hook} in the {self.phase} phase"
        try:
            if isinstance(graph_pass, GraphPass):
                graph_pass(graph, is_inference)
            else:
                _torch.run_pass(graph_pass, graph, is_inference)
        except Exception as error:
            raise GraphPassError(f"{where} raised {type(error).__name__}: {error}") from error
        try:
            graph.lint()
        except Exception as error:
            raise GraphPassError(f"{where} left a graph that is not well formed: {error}") from error

    def uuid(self) -> str | None:
        """The uuids of the passes with hook point and phase; ``None`` where one has none."""
        uuids = [graph_pass.uuid() for graph_pass in self.passes]
        if any(uuid is None for uuid in uuids):
            return None
        return _digest(self.hook, self.phase, *(repr(uuid) for uuid in uuids))

    def __deepcopy__(self, memo: dict[int, Any]) -> PassSequence:
        return self


def as_passes(value: object, argument: str) -> tuple[Any, ...]:
    """The passes of an argument, checked.

    Raises:
        TypeError: Not a list or tuple of passes.
    """
    if isinstance(value, (GraphPass, *_torch.TORCH_PASS_TYPES)):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{argument}={value!r} must be a list of graph passes, not {type(value).__name__}")
    for graph_pass_ in value:
        if isinstance(graph_pass_, (GraphPass, *_torch.TORCH_PASS_TYPES)):
            continue
        if isinstance(graph_pass_, type) and issubclass(graph_pass_, (GraphPass, *_torch.TORCH_PASS_TYPES)):
            advice = f"an object of it: {graph_pass_.__name__}(...)"
        elif callable(graph_pass_):
            advice = "it wrapped with compile_callbacks.graph_pass"
        else:
            advice = "a GraphPass, a function wrapped with graph_pass, or an object of torch's CustomGraphPass"
        raise TypeError(f"{argument} holds {graph_pass_!r}, which is no graph pass; give {advice}")
    return tuple(value)


def pass_options(passes: tuple[Any, ...], phase: Phase) -> dict[str, PassSequence]:
    """The Inductor options that have these passes run in one phase."""
    options = {}
    for hook, option in HOOK_OPTIONS.items():
        here = tuple(p for p in passes if getattr(p, "hook", "post_grad_post") == hook)
        if here:
            options[option] = PassSequence(here, hook, phase)
    return options


def pass_identity(graph_pass: Any) -> str:
    """A name and hash of a pass, for a config's key."""
    return f"{type(graph_pass).__module__}.{_name(graph_pass)}:{graph_pass.uuid()!r}"


def _name(graph_pass: Any) -> str:
    return graph_pass.name if isinstance(graph_pass, GraphPass) else type(graph_pass).__name__


@contextlib.contextmanager
def _phase(phase: Phase) -> Iterator[None]:
    token = _current_phase.set(phase)
    try:
        yield
    finally:
        _current_phase.reset(token)


# ---------------------------------------------------------------------------------------------- identity


class _UndescribableError(Exception):
    """A value that has no text of its own."""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _library_version() -> str:
    try:
        return importlib.metadata.version("compile-callbacks")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return "source"


def _describe_call(cls: type[GraphPass], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    try:
        sources = [_source(base) for base in cls.__mro__ if issubclass(base, GraphPass) and base is not GraphPass]
        return _digest(_library_version(), str(cls.hook), *sources, _describe(args), _describe(dict(kwargs)))
    except _UndescribableError:
        return None


def _source(subject: Any) -> str:
    try:
        return f"{subject.__module__}.{subject.__qualname__}\n{inspect.getsource(subject)}"
    except (OSError, TypeError) as error:
        raise _UndescribableError from error


def _describe(value: Any) -> str:
    """The same text for the same value in every process.

    Raises:
        _UndescribableError: No such text is known for the value.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, GraphPass):
        if (uuid := value.uuid()) is None:
            raise _UndescribableError
        return uuid
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{','.join(map(_describe, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set[{','.join(sorted(map(_describe, value)))}]"
    if isinstance(value, Mapping):
        return f"dict[{','.join(sorted(f'{_describe(k)}={_describe(v)}' for k, v in value.items()))}]"
    if isinstance(value, types.FunctionType):
        closed_over = [cell.cell_contents for cell in value.__closure__ or ()]
        return _source(value) + _describe([*closed_over, value.__defaults__, value.__kwdefaults__])
    if isinstance(value, _torch.OPERATOR_TYPES):
        return str(value)
    if isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    raise _UndescribableError
