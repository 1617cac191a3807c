"""`InductorConfig`: the settings for one compiled module."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.fingerprints import digest
from compile_callbacks._utils.import_ref import reference_to
from compile_callbacks._utils.messages import check_fields
from compile_callbacks._utils.phases import Phase
from compile_callbacks.config import templates
from compile_callbacks.config.options import as_options, check_loaded, check_mode
from compile_callbacks.passes.base import GraphPass, as_passes, pass_hook, pass_identity, pass_name
from compile_callbacks.passes.hooks import HOOK_OPTIONS

_DEFAULT_FOLD_LIMIT_MIB = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class InductorConfig:
    """Settings for one compiled module, checked against the installed torch when they are created.

    If several set one option, ``options`` override ``freezing``, that overrides ``template``, and that ``mode``.

    Args:
        mode: A mode of ``torch.compile``: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``,
            ``"max-autotune-no-cudagraphs"`` or ``"lite"`` (``torch._inductor.list_mode_options()`` tells what
            each sets). ``None`` is ``"default"``. Not together with ``options``, as in ``torch.compile``.
        template: The name of a set of Inductor options (``compile_callbacks.templates.names()``), with the mode that
            it implies.
        options: Inductor options by name (``torch._inductor.list_options()``), for example
            ``{"max_autotune": True, "triton.cudagraphs": True}``.
        freezing: Whether weights are frozen into the code while they are constant (test, predict;
            docs/cuda_graphs_and_freezing.md); ``None``: as ``options`` and ``template`` set it.
        fullgraph: Whether a graph break is a compiler failure.
        dynamic: ``True`` compiles for dynamic shapes at once, ``False`` recompiles for each shape, ``None`` compiles
            for dynamic shapes after the first change.
        passes: Custom graph passes, in this order: `GraphPass` objects, or objects of torch's own pass classes (they
            run at ``"post_grad_post"``); as data ``"module:name"``, or a mapping of ``class_path`` and ``init_args``.
        fold_weights: Whether inference graphs compute values that depend only on weights once for each version of the
            weights, and not on each call (docs/fold_weights.md). ``None``: in the infer phase only. In train, only
            modules without gradients have inference graphs.
        fold_limit_mib: The maximum memory for folded weights of each graph, in MiB; the graph computes the remaining
            values on each call.

    Raises:
        ValueError: An unknown mode, template or option, ``mode`` together with ``options``, a hook point that
            ``options`` and ``passes`` both use, or a ``fold_limit_mib`` that is not positive.
        TypeError: An argument or an option value of the wrong type.

    Example::

        >>> InductorConfig(options={"max_autotune": True}, dynamic=False).describe()
        'options={max_autotune: True}, dynamic=False'
    """

    mode: str | None = None
    template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    freezing: bool | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    passes: tuple[Any, ...] = ()
    fold_weights: bool | None = None
    fold_limit_mib: float = _DEFAULT_FOLD_LIMIT_MIB

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if not isinstance(self.template, (str, type(None))):
            raise TypeError(
                f"template={self.template!r} must be the name of a template, not {type(self.template).__name__}"
            )
        if self.template is not None:
            templates.get(self.template)
        object.__setattr__(self, "options", as_options({} if self.options is None else self.options))
        if self.mode is not None and self.options:
            raise ValueError(
                f"mode={self.mode!r} and options={dict(self.options)!r} cannot both be given, as in torch.compile; "
                "give the options that the mode stands for (torch._inductor.list_mode_options()) together with "
                "yours in options"
            )
        for name in ("freezing", "dynamic", "fold_weights"):
            if not isinstance(value := getattr(self, name), (bool, type(None))):
                raise TypeError(f"{name}={value!r} must be True, False or None")
        if not isinstance(self.fullgraph, bool):
            raise TypeError(f"fullgraph={self.fullgraph!r} must be True or False")
        if isinstance(self.fold_limit_mib, bool) or not isinstance(self.fold_limit_mib, (int, float)):
            raise TypeError(f"fold_limit_mib={self.fold_limit_mib!r} must be a number of MiB")
        if not 0 < self.fold_limit_mib < float("inf"):
            raise ValueError(
                f"fold_limit_mib={self.fold_limit_mib!r} must be above 0 and finite; fold_weights=False folds nothing"
            )
        object.__setattr__(self, "passes", as_passes(self.passes, "passes"))
        self.check_beside(self.passes)

    def check_beside(self, passes: Sequence[Any]) -> None:
        """Refuse a pass at a hook point that ``options`` also set: one of the two would be lost.

        Raises:
            ValueError: A hook point is set twice.
        """
        for graph_pass in passes:
            option = HOOK_OPTIONS[pass_hook(graph_pass)]
            if self.options.get(option) is not None:
                raise ValueError(
                    f"options[{option!r}] and passes={tuple(passes)!r} use the same hook point; give all of them in "
                    "passes, in the order in which they are to run"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled or deep-copied.
        return _rebuild, ({**self._set_fields(), "options": dict(self.options)},)

    def __eq__(self, other: object) -> bool:
        return self.key() == other.key() if isinstance(other, InductorConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key())

    def describe(self) -> str:
        """The settings that differ from the default, in one line; ``"default"`` if none does."""
        parts = []
        if self.mode not in (None, "default"):
            parts.append(str(self.mode))
        if self.template is not None:
            parts.append(f"template={self.template}" if parts else self.template)
        if self.options:
            shown = ", ".join(f"{name}: {_identity(value)}" for name, value in sorted(self.options.items()))
            parts.append(f"options={{{shown}}}")
        for f in fields(self)[3:]:
            if (value := getattr(self, f.name)) == f.default:
                continue
            if f.name == "passes":
                value = f"[{', '.join(map(pass_name, value))}]"
            elif f.name == "fold_limit_mib":
                value = f"{value:g}"
            parts.append(f"{f.name}={value}")
        return ", ".join(parts) or "default"

    def key(self) -> str:
        """A hash of the settings, the same in every process."""
        described = {
            **self._set_fields(),
            "mode": None if self.options else self.mode or "default",
            "template": self.template and [self.template, _texts(templates.get(self.template).resolved_options())],
            "options": _texts(self.options),
            "passes": [pass_identity(graph_pass) for graph_pass in self.passes],
            "fold_limit_mib": float(self.fold_limit_mib),
        }
        return digest(described)

    def resolved_options(self, device: torch.device | None = None) -> dict[str, Any]:
        """Every Inductor option that these settings set, including those of mode and template, by name.

        Args:
            device: The module's device, which may lack what the template needs; ``None``: nothing is missing.
        """
        options = _torch.inductor.resolve_options(self.mode, {}, self.dynamic)
        if self.template is not None:
            options |= templates.get(self.template).resolved_options(device)
        if self.freezing is not None:
            options["freezing"] = self.freezing
        return options | _torch.inductor.resolve_options(None, self.options, self.dynamic)

    def template_falls_back(self, device: torch.device) -> str | None:
        """What the template lacks on a device and what is used instead; ``None`` if nothing is missing."""
        return None if self.template is None else templates.get(self.template).falls_back(device)

    def to_dict(self) -> dict[str, Any]:
        """The settings that differ from the default, as JSON-ready data.

        Passes are written as ``"module:name"``.

        Raises:
            ValueError: A pass that is not a global of its module, or an option whose value is not plain data.
        """
        data = self._set_fields()
        data["options"] = {name: _plain(name, value) for name, value in self.options.items()}
        data["passes"] = [reference_to(p, _module_of(p)) for p in self.passes]
        default = {**InductorConfig()._set_fields(), "options": {}, "passes": []}
        return {name: value for name, value in data.items() if value != default[name]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, allow_passes: Sequence[str] = ()) -> InductorConfig:
        """Load settings that `to_dict` saved.

        Loaded settings cannot run code or a command: an option's value is a boolean, a number, ``None`` or one of the
        strings that Inductor enumerates for it. The constructor accepts every option.

        Args:
            data: The fields.
            allow_passes: The import paths of the graph passes that may be imported, as they appear in ``data``:
                ``["module:name"]``. Any other pass is refused.

        Raises:
            ValueError: An unknown field, or a value that is refused.
            TypeError: Not a mapping, or a value of the wrong type.
        """
        check_fields(data, InductorConfig)
        check_loaded(data, allow_passes)
        return cls(**data)

    @functools.cached_property
    def uses_cudagraphs(self) -> bool:
        """Whether these settings ask for CUDA graphs."""
        return bool(self.resolved_options().get("triton.cudagraphs"))

    @property
    def freezes(self) -> bool:
        """Whether these settings freeze weights while they are constant."""
        return bool(self.resolved_options().get("freezing"))

    def folds_weights(self, phase: Phase) -> bool:
        """Whether weights in inference graphs of a phase are folded."""
        return phase == "infer" if self.fold_weights is None else self.fold_weights

    def _set_fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _rebuild(settings: dict[str, Any]) -> InductorConfig:
    return InductorConfig(**settings)


def _plain(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"options[{name!r}]={value!r} cannot be saved: it is not plain data")
    return value


def _module_of(graph_pass: Any) -> str:
    # A pass that a decorator created is a global of its function's module.
    module: str = getattr(getattr(graph_pass, "function", None) or type(graph_pass), "__module__", "")
    return module


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: _identity(value) for name, value in sorted(options.items())}


def _identity(value: object) -> str:
    if isinstance(value, (GraphPass, *_torch.passes.TORCH_PASS_TYPES)):
        return pass_identity(value)
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)
