"""`compile_phases`: compiles a module for a hand-written loop. Includes `report_of` and `restore`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from compile_callbacks._utils.errors import warn_user, with_code
from compile_callbacks._utils.messages import check_type
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.calls.dispatcher import Dispatcher, compiled_target_names
from compile_callbacks.config.inductor_config import InductorConfig, Mode, as_config
from compile_callbacks.graphs.target_log import OnError, Verify
from compile_callbacks.report.report import CompileReport
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.session.session import Session
from compile_callbacks.targets.fsdp import unsupported_reason
from compile_callbacks.targets.resolve import resolve_targets
from compile_callbacks.tuning.contest import Conditions

_Module = TypeVar("_Module", bound=nn.Module)


def compile_phases(
    module: _Module,
    /,
    train_mode: Mode = "default",
    infer_mode: Mode = "default",
    *,
    targets: str | Sequence[str] | None = None,
    passes: Sequence[Any] = (),
    on_error: OnError = "eager",
    verify: Verify = "warn",
    cache_dir: str | os.PathLike[str] | None = None,
) -> _Module:
    """Compile a module for a hand-written loop, with or without Fabric.

    Calls with grad enabled use ``train_mode``, and other calls use ``infer_mode``. torch compiles at the first call, so
    move the module to its device before. As under a Trainer, the module is compiled in place: its state_dict, copies
    and pickles contain the original module.

    Args:
        module: The module to compile. If ``Fabric.setup`` returned the module, the module that you passed to ``setup``
            is compiled.
        train_mode: The settings for calls with grad enabled. See `InductorCompile`. ``"fast"``, ``"auto"`` and a
            `Tune` are not allowed, because they need the eager steps of a Trainer.
        infer_mode: The settings for calls with grad disabled, with the same choices.
        targets: See `InductorCompile`. ``None`` compiles the call of the module, or each part that FSDP shards.
        passes: See `InductorCompile`.
        on_error: See `InductorCompile`.
        verify: See `InductorCompile`.
        cache_dir: See `InductorCompile`. torch uses the folder until `restore`, or until the module is deleted.

    Returns:
        The same module.

    Raises:
        TypeError: If ``module`` is not a module, or an argument has a wrong type.
        ValueError: If a value is not one of the choices, or the module is already compiled.

    Example::

        >>> net = compile_phases(nn.ReLU(), infer_mode="max-autotune-no-cudagraphs")
        >>> report_of(net).infer.mode
        'max-autotune-no-cudagraphs'
    """
    given = {name: value for name, value in dict(locals()).items() if name != "module"}
    check_type("module", module, nn.Module, "a torch.nn.Module")
    # Refuses a `Tune`, because only a Trainer has the steps to compare.
    given |= {"train_mode": as_config(train_mode, "train_mode"), "infer_mode": as_config(infer_mode, "infer_mode")}
    arguments = CompileArguments.checked(**given)
    if (infer := given["infer_mode"]) is not None and infer.freezes:
        message = "infer_mode's option 'freezing' has no effect without a Trainer, whose stage tells if weights are"
        warn_user("CC204", f"{message} constant")
    inner = _without_fabric(module)
    if unsupported := unsupported_reason(inner, arguments.configs):
        raise ValueError(with_code("CC802", unsupported))
    targets_found = resolve_targets(inner, arguments.targets or ("forward",))
    names = {member.name for target in targets_found for member in target.members}
    if names & set(compiled_target_names(inner)):
        message = (
            f"module={type(inner).__name__} is already compiled by this library: call restore() or deactivate() first"
        )
        raise ValueError(with_code("CC203", message))
    # A hand-written loop may keep the graph of any backward pass.
    settings = replace(arguments.target_settings, keeps_graph=True)
    session = GradModeSession(inner, targets_found, replace(arguments, target_settings=settings))
    session.begin_by_grad_mode()
    return module


def report_of(compiled: nn.Module) -> CompileReport:
    """Return the report so far, and warn once about targets that ran without a compiled graph.

    The report has no step times, because only `InductorCompile` measures them.

    Args:
        compiled: The module that `compile_phases` compiled.

    Raises:
        ValueError: If `compile_phases` did not compile the module.
    """
    session = _session_of(compiled, "report_of")
    for phase in PHASES:
        session.check(phase)
    return session.report()


def restore(compiled: nn.Module) -> None:
    """Undo `compile_phases`: the module runs eagerly again.

    Args:
        compiled: The module that `compile_phases` compiled.

    Raises:
        ValueError: If `compile_phases` did not compile the module.
    """
    _session_of(compiled, "restore").discard()


class GradModeSession(Session):
    """A session without a Trainer. The grad mode of each call selects the phase."""

    def begin_by_grad_mode(
        self, *, weights_frozen: bool = False, found_from_module: bool = True
    ) -> dict[Phase, InductorConfig | None]:
        """Compile the module in place, until the module is deleted or the session is discarded. Return the configs."""
        self.begin(Conditions())
        if found_from_module:
            for dispatcher in self._switch.dispatchers():
                dispatcher.session = self
            weakref.finalize(self.module, self._undo.close)  # type: ignore[union-attr]  # does not keep it alive
        variants = {phase: run.chosen for phase, run in self._phases.items()}
        self._switch.select_by_grad_mode(variants, weights_frozen=weights_frozen)
        return {phase: variant.config for phase, variant in variants.items()}

    def compile_new_inputs(self, *, after: float) -> None:
        """Set the number of inference calls that no graph fits after which a target is compiled again."""
        for compiled_target in self._switch.compiled_targets("infer"):
            compiled_target.function.recompile_after = after


def _without_fabric(module: Any) -> Any:
    """Return the module in a wrapper of ``Fabric.setup``. torch cannot trace all of its precision, hooks and DDP."""
    is_wrapper = isinstance(module, nn.Module) and type(module).__module__.endswith("fabric.wrappers")
    return module.module if is_wrapper else module


def _session_of(compiled: Any, function: str) -> Session:
    """Find the session in the dispatchers of a module. A registry of sessions would keep the module alive."""
    module = _without_fabric(compiled)
    for submodule in module.modules() if isinstance(module, nn.Module) else ():
        for value in vars(submodule).values():
            # A property of another object would be the user's code.
            if isinstance(value, Dispatcher) and value.session is not None and value.session.module is module:
                return value.session  # type: ignore[no-any-return]
    reason = "which compile_phases did not compile, or which is already restored"
    raise ValueError(with_code("CC109", f"{function} got {type(compiled).__name__}, {reason}"))
