"""`InductorConfig`: the compiler settings of one phase. `Variant`: a config that a step can run."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.files import digest
from compile_callbacks._utils.messages import check_choice, check_fields, check_type
from compile_callbacks._utils.phases import EAGER, WAITING
from compile_callbacks.config import templates
from compile_callbacks.config.dynamo_settings import SWITCHES
from compile_callbacks.passes.base import HOOK_OPTIONS, as_passes, pass_identity


class Settings:
    """The base class of `InductorConfig` and `Tune`. Without it, jsonargparse accepts no subclass of a dataclass."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InductorConfig(Settings):
    """The compiler settings of one phase. The constructor checks them against the installed torch.

    If several arguments set the same Inductor option, ``options`` override ``freezing``, ``freezing`` overrides
    ``template``, and ``template`` overrides ``mode``.

    Args:
        mode: A mode of ``torch.compile``: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``,
            ``"max-autotune-no-cudagraphs"`` or ``"lite"`` (``torch._inductor.list_mode_options()`` lists the options
            of each).
        template: The name of a template, a set of Inductor options that includes a mode.
            ``compile_callbacks.templates.names()`` lists the names.
        options: Inductor options by name, for example ``{"max_autotune": True, "triton.cudagraphs": True}``.
            ``torch._inductor.list_options()`` lists the names.
        freezing: Whether Inductor freezes weights into the code while they are constant, in ``trainer.validate``,
            ``test`` and ``predict``. If ``None``, ``options`` and ``template`` decide.
        fullgraph: Whether a graph break counts as a compiler failure.
        dynamic: ``True`` compiles for dynamic shapes from the start. ``False`` compiles a graph for each shape.
            ``None`` makes dimensions dynamic that vary in the first steps, or in calls that no graph fits.
        activation_memory_budget: The share of activations that torch saves for the backward pass, from 0 to 1. 1.0
            saves all activations that the backward pass needs. 0.0 recomputes as many activations as possible, as
            activation checkpointing does. In between, torch recomputes the cheapest operators. torch only estimates
            the memory, so a smaller budget may have a higher peak: measure the peak. If ``None``, torch's own setting,
            which is 1.0.
        dynamo: Settings of ``torch._dynamo.config`` that apply to the compiles of this config only, for example
            ``{"capture_scalar_outputs": True}``.
        passes: Custom graph passes, in the order in which they run, after a pass that ``options`` or
            ``torch._inductor.config`` set at the same hook point. In YAML, a mapping of ``class_path`` and
            ``init_args``.

    Raises:
        ValueError: If a mode, template, option or Dynamo setting is unknown, or ``activation_memory_budget`` is not
            between 0 and 1.
        TypeError: If an argument or an option value has the wrong type.

    Example::

        >>> InductorConfig(options={"max_autotune": True}, dynamic=False).describe()
        'options={max_autotune: True}, dynamic=False'
    """

    mode: str = "default"
    template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    freezing: bool | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    activation_memory_budget: float | None = None
    dynamo: Mapping[str, Any] = field(default_factory=dict)
    passes: tuple[Any, ...] = ()

    @property
    def configs(self) -> tuple[InductorConfig, ...]:
        """This config. A `Tune` has several."""
        return (self,)

    def __post_init__(self) -> None:
        _check_mode(self.mode)
        if self.template is not None:
            templates.get(self.template)
        object.__setattr__(self, "options", _as_options(self.options))
        check_type("dynamo", self.dynamo, Mapping, "a mapping of setting names to values")
        for name, value in self.dynamo.items():
            check_choice("dynamo key", name, SWITCHES)
            check_type(f"dynamo[{name!r}]", value, bool, "True or False")
        object.__setattr__(self, "dynamo", dict(sorted(self.dynamo.items())))
        for name in ("freezing", "dynamic"):
            check_type(name, getattr(self, name), (bool, type(None)), "True, False or None")
        check_type("fullgraph", self.fullgraph, bool, "True or False")
        budget = self.activation_memory_budget
        check_type("activation_memory_budget", budget, (int, float, type(None)), "a number from 0 to 1, or None")
        if budget is not None and not 0 <= budget <= 1:
            text = f"activation_memory_budget={budget!r} must be from 0 (recompute everything) to 1 (keep everything)"
            raise ValueError(with_code("CC205", text))
        object.__setattr__(self, "passes", as_passes(self.passes))

    def __eq__(self, other: object) -> bool:
        return self.key() == other.key() if isinstance(other, InductorConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key())

    def describe(self) -> str:
        """Return the settings that differ from the defaults, in one line, or ``"default"`` if all are defaults."""
        changed = self._changed()
        parts = [changed.pop(name) for name in ("mode", "template") if name in changed]
        if self.options:
            changed["options"] = f"{{{', '.join(f'{name}: {text}' for name, text in _as_texts(self.options).items())}}}"
        if self.passes:
            changed["passes"] = f"[{', '.join(p.name for p in self.passes)}]"
        return ", ".join([*parts, *(f"{name}={value}" for name, value in changed.items())]) or "default"

    def key(self) -> str:
        """Return a hash of the settings, which is the same in every process."""
        described = {"options": _as_texts(self.resolved_options()), "passes": list(map(pass_identity, self.passes))}
        return digest(self._changed() | described)

    def resolved_options(self, device: torch.device | None = None) -> dict[str, Any]:
        """Return each Inductor option that these settings set, including the options of the mode and the template.

        Args:
            device: The module's device. The method omits options that the device does not support. If ``None``, the
                method omits nothing.
        """
        modes = _torch.inductor.modes()
        options = modes[self.mode]
        if self.template is not None:
            template = templates.get(self.template)
            options |= modes[template.mode]
            if device is None or template.works_on(device):
                options |= template.options
        if self.freezing is not None:
            options["freezing"] = self.freezing
        return {**options, **self.options}

    def template_falls_back(self, device: torch.device) -> str | None:
        """Return the reason why the template falls back on a device, and the fallback; or ``None`` if it does not."""
        if self.template is None or (template := templates.get(self.template)).works_on(device):
            return None
        return f"template {self.template!r} needs {template.needs}; it falls back to {template.mode}"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults as JSON-ready data. A pass becomes its name.

        Raises:
            ValueError: If the value of an option is not a boolean, a number or ``None``.
        """
        _check_data(self.options, "CC207")
        data = self._changed()
        return data | {"passes": [graph_pass.name for graph_pass in self.passes]} if self.passes else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, passes: Sequence[Any] = ()) -> InductorConfig:
        """Load settings that `to_dict` saved.

        Loaded settings cannot run code or a command. The method accepts an option only if its value is a boolean, a
        number or ``None``. The constructor accepts every option.

        Args:
            data: The settings by name.
            passes: The graph passes, which are code and therefore not in ``data``: objects with the saved names, in the
                same order.

        Raises:
            ValueError: If a field is unknown, a pass is missing, or the method refuses a value.
            TypeError: If ``data`` is not a mapping, or a value has the wrong type.
        """
        check_fields("data", data, InductorConfig)
        saved, names = data.get("passes") or [], [graph_pass.name for graph_pass in as_passes(passes)]
        if saved != names:
            text = (
                f"the settings were saved with the graph passes {saved!r}, and passes contains {names!r}; passes are "
                "code, so pass the objects with the saved names to from_dict(..., passes=[...]), in the same order"
            )
            raise ValueError(with_code("CC206", text))
        config = cls(**{**data, "passes": passes})
        _check_data(config.options, "CC206")
        return config

    @functools.cached_property
    def uses_cudagraphs(self) -> bool:
        """Whether these settings ask for CUDA graphs."""
        return bool(self.resolved_options().get("triton.cudagraphs"))

    @property
    def freezes(self) -> bool:
        """Whether these settings freeze weights while they are constant."""
        return bool(self.resolved_options().get("freezing"))

    def _changed(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) not in (f.default, {})}


def _as_options(options: Any) -> dict[str, Any]:
    """Check Inductor options against the installed torch. Return them in Inductor's spelling (``"max_autotune"``)."""
    check_type("options", options, Mapping, "a mapping of option names to values")
    checked: dict[str, Any] = {}
    names = sorted(_torch.inductor.option_names(), key=str.swapcase) if options else []  # private names last
    hint = " torch._inductor.list_options() lists all options."
    for given, value in options.items():
        name = str(given).replace("-", "_")
        check_choice("options key", name, names, hint)
        expected = _torch.inductor.settings().get_type(name)
        if name in HOOK_OPTIONS.values():
            if value is not None and not callable(value):  # torch accepts a string here, but then compiles nothing
                raise TypeError(with_code("CC202", f"options[{given!r}]={value!r} must be a graph pass"))
        # Unions, literals and annotations in quotes are not checked: the compiler refuses wrong values.
        elif isinstance(expected, type) and not isinstance(value, expected):
            text = f"options[{given!r}]={value!r} must be of type {expected.__name__}, not {type(value).__name__}"
            raise TypeError(with_code("CC202", text))
        checked[name] = value
    return checked


