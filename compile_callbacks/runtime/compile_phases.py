"""`compile_phases`: a function or module without a Trainer, with settings for training and others for inference."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from compile_callbacks._utils.errors import warn_user, with_code
from compile_callbacks._utils.phases import PHASES
from compile_callbacks.config.mode import Mode
from compile_callbacks.config.tune import Tune
from compile_callbacks.report.report import CompileReport
from compile_callbacks.runtime.arguments import CompileArguments, NewShapes, OnError, Verify, explain_unknown_arguments
from compile_callbacks.runtime.dispatcher import compiled_target_names
from compile_callbacks.runtime.fsdp import unsupported_reason
from compile_callbacks.runtime.session import Session
from compile_callbacks.runtime.targets import resolve_targets


@explain_unknown_arguments
def compile_phases(
    target: Any = None,
    /,
    *,
    train_mode: Mode = "default",
    infer_mode: Mode = "default",
    targets: str | Sequence[str] | None = None,
    passes: Sequence[Any] = (),
    on_error: OnError = "eager",
    verify: Verify = "warn",
    new_shapes: NewShapes = "auto",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Any:
    """Compile a function or module; each call takes the train settings where grad is enabled, else the infer settings.

    For hand-written loops, with Fabric or without. Nothing is compiled before the first call. A module is compiled in
    place, as under a Trainer: its state_dict, copies and pickles are those of the original. Move it to its device
    first. `report_of` tells what compiling cost, and `restore` undoes it.

    Args:
        target: A module, or a function, which is wrapped. Left out, the call makes a decorator.
        train_mode: As `InductorCompile` takes it, but for ``"auto"`` and `Tune`: no steps are measured here.
        infer_mode: The same, for calls with grad disabled.
        targets: Names of the parts of a module that are compiled, or ``"repeated"`` for repeated blocks that share one
            graph, as `InductorCompile` takes them; ``None``: the module as a whole, or each part that FSDP shards by
            itself.
        passes: Graph passes for both phases.
        on_error: As `InductorCompile` takes it.
        verify: As `InductorCompile` takes it.
        new_shapes: As `InductorCompile` takes it.
        cache_dir: As `InductorCompile` takes it, in use until `restore`, or until the module is deleted.

    Returns:
        The same module, or a function that calls the compiled one.

    Raises:
        TypeError: No module or function, or an argument of the wrong type.
        ValueError: A value that is none of the choices, ``targets`` of a function, or a module that is compiled by
            this library already.

    Example::

        >>> @compile_phases(infer_mode="max-autotune-no-cudagraphs")
        ... def double(x):
        ...     return x + x
        >>> report_of(double).infer.mode
        'max-autotune-no-cudagraphs'
    """
    if target is None:
        return functools.partial(
            compile_phases,
            train_mode=train_mode,
            infer_mode=infer_mode,
            targets=targets,
            passes=passes,
            on_error=on_error,
            verify=verify,
            new_shapes=new_shapes,
            cache_dir=cache_dir,
        )
    if not callable(target) or isinstance(target, type):
        raise TypeError(f"target={target!r} must be a module or a function")
    if targets is not None and not isinstance(target, nn.Module):
        raise ValueError(f"targets={targets!r} names parts of a module, and {target!r} is a function")
    arguments = CompileArguments.checked(
        train_mode=train_mode,
        infer_mode=infer_mode,
        targets=targets,
        passes=passes,
        cache_dir=cache_dir,
        on_error=on_error,
        verify=verify,
        new_shapes=new_shapes,
    )
    for phase, config in arguments.configs.items():
        if isinstance(config, Tune):
            raise ValueError(
                with_code(
                    "CC203",
                    f"{phase}_mode={config.describe()!r} compares the step times of a Trainer, and compile_phases has "
                    "none. Give one mode or config",
                )
            )
    messages = arguments.without_effect()
    infer = arguments.configs["infer"]
    if infer is not None and infer.freezes:
        messages.append(
            "infer_mode's option 'freezing' has no effect without a Trainer, whose stages tell when weights are frozen"
        )
    for message in messages:
        warn_user("CC204", message)
    module = target if isinstance(target, nn.Module) else _Function(target)
    found = resolve_targets(module, arguments.targets or ("forward",), nn.Module)
    if refused := unsupported_reason(module, arguments.configs):
        raise ValueError(with_code("CC802", refused))
    parts = {member.name for part in found for member in part.members}
    if _session_of(module) is not None or parts & set(compiled_target_names(module)):
        message = (
            f"target={type(module).__name__} is compiled by this library already; undo that first: restore(), or "
            "deactivate() where an InductorBackend compiled it"
        )
        raise ValueError(message)
    session = Session(module, found, arguments)
    session.begin_by_grad_mode()
    weakref.finalize(module, session.finalizer())
    if module is target:
        return module

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    call.__dict__[_HOLDER] = module
    return call


def report_of(compiled: Any) -> CompileReport:
    """What compiling cost so far. Step times are a Trainer's to measure, and are not in it.

    What ran and was not compiled is warned about here, once.

    Args:
        compiled: What `compile_phases` returned.

    Raises:
        ValueError: It is not compiled by `compile_phases`.
    """
    session = _session_or_error(compiled)
    for phase in PHASES:
        session.check(phase)
    return session.report()


def restore(compiled: Any) -> None:
    """Have a module, or what a wrapped function calls, run uncompiled again, with nothing left behind.

    Args:
        compiled: What `compile_phases` returned.

    Raises:
        ValueError: It is not compiled by `compile_phases`.
    """
    session = _session_or_error(compiled)
    session.end()
    session.free_compiled()


_HOLDER = "__compile_phases__"


class _Function(nn.Module):
    """A function where a module is asked for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def extra_repr(self) -> str:
        # By which the compile artifacts of two functions are told apart.
        return f"{self._function.__module__}.{getattr(self._function, '__qualname__', '')}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _session_or_error(compiled: Any) -> Session:
    session = _session_of(getattr(compiled, _HOLDER, compiled))
    if session is None:
        raise ValueError(f"{compiled!r} is not compiled by compile_phases")
    return session


def _session_of(module: Any) -> Session | None:
    """The session that a module is compiled in, from what stands on it: a registry would keep it alive."""
    for part in module.modules() if isinstance(module, nn.Module) else ():
        for value in vars(part).values():
            session = getattr(value, "session", None)
            if isinstance(session, Session) and session.module is module:
                return session
    return None
