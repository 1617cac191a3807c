"""The phase switch: puts compiled callables on modules, selects the phase's, and takes them off again."""

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
from compile_callbacks.runtime.compiled_target import CompiledRegion, Isolation
from compile_callbacks.runtime.freezing import why_not_watched
from compile_callbacks.runtime.target_settings import RegionSettings
from compile_callbacks.runtime.targets import Compiled, InstalledCall, Target

_CALL_SLOT = "_compiled_call_impl"  # what nn.Module.compile() sets, and nn.Module.__call__ looks at


class _Made(NamedTuple):
    """The regions of a target for one config: the usual one, and one with frozen weights if the config freezes."""

    region: CompiledRegion
    frozen: CompiledRegion | None

    @property
    def regions(self) -> list[CompiledRegion]:
        """Both, or the one that there is."""
        return [self.region] if self.frozen is None else [self.region, self.frozen]


class Dispatcher(InstalledCall):
    """Stands in a target's slot and calls what is selected: a compiled region, or the module itself.

    An object and not a closure, so that a copy or a pickle of the module can leave it behind: a copied call
    would run the original's weights.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.compiled_by_user: Callable[..., Any] | None = None  # by module.compile(), for phases that are left alone
        self.left_alone: frozenset[Phase] = frozenset()
        self.regions: dict[Phase, CompiledRegion] = {}
        self.frozen_regions: dict[Phase, CompiledRegion] = {}
        self.eager = target.eager
        self.__wrapped__ = self.eager  # Lightning looks through it for what a method is, and which arguments it takes
        self.selected: Callable[..., Any] = self.eager
        self.session: Any = None  # whoever compiled the target, where it has to be found again from it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is selected."""
        if torch.compiler.is_compiling():  # inside another target's trace, or an export: be part of its graph
            return self.eager(*args, **kwargs)
        if _is_redirected(self.target.module):
            return self.eager(*args, **kwargs)
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # as for a logger's graph
            return self.eager(*args, **kwargs)
        return self.selected(*args, **kwargs)

    def call(self, phase: Phase, *, compiled: bool = True, frozen: bool = False) -> Callable[..., Any]:
        """The call of the target in a phase.

        Args:
            phase: The phase.
            compiled: Whether to run compiled, where the phase is.
            frozen: Whether to run with weights baked in, where there is such.
        """
        if self.compiled_by_user is not None and phase in self.left_alone:
            return self.compiled_by_user
        region = (self.frozen_regions.get(phase) if frozen else None) or self.regions.get(phase)
        return region.on(self.target) if compiled and region is not None else self.eager

    def __reduce__(self) -> tuple[Any, ...]:
        # As what any process can load without this library: the module's own method.
        if self.target.method is None:
            return type(None), ()
        if (own := self.target.own_function) is not None:
            return operator.getitem, ([own], 0)
        return getattr, (self.target.module, self.target.method)

    def by_grad_mode(self, *, frozen: bool) -> Callable[..., Any]:
        """The call of the target in the phase that the grad mode tells, if no trainer selects a phase.

        Args:
            frozen: Whether calls without grad run with weights baked in, if the config freezes.
        """
        train, infer = self.call("train"), self.call("infer", frozen=frozen)

        def call(*args: Any, **kwargs: Any) -> Any:
            return train(*args, **kwargs) if torch.is_grad_enabled() else infer(*args, **kwargs)

        return call