def _check_data(options: Mapping[str, Any], code: str) -> None:
    """Refuse options in saved settings that could run code: paths, commands and modules."""
    for name, value in options.items():
        if not isinstance(value, (bool, int, float, type(None))):
            text = (
                f"options[{name!r}]={value!r} is refused in saved settings, because it may name a file, a command or a "
                "module. Saved options are booleans, numbers and None"
            )
            raise ValueError(with_code(code, text))


def _as_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of options' values, which are the same in every process."""
    return {name: pass_identity(value) if callable(value) else repr(value) for name, value in sorted(options.items())}


class Variant(NamedTuple):
    """A config that a step can run, with its name. Eager is a variant without a config.

    Attributes:
        config: The config, or ``None`` if this library does not compile the step.
        name: The name of a candidate of a `Tune`, ``"eager"``, or ``None`` for the only config of a phase.
        healed: Whether ``"auto"`` has added settings of Dynamo to the config.
        static: Whether no graph may have a dynamic dimension, because nobody has asked for a CUDA graph of each size.
        reason: Why the mode ``"fast"`` became the config.
    """

    config: InductorConfig | None = None
    name: str | None = None
    healed: bool = False
    static: bool = False
    reason: str | None = None


EAGER_VARIANT = Variant(None, EAGER)

