"""`compile_phases`: compiles a module for a hand-written loop. Includes `report_of` and `restore`."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from compile_callbacks._utils.errors import warn_user, with_code
from compile_callbacks._utils.phases import PHASES
from compile_callbacks.calls.dispatcher import Dispatcher, compiled_target_names
from compile_callbacks.config.inductor_config import Mode
from compile_callbacks.graphs.target_log import OnError, Verify
from compile_callbacks.report.report import CompileReport
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.session.session import Session
from compile_callbacks.targets.fsdp import unsupported_reason
from compile_callbacks.targets.resolve import resolve_targets
from compile_callbacks.tuning.tune import Tune

_MODULE = "__compile_phases__"
"""The attribute of a wrapped function that contains the compiled module."""


def compile_phases(
    module: Any = None,
    /,
    train_mode: Mode = "default",
    infer_mode: Mode = "default",
    *,
    targets: str | Sequence[str] | None = None,
    passes: Sequence[Any] = (),
    on_error: OnError = "eager",
    verify: Verify = "warn",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Any:
    """Compile a module or a function for a hand-written loop, with or without Fabric.

    Calls with grad enabled use ``train_mode``, and other calls use ``infer_mode``. torch compiles at the first call, so
    move the module to its device before. As under a Trainer, the module is compiled in place: its state_dict, copies
    and pickles contain the original module.

    Args:
        module: The module to compile, or a function to wrap. If ``Fabric.setup`` returned the module, the module that
            you passed to ``setup`` is compiled. Without this argument, `compile_phases` returns a decorator.
        train_mode: The settings for calls with grad enabled. See `InductorCompile`. ``"auto"`` and a `Tune` are not
            allowed, because they need the step times of a Trainer.
        infer_mode: The settings for calls with grad disabled, with the same choices.
        targets: See `InductorCompile`. ``None`` compiles the call of the module, or each part that FSDP shards.
        passes: See `InductorCompile`.
        on_error: See `InductorCompile`.
        verify: See `InductorCompile`.
        cache_dir: See `InductorCompile`. torch uses the folder until `restore`, or until the module is deleted.

    Returns:
        The same module, or a wrapper that calls the compiled function.

    Raises:
        TypeError: If ``module`` is not a module or function, or an argument has a wrong type.
        ValueError: If a value is not one of the choices, ``targets`` is set for a function, or the module is already
            compiled.

    Example::

        >>> @compile_phases(infer_mode="max-autotune-no-cudagraphs")
        ... def double(x):
        ...     return x + x
        >>> report_of(double).infer.mode
        'max-autotune-no-cudagraphs'
    """
    given: dict[str, Any] = {
        "train_mode": train_mode,
        "infer_mode": infer_mode,
        "targets": targets,
        "passes": passes,
        "on_error": on_error,
        "verify": verify,
        "cache_dir": cache_dir,
    }
    if module is None:
        return functools.partial(compile_phases, **given)
    if not callable(module) or isinstance(module, type):
        raise TypeError(with_code("CC202", f"module={module!r} must be a torch.nn.Module or a function"))
    if targets is not None and not isinstance(module, nn.Module):
        message = f"targets={targets!r} names parts of a module, and {module!r} is a function"
        raise ValueError(with_code("CC203", message))
    arguments = CompileArguments.checked(**given)
    _check_without_trainer(arguments)
    if isinstance(module, nn.Module):
        _compile_in_place(_without_fabric(module), arguments)
        return module
    holder = _Function(module)
    _compile_in_place(holder, arguments)

    @functools.wraps(module)
    def call(*args: Any, **kwargs: Any) -> Any:
        return holder(*args, **kwargs)

    call.__dict__[_MODULE] = holder
    return call


def report_of(compiled: Any) -> CompileReport:
    """Return the report so far, and warn once about targets that ran without a compiled graph.

    The report has no step times, because only `InductorCompile` measures them.

    Args:
        compiled: The module that `compile_phases` compiled, or the function that it returned.

    Raises:
        ValueError: If `compile_phases` did not compile the module or function.
    """
    session = _session_or_error(compiled, "report_of")
    for phase in PHASES:
        session.check(phase)
    return session.report()


def restore(compiled: Any) -> None:
    """Undo `compile_phases`: the module, or the wrapped function, runs eagerly again.

    Args:
        compiled: The module that `compile_phases` compiled, or the function that it returned.

    Raises:
        ValueError: If `compile_phases` did not compile the module or function.
    """
    _session_or_error(compiled, "restore").discard()


class GradModeSession(Session):
    """A session without a Trainer. The grad mode of each call selects the phase."""

    def begin_by_grad_mode(self, *, weights_frozen: bool = False, found_from_module: bool = True) -> None:
        """Compile the module in place."""
        self.begin()
        if found_from_module:
            for dispatcher in self._switch.dispatchers():
                dispatcher.session = self
        variants = {phase: run.chosen for phase, run in self._phases.items()}
        self._switch.select_by_grad_mode(variants, weights_frozen=weights_frozen)

    def compile_new_inputs(self, *, after: float) -> None:
        """Set the number of inference calls that no graph fits after which a target is compiled again."""
        for compiled_target in self._switch.compiled_targets("infer"):
            compiled_target.function.recompile_after = after

    def end_with_module(self) -> None:
        """End this session when the module is deleted. This does not keep the module alive."""
        weakref.finalize(self.module, self._recorder.stop)
        if self._cache is not None:
            weakref.finalize(self.module, self._cache.end)


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def extra_repr(self) -> str:
        # Makes the fingerprints of different functions differ. The fingerprint names the model's record in cache_dir.
        return f"{self._function.__module__}.{getattr(self._function, '__qualname__', '')}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _without_fabric(module: Any) -> Any:
    """Return the module in a wrapper of ``Fabric.setup``. torch cannot trace all of its precision, hooks and DDP."""
    is_wrapper = isinstance(module, nn.Module) and type(module).__module__.endswith("fabric.wrappers")
    return module.module if is_wrapper else module


def _check_without_trainer(arguments: CompileArguments) -> None:
    """Refuse modes that need a Trainer, and warn about settings without effect."""
    for phase, config in arguments.configs.items():
        if isinstance(config, Tune):
            message = (
                f"{phase}_mode={config.describe()!r} needs the step times of a Trainer, which compile_phases does not "
                "have. Set one mode or config"
            )
            raise ValueError(with_code("CC203", message))
    messages = arguments.without_effect()
    infer = arguments.configs["infer"]
    if infer is not None and infer.freezes:
        messages.append(
            "infer_mode's option 'freezing' has no effect without a Trainer, whose stage tells if weights are constant"
        )
    for message in messages:
        warn_user("CC204", message)


def _compile_in_place(module: nn.Module, arguments: CompileArguments) -> None:
    if unsupported := unsupported_reason(module, arguments.configs):
        raise ValueError(with_code("CC802", unsupported))
    targets = resolve_targets(module, arguments.targets or ("forward",))
    names = {member.name for target in targets for member in target.members}
    if _session_of(module) is not None or names & set(compiled_target_names(module)):
        message = (
            f"module={type(module).__name__} is already compiled by this library. Call restore(module) first, or "
            "deactivate() of the InductorBackend that compiled it"
        )
        raise ValueError(with_code("CC203", message))
    # A hand-written loop may keep the graph of any backward pass.
    settings = replace(arguments.target_settings, keeps_graph=True)
    session = GradModeSession(module, targets, replace(arguments, target_settings=settings))
    session.begin_by_grad_mode()
    session.end_with_module()


def _session_or_error(compiled: Any, function: str) -> Session:
    session = _session_of(_without_fabric(getattr(compiled, _MODULE, compiled)))
    if session is None:
        message = (
            f"{function} got {type(compiled).__name__}, which compile_phases did not compile, or which is already "
            "restored. Pass the module that you passed to compile_phases, or the function that it returned. "
            "InductorCompile restores its module at the end of the Trainer's run, and an InductorBackend restores its "
            "module in deactivate()"
        )
        raise ValueError(with_code("CC109", message))
    return session


def _session_of(module: Any) -> Session | None:
    """Find the session in the dispatchers of a module. A registry of sessions would keep the module alive."""
    for submodule in module.modules() if isinstance(module, nn.Module) else ():
        for value in vars(submodule).values():
            # A property of another object would be the user's code.
            if isinstance(value, Dispatcher) and value.session is not None and value.session.module is module:
                return value.session  # type: ignore[no-any-return]
    return None
