"""`compile_phases`: a function or module without a Trainer, with settings for training and others for inference."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from compile_callbacks._utils.errors import CompileWarning
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.mode import Mode
from compile_callbacks.config.tune import Settings, Tune, as_settings, phases_left_alone
from compile_callbacks.passes.base import as_passes
from compile_callbacks.report.report import CompileReport
from compile_callbacks.runtime.cache_dir import check_folder
from compile_callbacks.runtime.dispatcher import compiled_target_names
from compile_callbacks.runtime.fsdp import unsupported_reason
from compile_callbacks.runtime.session import Session
from compile_callbacks.runtime.target_settings import NewShapes, OnError, TargetSettings, Verify
from compile_callbacks.runtime.targets import check_target_names, resolve_targets


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
    new_shapes: NewShapes = "recompile",
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
    configs: dict[Phase, Settings] = {
        "train": _without_trainer(train_mode, "train_mode"),
        "infer": _without_trainer(infer_mode, "infer_mode"),
    }
    passes = as_passes(passes, "passes")
    for config in configs.values():
        if config is not None:
            config.check_beside(passes)
    settings = TargetSettings(on_error=on_error, verify=verify, new_shapes=new_shapes)
    folder = check_folder("cache_dir", cache_dir)
    if folder is not None and not any(configs.values()):
        message = "cache_dir has no effect: neither train_mode nor infer_mode compiles"
        warnings.warn(message, CompileWarning, stacklevel=3)
    for phase, config in configs.items():
        if config is not None and config.freezes:
            message = (
                f"{phase}_mode's freezing has no effect without a Trainer, whose stages tell where weights stand still"
            )
            warnings.warn(message, CompileWarning, stacklevel=3)
    module = target if isinstance(target, nn.Module) else _Function(target)
    names = check_target_names(targets)
    found = resolve_targets(module, names or ("forward",), nn.Module)
    if refused := unsupported_reason(module, configs):
        raise ValueError(refused)
    parts = {member.name for part in found for member in part.members}
    if _session_of(module) is not None or parts & set(compiled_target_names(module)):
        message = (
            f"target={type(module).__name__} is compiled by this library already; undo that first: restore(), or "
            "deactivate() where an InductorBackend compiled it"
        )
        raise ValueError(message)
    session = Session(
        module,
        found,
        configs,
        left_alone=phases_left_alone(train_mode, infer_mode),
        passes=passes,
        settings=settings,
        cache_dir=folder,
    )
    session.begin_by_grad_mode()
    weakref.finalize(module, session.listeners_end())
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
        session.leave(phase)
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


def _without_trainer(mode: object, argument: str) -> InductorConfig | None:
    settings = as_settings(mode, argument)
    if isinstance(settings, Tune):
        raise ValueError(
            f"{argument}={mode!r} chooses by the times of a Trainer's steps, which compile_phases does not know; give "
            "one mode or config"
        )
    return settings


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