WAITING_VARIANT = Variant(None, WAITING)
"""Eager steps while another process compiles, which may slow them."""


Mode = str | InductorConfig | Mapping[str, Any] | None
"""The type of a mode argument. ``Mapping`` comes after the class, so that LightningCLI builds the class from YAML if it
can. Otherwise, LightningCLI passes the mapping unchanged, and `as_config` says what is wrong in it."""


def as_config(value: object, argument: str, also: tuple[str, ...] = (EAGER,)) -> InductorConfig | None:
    """Convert a mode to a config. Return ``None`` for ``None`` and ``"eager"``, which compile nothing."""
    if value is None or value == EAGER:
        return None
    if isinstance(value, InductorConfig):
        return value
    expected = "a mode, a mapping of InductorConfig's fields or an InductorConfig"
    check_type(argument, value, (str, Mapping), expected)
    if isinstance(value, Mapping):
        check_fields(argument, value, InductorConfig)
        return InductorConfig(**value)
    name = str(value)
    if name in templates.names():
        return InductorConfig(template=name)
    _check_mode(name, argument, (*templates.names(), *also))
    return InductorConfig(mode=name)


def _check_mode(mode: object, argument: str = "mode", also: tuple[str, ...] = ()) -> None:
    check_type(argument, mode, str, "the name of a mode, such as 'default'")
    hint = " `compile-callbacks modes` explains the modes and templates."
    check_choice(argument, mode, [*_torch.inductor.modes(), *also], hint)


def as_compiling_config(mode: object) -> InductorConfig:
    """Convert a mode to a config, and refuse modes that compile nothing."""
    config = as_config(mode, "mode", also=())
    if config is None:
        raise ValueError(with_code("CC203", f"{mode=} compiles nothing; use a mode of torch.compile"))
    return config
