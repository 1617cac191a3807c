"""`InductorConfig`: the compiler settings of one phase. `Variant`: a config that a step can run."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.fingerprints import digest
from compile_callbacks._utils.messages import check_fields, check_type, part_of
from compile_callbacks._utils.phases import EAGER, WAITING
from compile_callbacks.config import templates
from compile_callbacks.config.dynamo_settings import as_dynamo_settings
from compile_callbacks.config.options import as_options, check_loaded_options, check_mode
from compile_callbacks.passes.base import HOOK_OPTIONS, as_passes, pass_hook, pass_identity, pass_name, pass_types


class Settings:
    """The base class of `InductorConfig` and `Tune`. Without it, jsonargparse accepts no subclass of a dataclass."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InductorConfig(Settings):
    """The compiler settings of one phase. The constructor checks them against the installed torch.

    If several arguments set the same Inductor option, ``options`` override ``freezing``, and ``freezing`` overrides
    ``mode`` and ``template``.

    Args:
        mode: A mode of ``torch.compile``: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``,
            ``"max-autotune-no-cudagraphs"`` or ``"lite"`` (``torch._inductor.list_mode_options()`` lists the options
            of each).
        template: The name of a template, a set of Inductor options that includes a mode.
            ``compile_callbacks.templates.names()`` lists the names. Allowed only with ``mode="default"``.
        options: Inductor options by name, for example ``{"max_autotune": True, "triton.cudagraphs": True}``.
            ``torch._inductor.list_options()`` lists the names. Allowed only with ``mode="default"``, as in
            ``torch.compile``.
        freezing: Whether Inductor freezes weights into the code while they are constant, in ``trainer.validate``,
            ``test`` and ``predict``. If ``None``, ``options`` and ``template`` decide.
        fullgraph: Whether a graph break counts as a compiler failure.
        dynamic: ``True`` compiles for dynamic shapes from the start. ``False`` recompiles for each shape. ``None``
            compiles for dynamic shapes after the first change of a shape.
        activation_memory_budget: The share of activations that torch saves for the backward pass, from 0 to 1. 1.0
            saves all activations that the backward pass needs. 0.0 recomputes as many activations as possible, as
            activation checkpointing does. In between, torch recomputes the cheapest operators. torch only estimates
            the memory, so a smaller budget may have a higher peak: measure the peak. If ``None``, torch's own setting,
            which is 1.0.
        dynamo: Settings of ``torch._dynamo.config`` that apply to the compiles of this config only, for example
            ``{"capture_scalar_outputs": True}``.
        passes: Custom graph passes, in the order in which they run: `GraphPass` objects, or objects of torch's own
            pass classes, which run at ``"post_grad_post"``. In YAML, a mapping of ``class_path`` and ``init_args``.

    Raises:
        ValueError: If a mode, template, option or Dynamo setting is unknown; if ``mode`` is combined with ``options``
            or ``template``; if ``options`` and ``passes`` use the same hook point; or if ``activation_memory_budget``
            is not between 0 and 1.
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

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if self.template is not None:
            templates.get(self.template)
        object.__setattr__(self, "options", as_options({} if self.options is None else self.options))
        object.__setattr__(self, "dynamo", as_dynamo_settings({} if self.dynamo is None else self.dynamo))
        self._check_mode_is_alone()
        for name in ("freezing", "dynamic"):
            check_type(name, getattr(self, name), (bool, type(None)), "True, False or None")
        check_type("fullgraph", self.fullgraph, bool, "True or False")
        budget = self.activation_memory_budget
        check_type("activation_memory_budget", budget, (int, float, type(None)), "a number from 0 to 1, or None")
        if budget is not None and not 0 <= budget <= 1:
            text = f"activation_memory_budget={budget!r} must be from 0 (recompute everything) to 1 (keep everything)"
            raise ValueError(with_code("CC205", text))
        object.__setattr__(self, "passes", as_passes(self.passes, "passes"))
        self.check_hook_points(self.passes)

    def _check_mode_is_alone(self) -> None:
        """Refuse a mode together with options or a template, because both would set the same options."""
        if self.mode == "default":
            return
        if self.options:
            both = {**_torch.inductor.options_of_mode(self.mode), **self.options}
            text = (
                f"mode={self.mode!r} and options={dict(self.options)!r} cannot be combined, as in torch.compile; set "
                f"the options of both, options={both!r}"
            )
            raise ValueError(with_code("CC203", text))
        if self.template is not None:
            text = f"mode={self.mode!r} and template={self.template!r} cannot be combined; a template includes a mode"
            raise ValueError(with_code("CC203", text))

    def check_hook_points(self, passes: Sequence[Any]) -> None:
        """Refuse a pass at a hook point that ``options`` also set, because torch runs only one pass there."""
        for graph_pass in passes:
            option = HOOK_OPTIONS[pass_hook(graph_pass)]
            if self.options.get(option) is not None:
                text = (
                    f"options[{option!r}] and passes={tuple(passes)!r} use the same hook point; list all passes in "
                    "passes, in the order in which they should run"
                )
                raise ValueError(with_code("CC203", text))

    def __getstate__(self) -> dict[str, Any]:
        # Converts the mapping proxies, which cannot be pickled or deep-copied, to dicts.
        return {**vars(self), "options": dict(self.options), "dynamo": dict(self.dynamo)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        proxies = {name: types.MappingProxyType(state[name]) for name in ("options", "dynamo")}
        vars(self).update(state, **proxies)

    def __eq__(self, other: object) -> bool:
        return self.key() == other.key() if isinstance(other, InductorConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key())

    def describe(self) -> str:
        """Return the settings that differ from the defaults, in one line, or ``"default"`` if all are defaults."""
        changed = self._changed()
        parts = [changed.pop(name) for name in ("mode", "template") if name in changed]
        if self.options:
            shown = ", ".join(f"{name}: {value}" for name, value in self._options_as_text().items())
            changed["options"] = f"{{{shown}}}"
        if self.passes:
            changed["passes"] = f"[{', '.join(map(pass_name, self.passes))}]"
        return ", ".join([*parts, *(f"{name}={value}" for name, value in changed.items())]) or "default"

    def key(self) -> str:
        """Return a hash of the settings, which is the same in every process."""
        described: dict[str, Any] = {
            "options": self._options_as_text(),
            "passes": list(map(pass_identity, self.passes)),
        }
        if self.template is not None:
            described["template"] = [self.template, templates.get(self.template).resolved_options()]
        return digest({**self._changed(), **described})

    def resolved_options(self, device: torch.device | None = None) -> dict[str, Any]:
        """Return each Inductor option that these settings set, including the options of the mode and the template.

        Args:
            device: The module's device. The method omits options that the device does not support. If ``None``, the
                method omits nothing.
        """
        options = _torch.inductor.options_of_mode(self.mode)
        if self.template is not None:
            options |= templates.get(self.template).resolved_options(device)
        if self.freezing is not None:
            options["freezing"] = self.freezing
        return {**options, **self.options}

    def template_falls_back(self, device: torch.device) -> str | None:
        """Return the reason why the template falls back on a device, and the fallback; or ``None`` if it does not."""
        return None if self.template is None else templates.get(self.template).falls_back(device)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults as JSON-ready data. A pass becomes its name.

        Raises:
            ValueError: If the value of an option is not plain data.
        """
        for name, value in self.options.items():
            if not isinstance(value, (bool, int, float, str, type(None))):
                text = f"options[{name!r}]={value!r} cannot be saved: it is not a number, a string, a boolean or None"
                raise ValueError(with_code("CC207", text))
        data = self._changed()
        if self.passes:
            data["passes"] = list(map(pass_name, self.passes))
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, passes: Sequence[Any] = ()) -> InductorConfig:
        """Load settings that `to_dict` saved.

        Loaded settings cannot run code or a command. The method accepts an option only if its value is a boolean, a
        number, ``None`` or a string that Inductor enumerates for the option. The constructor accepts every option.

        Args:
            data: The settings by name.
            passes: The graph passes, which are code and therefore not in ``data``: objects with the saved names, in the
                same order.

        Raises:
            ValueError: If a field is unknown, a pass is missing, or the method refuses a value.
            TypeError: If ``data`` is not a mapping, or a value has the wrong type.
        """
        check_fields(data, InductorConfig)
        check_loaded_options(data.get("options"))
        saved, given = data.get("passes") or [], as_passes(passes, "passes")
        if saved != (names := [pass_name(graph_pass) for graph_pass in given]):
            text = (
                f"the settings were saved with the graph passes {saved!r}, and passes contains {names!r}; passes are "
                "code, so pass the objects with the saved names to from_dict(..., passes=[...]), in the same order"
            )
            raise ValueError(with_code("CC206", text))
        return cls(**{**data, "passes": given})

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
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {"options": dict(self.options), "dynamo": dict(self.dynamo)}
        defaults = {f.name: {} if f.default is MISSING else f.default for f in fields(self)}
        return {name: value for name, value in values.items() if value != defaults[name]}

    def _options_as_text(self) -> dict[str, str]:
        return {name: _as_text(value) for name, value in sorted(self.options.items())}