class PhaseSwitch:
    """Compiles targets with one set of settings a phase, in place, and selects between them.

    Nothing is compiled before a target is called. No wrapper module exists: ``state_dict`` keys,
    ``isinstance``, hooks and optimizers see the original modules.

    A phase whose config asks for freezing has a second region a target, with the weights baked in; it is selected
    by `select` with ``frozen=True``, for stages in which the weights stand still.

    The settings of a phase may change (`use`): what was compiled with others stays for when they are used again, until
    `drop`.

    Args:
        targets: What is compiled.
        configs: The settings by phase; ``None`` leaves a phase eager.
        left_alone: Phases in which a target that the user compiled in place runs as the user compiled it.
        passes: Graph passes for both phases, before those of each config.
        recorder: Told of everything that happens while compiling.
        settings: What regions do beside compiling.
        warn: Warns of each subject once.
    """

    def __init__(
        self,
        targets: Sequence[Compiled],
        configs: Mapping[Phase, InductorConfig | None],
        *,
        left_alone: frozenset[Phase] = frozenset(),
        passes: Sequence[Any] = (),
        recorder: CompileRecorder,
        settings: RegionSettings | None = None,
        warn: WarnOnce | None = None,
    ) -> None:
        self.targets: tuple[Compiled, ...] = ()
        self._passes = tuple(passes)
        self._recorder = recorder
        self._settings = settings or RegionSettings()
        self._warn = warn or WarnOnce()
        self._isolation = Isolation()
        self._left_alone = left_alone
        self._dispatchers_of: list[list[Dispatcher]] = []
        self._made: dict[tuple[Phase, str | None], list[_Made]] = {}
        self._config_of: dict[tuple[Phase, str | None], InductorConfig] = {}
        self._in_use: dict[Phase, tuple[InductorConfig | None, str | None]] = {}
        self._trace_settings = _torch.events.TraceSettings(
            ours=lambda: recorder.owner is not None,
            frozen=lambda: recorder.owner is not None and recorder.owner.frozen,
        )
        recorder.on_reset = self._trace_settings.install
        self._before: list[tuple[Dispatcher, str, Any]] | None = None
        self._selected: tuple[Phase, bool, bool] | None = None
        for phase, config in configs.items():
            self.use(phase, config)
        self.add(targets)

    @property
    def shares_graphs(self) -> bool:
        """Whether graphs serve several modules, so that no weights can be baked into them."""
        return any(len(target.members) > 1 for target in self.targets)

    @property
    def installed(self) -> bool:
        """Whether the targets call through this switch."""
        return self._before is not None

    def install(self) -> None:
        """Put a dispatcher on each target; it calls the module itself until a phase is selected."""
        for dispatcher in self._dispatchers:
            dispatcher.selected = dispatcher.eager
        self._selected = None
        if self.installed:
            return
        self._before = []
        self._trace_settings.install()
        self._put(self._dispatchers)

    def add(self, targets: Sequence[Compiled]) -> None:
        """Compile further targets, from their next call on."""
        dispatchers = [[Dispatcher(member) for member in target.members] for target in targets]
        for dispatcher in (one for of_target in dispatchers for one in of_target):
            dispatcher.left_alone = self._left_alone
        self.targets += tuple(targets)
        self._dispatchers_of += dispatchers
        for (phase, name), made in self._made.items():
            made += [self._make(target, phase, self._config_of[phase, name], name) for target in targets]
        for phase, (config, name) in self._in_use.items():
            self.use(phase, config, name)
        if self.installed:
            self._put([one for of_target in dispatchers for one in of_target])

    def _put(self, dispatchers: Iterable[Dispatcher]) -> None:
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

    def select(self, phase: Phase, *, compiled: bool = True, frozen: bool = False) -> None:
        """Have the targets run with a phase's settings, or eagerly where ``compiled`` is false.

        Args:
            phase: The phase.
            compiled: Whether to run compiled.
            frozen: Whether to run with weights baked in, where the config asks for it.
        """
        if self._selected == (phase, compiled, frozen):  # as in most steps, and 10 µs a target else
            return
        for dispatcher in self._dispatchers:
            dispatcher.selected = dispatcher.call(phase, compiled=compiled, frozen=frozen)
        self._selected = phase, compiled, frozen

    def use(self, phase: Phase, config: InductorConfig | None, name: str | None = None) -> None:
        """Have a phase run with these settings from the next `select` on.

        Args:
            phase: The phase.
            config: The settings; ``None`` for eager.
            name: What they are called, where they are one of several candidates: they are on trial until `choose`.
        """
        self._selected = None
        self._in_use[phase] = config, name
        if config is not None and (phase, name) not in self._made:
            self._config_of[phase, name] = config
            self._made[phase, name] = [self._make(target, phase, config, name) for target in self.targets]
        for dispatcher in self._dispatchers:
            dispatcher.regions.pop(phase, None)
            dispatcher.frozen_regions.pop(phase, None)
        if config is None:
            return
        for made, dispatchers in zip(self._made[phase, name], self._dispatchers_of, strict=True):
            for dispatcher in dispatchers:
                dispatcher.regions[phase] = made.region
                if made.frozen is not None:
                    dispatcher.frozen_regions[phase] = made.frozen

    def choose(self, phase: Phase, name: str) -> None:
        """Candidates that were on trial are the phase's settings: they are treated as such from here on."""
        for made in self._made.get((phase, name), ()):
            for region in made.regions:
                region.choose(self._settings)

    def drop(self, phase: Phase, name: str) -> None:
        """Give back what was compiled with candidates that are not to be used again."""
        self._config_of.pop((phase, name), None)
        for made in self._made.pop((phase, name), ()):
            for region in made.regions:
                region.free_compiled()

    def belongs_to(self, session: Any) -> None:
        """Have the targets know who compiled them."""
        for dispatcher in self._dispatchers:
            dispatcher.session = session

    @property
    def trace_settings(self) -> _torch.events.TraceSettings:
        """The settings that hold while the targets are traced."""
        return self._trace_settings

    def suspect_weights(self) -> None:
        """Have weights that are baked in or folded looked at before they are used again."""
        for phase in PHASES:
            for region in self.regions(phase):
                region.suspect_weights()

    def select_by_grad_mode(self, *, frozen: bool = False) -> None:
        """Have each call choose: the train settings where grad is enabled, else the infer settings.

        Args:
            frozen: Whether calls without grad run with weights baked in, where the config asks for it.
        """
        self._selected = None
        for dispatcher in self._dispatchers:
            dispatcher.selected = dispatcher.by_grad_mode(frozen=frozen)

    def free_compiled(self) -> None:
        """Give back what compiled code takes; where a target is called again, it is compiled again."""
        for phase in PHASES:
            for region in self.regions(phase):
                region.free_compiled()

    def remove(self) -> None:
        """Leave every module as it was before `install`; what the user put into a slot since stays."""
        for dispatcher, slot, before in self._before or ():
            module = dispatcher.target.module
            dispatcher.selected = dispatcher.eager  # the user may hold it, in a function around it
            if vars(module).get(slot) is not dispatcher:
                continue
            if before is _ABSENT:
                del vars(module)[slot]
            else:
                object.__setattr__(module, slot, before)
        self._trace_settings.remove()
        for phase in PHASES:
            for region in self.regions(phase):
                region.free_folded_weights()
        self._before = None

    def regions(self, phase: Phase) -> list[CompiledRegion]:
        """The compiled regions of a phase, those of candidates among them; none where the phase is left eager."""
        return [
            region
            for (of_phase, _), all_made in self._made.items()
            if of_phase == phase
            for made in all_made
            for region in made.regions
        ]

    @property
    def _dispatchers(self) -> Iterator[Dispatcher]:
        return (dispatcher for dispatchers in self._dispatchers_of for dispatcher in dispatchers)

    def _make(self, target: Compiled, phase: Phase, config: InductorConfig, name: str | None) -> _Made:
        def region(*, frozen: bool) -> CompiledRegion:
            return CompiledRegion(
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
        if freezes and (reason := why_not_watched(target.members[0].module)) is not None:
            freezes = False
            self._warn((target.name, "freezing"), f"freezing has no effect on target {target.name!r}: {reason}")
        return _Made(region(frozen=False), region(frozen=True) if freezes else None)


def compiled_parts(module: nn.Module) -> list[str]:
    """The names of a module's parts that are compiled in place by this library; ``"forward"`` is the module's own call.

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
    """Whether a call of the module is a step of its: Lightning has a wrapper around it, DDP for example, call the step.

    It puts a function of its own in the place of ``forward`` for that call. Compiled, it would be the step as a whole.
    """
    forward = vars(module).get("forward")
    # Not a method: those of Lightning's own demos are in its package too.
    return isinstance(forward, types.FunctionType) and forward.__module__.partition(".")[0] in _LIGHTNING


_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_ABSENT = object()
