"""`PhaseSwitch` installs compiled targets on modules, selects those of a phase, and removes them. `Session` owns it."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.profiling.compile_events import CompileRecorder
from compile_callbacks.runtime.compiled_target import CompiledTarget, Isolation
from compile_callbacks.runtime.freezing import unwatchable_reason
from compile_callbacks.runtime.repeated import Compiled
from compile_callbacks.runtime.target import InstalledCall, Target
from compile_callbacks.runtime.target_settings import TargetSettings

_CALL_SLOT = "_compiled_call_impl"  # what nn.Module.compile() sets, and nn.Module.__call__ looks at


class ActiveConfig(NamedTuple):
    """The config that a phase runs with. `Session` holds one for each phase.

    Attributes:
        config: The config; ``None`` runs the targets eagerly, or as the user compiled them in a phase left alone.
        candidate: The name of the candidate, if the config is one of several that a `Tune` tries.
    """

    config: InductorConfig | None = None
    candidate: str | None = None


EAGERLY = ActiveConfig()


class _Made(NamedTuple):
    """A target compiled with one config, and again with frozen weights if the config freezes."""

    compiled_target: CompiledTarget
    frozen: CompiledTarget | None

    @property
    def compiled_targets(self) -> list[CompiledTarget]:
        """Both, or the only one."""
        return [self.compiled_target] if self.frozen is None else [self.compiled_target, self.frozen]


class Dispatcher(InstalledCall):
    """Replaces a target's call. It calls the compiled target of the selected phase, or the module itself.

    It is an object and not a closure, so that copies and pickles of the module can drop it: a copied call would run
    with the weights of the original.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.compiled_by_user: Callable[..., Any] | None = None  # by module.compile(); runs in `left_alone` phases
        self.eager = target.eager
        self.__wrapped__ = self.eager  # Lightning inspects the method and its arguments through it
        self.selected: Callable[..., Any] = self.eager
        self.session: Any = None  # the session, if `report_of` and `restore` find it from the module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled target of the selected phase, or the module itself."""
        if torch.compiler.is_compiling():  # another target or an export is traced: be part of its graph
            return self.eager(*args, **kwargs)
        if _is_redirected(self.target.module):
            return self.eager(*args, **kwargs)
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # as for a logger's graph
            return self.eager(*args, **kwargs)
        return self.selected(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # As the module's own method, which a process can load without this library.
        if self.target.method is None:
            return type(None), ()
        if (own := self.target.own_function) is not None:
            return operator.getitem, ([own], 0)
        return getattr, (self.target.module, self.target.method)


class PhaseSwitch:
    """Compiles targets in place, and selects the phase and the config that they run with.

    Nothing is compiled before a target is called. There is no wrapper module: ``state_dict`` keys, ``isinstance``,
    hooks and optimizers see the original modules.

    If a config freezes, each target is compiled a second time with frozen weights, for the stages in which no weight
    changes: `select` with ``frozen=True``.

    The compiled code of each candidate of a `Tune` is kept until `free_candidates`.

    Args:
        targets: The targets.
        left_alone: Phases in which a target that the user compiled in place runs as the user compiled it.
        passes: Graph passes for both phases, before those of each config.
        recorder: Records the compile events.
        settings: The settings of the targets other than the config.
        warn: Warns of each subject once.
    """

    def __init__(
        self,
        targets: Sequence[Compiled],
        *,
        left_alone: frozenset[Phase] = frozenset(),
        passes: Sequence[Any] = (),
        recorder: CompileRecorder,
        settings: TargetSettings | None = None,
        warn: WarnOnce | None = None,
    ) -> None:
        self.targets: tuple[Compiled, ...] = ()
        self._passes = tuple(passes)
        self._recorder = recorder
        self._settings = settings or TargetSettings()
        self._warn = warn or WarnOnce()
        self._isolation = Isolation()
        self._left_alone = left_alone
        self._dispatchers_of: list[list[Dispatcher]] = []
        self._made: dict[tuple[Phase, str | None], list[_Made]] = {}
        self._config_of: dict[tuple[Phase, str | None], InductorConfig] = {}
        self._trace_settings = _torch.events.TraceSettings(
            ours=lambda: recorder.key is not None,
            frozen=lambda: recorder.key is not None and recorder.key.frozen,
        )
        recorder.on_reset = self._trace_settings.install
        self._before: list[tuple[Dispatcher, str, Any]] | None = None
        self._selected: tuple[Phase, ActiveConfig, bool] | None = None
        self.add(targets)

    @property
    def shares_graphs(self) -> bool:
        """Whether several modules share a graph, so that their weights cannot be frozen in it."""
        return any(len(target.members) > 1 for target in self.targets)

    @property
    def installed(self) -> bool:
        """Whether the targets call through this switch."""
        return self._before is not None

    def install(self) -> None:
        """Install a dispatcher on each target; it calls the module itself until a phase is selected."""
        for dispatcher in self._dispatchers:
            dispatcher.selected = dispatcher.eager
        self._selected = None
        if self.installed:
            return
        self._before = []
        self._trace_settings.install()
        self._install_dispatchers(self._dispatchers)

    def add(self, targets: Sequence[Compiled]) -> None:
        """Add targets. They are compiled at their next call."""
        dispatchers = [[Dispatcher(member) for member in target.members] for target in targets]
        self.targets += tuple(targets)
        self._dispatchers_of += dispatchers
        for (phase, name), made in self._made.items():
            made += [self._make(target, phase, self._config_of[phase, name], name) for target in targets]
        self._selected = None
        if self.installed:
            self._install_dispatchers([one for of_target in dispatchers for one in of_target])

    def _install_dispatchers(self, dispatchers: Iterable[Dispatcher]) -> None:
        assert self._before is not None
        for dispatcher in dispatchers:
            module, slot = dispatcher.target.module, dispatcher.target.method or _CALL_SLOT
            before = vars(module).get(slot, _ABSENT)
            self._before.append((dispatcher, slot, before))
            by_user = slot == _CALL_SLOT and before is not _ABSENT and not isinstance(before, Dispatcher)
            dispatcher.compiled_by_user = before if by_user else None
            object.__setattr__(module, slot, dispatcher)

    @property
    def compiled_by_user(self) -> bool:
        """Whether the user compiled a target in place, and it runs so in the phases that are left alone."""
        return any(dispatcher.compiled_by_user is not None for dispatcher in self._dispatchers)

    def select(self, phase: Phase, active: ActiveConfig, *, frozen: bool = False) -> None:
        """Run the targets with the config of a phase from now on.

        Args:
            phase: The phase.
            active: The config.
            frozen: Whether to run with frozen weights, if the config freezes.
        """
        if self._selected == (phase, active, frozen):  # as in most steps; a change takes 10 µs for each target
            return
        for dispatcher, call in self._calls(phase, active, frozen=frozen):
            dispatcher.selected = call
        self._selected = phase, active, frozen

    def select_by_grad_mode(self, active: Mapping[Phase, ActiveConfig], *, frozen: bool = False) -> None:
        """Run the targets with the config of the phase that the grad mode of each call tells.

        Args:
            active: The config of each phase: train if grad is enabled, else infer.
            frozen: Whether calls without grad run with frozen weights, if the config freezes.
        """
        self._selected = None
        train = self._calls("train", active["train"], frozen=False)
        infer = self._calls("infer", active["infer"], frozen=frozen)
        for (dispatcher, train_call), (_, infer_call) in zip(train, infer, strict=True):
            dispatcher.selected = _by_grad_mode(train_call, infer_call)

    def _calls(
        self, phase: Phase, active: ActiveConfig, *, frozen: bool
    ) -> Iterator[tuple[Dispatcher, Callable[..., Any]]]:
        """Each dispatcher with the function that it calls in a phase."""
        config, name = active
        if config is not None and (phase, name) not in self._made:
            self._config_of[phase, name] = config
            self._made[phase, name] = [self._make(target, phase, config, name) for target in self.targets]
        for position, dispatchers in enumerate(self._dispatchers_of):
            made = self._made[phase, name][position] if config is not None else None
            for dispatcher in dispatchers:
                if dispatcher.compiled_by_user is not None and phase in self._left_alone:
                    yield dispatcher, dispatcher.compiled_by_user
                elif made is None:
                    yield dispatcher, dispatcher.eager
                else:
                    compiled_target = (made.frozen if frozen else None) or made.compiled_target
                    yield dispatcher, compiled_target.on(dispatcher.target)

    def end_trial(self, phase: Phase, name: str) -> None:
        """End the trial of a candidate, which won: the config of the phase is its config from now on."""
        for made in self._made.get((phase, name), ()):
            for compiled_target in made.compiled_targets:
                compiled_target.end_trial(self._settings)

    def free_candidates(self, phase: Phase, *names: str) -> None:
        """Free the code that was compiled with these candidates."""
        for name in names:
            self._config_of.pop((phase, name), None)
            for made in self._made.pop((phase, name), ()):
                for compiled_target in made.compiled_targets:
                    compiled_target.free_compiled()

    def set_session(self, session: Any) -> None:
        """Have the targets know who compiled them."""
        for dispatcher in self._dispatchers:
            dispatcher.session = session

    @property
    def trace_settings(self) -> _torch.events.TraceSettings:
        """The settings that hold while the targets are traced."""
        return self._trace_settings

    def invalidate_weights(self) -> None:
        """Have weights that are baked in or folded looked at before they are used again."""
        for phase in PHASES:
            for compiled_target in self.compiled_targets(phase):
                compiled_target.invalidate_weights()

    def free_compiled(self) -> None:
        """Free the memory of the compiled code. A target that is called again is compiled again."""
        for phase in PHASES:
            for compiled_target in self.compiled_targets(phase):
                compiled_target.free_compiled()

    def remove(self) -> None:
        """Remove the dispatchers. If the user has replaced one since `install`, the user's call stays."""
        for dispatcher, slot, before in self._before or ():
            module = dispatcher.target.module
            dispatcher.selected = dispatcher.eager  # the user may hold it, in a wrapper for example
            if vars(module).get(slot) is not dispatcher:
                continue
            if before is _ABSENT:
                del vars(module)[slot]
            else:
                object.__setattr__(module, slot, before)
        self._trace_settings.remove()
        for phase in PHASES:
            for compiled_target in self.compiled_targets(phase):
                compiled_target.free_folded_weights()
        self._before = None

    def compiled_targets(self, phase: Phase) -> list[CompiledTarget]:
        """The compiled targets of a phase, including those of candidates; empty if the phase is eager."""
        return [
            compiled_target
            for (of_phase, _), all_made in self._made.items()
            if of_phase == phase
            for made in all_made
            for compiled_target in made.compiled_targets
        ]

    def called_targets(self, phase: Phase) -> set[str]:
        """The names of the targets that compiled steps of a phase called."""
        return {one.key.target for one in self.compiled_targets(phase) if one.called}

    @property
    def _dispatchers(self) -> Iterator[Dispatcher]:
        return (dispatcher for dispatchers in self._dispatchers_of for dispatcher in dispatchers)

    def _make(self, target: Compiled, phase: Phase, config: InductorConfig, name: str | None) -> _Made:
        def compiled_target(*, frozen: bool) -> CompiledTarget:
            return CompiledTarget(
                target,
                phase,
                config,
                passes=self._passes,
                recorder=self._recorder,
                isolation=self._isolation,
                warn=self._warn,
                settings=self._settings if name is None else self._settings.for_trial(),
                frozen=frozen,
                name=name,
            )

        freezes = config.freezes and phase == "infer" and len(target.members) == 1 and not target.members[0].sharded
        if freezes and (reason := unwatchable_reason(target.members[0].module)) is not None:
            freezes = False
            self._warn((target.name, "freezing"), f"freezing has no effect on target {target.name!r}: {reason}")
        return _Made(compiled_target(frozen=False), compiled_target(frozen=True) if freezes else None)


def _by_grad_mode(train: Callable[..., Any], infer: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return train(*args, **kwargs) if torch.is_grad_enabled() else infer(*args, **kwargs)

    return call


def compiled_target_names(module: nn.Module) -> list[str]:
    """The names of the submodules and methods that this library compiled in place; ``"forward"`` is the module's call.

    Args:
        module: The module to look at.
    """
    return [
        (f"{path}.{slot}" if slot not in (_CALL_SLOT, "forward") else path).removeprefix(".") or "forward"
        for path, part in module.named_modules()
        for slot, value in vars(part).items()
        if isinstance(value, Dispatcher)
    ]


def _is_redirected(module: nn.Module) -> bool:
    """Whether a call of the module runs its step now: Lightning makes a wrapper such as DDP call the step this way.

    It replaces ``forward`` by one of its functions for that call. Compiled, the graph would be the whole step.
    """
    forward = vars(module).get("forward")
    # Methods do not count: Lightning's demo modules are in its package too.
    return isinstance(forward, types.FunctionType) and forward.__module__.partition(".")[0] in _LIGHTNING


_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_ABSENT = object()