def _as_text(value: object) -> str:
    """Return the text of an option's value, which is the same in every process."""
    if isinstance(value, pass_types()):
        return pass_identity(value)
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)


class Variant(NamedTuple):
    """A config that a step can run, with its name. Eager is a variant without a config.

    Attributes:
        config: The config, or ``None`` if this library does not compile the step.
        name: The name of a candidate of a `Tune`, ``"eager"``, or ``None`` for the only config of a phase.
        healed: Whether ``"auto"`` has added settings of Dynamo to the config.
    """

    config: InductorConfig | None = None
    name: str | None = None
    healed: bool = False


EAGER_VARIANT = Variant(None, EAGER)

WAITING_VARIANT = Variant(None, WAITING)
"""Eager steps while another process compiles, which may slow them."""


Mode = str | InductorConfig | Mapping[str, Any] | None
"""The type of a mode argument. ``Mapping`` comes after the class, so that LightningCLI builds the class from YAML if it
can. Otherwise, LightningCLI passes the mapping unchanged, and `as_config` says what is wrong in it."""


def as_config(value: object, argument: str, also: tuple[str | None, ...] = (EAGER,)) -> InductorConfig | None:
    """Convert a mode to a config. Return ``None`` for ``None`` and ``"eager"``, which compile nothing."""
    if value is None or value == EAGER:
        return None
    if isinstance(value, InductorConfig):
        return value
    expected = "a mode, a mapping of InductorConfig's fields or an InductorConfig"
    check_type(argument, value, (str, Mapping), expected)
    if isinstance(value, Mapping):
        if "class_path" in value:  # jsonargparse replaces such a mapping by the object if it can
            text = f"{argument}={dict(value)!r} creates no InductorConfig or Tune: check class_path and init_args"
            raise ValueError(with_code("CC201", text))
        with part_of(argument):
            check_fields(value, InductorConfig, f" Inductor options belong in {argument}={{'options': {{...}}}}.")
            return InductorConfig(**value)
    name = str(value)
    if name in templates.names():
        return InductorConfig(template=name)
    check_mode(name, argument, also=(*templates.names(), *also))
    return InductorConfig(mode=name)


def as_compiling_config(value: object, argument: str = "mode") -> InductorConfig:
    """Convert a mode to a config, and refuse modes that compile nothing."""
    config = as_config(value, argument, also=())
    if config is None:
        raise ValueError(with_code("CC203", f"{argument}={value!r} compiles nothing; use a mode of torch.compile"))
    return config
