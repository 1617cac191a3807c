"""`InductorConfig`: the settings for one compiled module."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.choices import unknown
from compile_callbacks.files.whole_files import appears_whole
from compile_callbacks.links import checks_settings
from compile_callbacks.passes import GraphPass, as_passes, pass_identity, pass_name
from compile_callbacks.phases import Phase
from compile_callbacks.references import reference_to
from compile_callbacks.settings import templates
from compile_callbacks.settings.config_checks import (
    as_autocast_dtype,
    check_hook_points,
    check_mode,
    check_template,
    dtype_name,
)
from compile_callbacks.settings.options import as_options

_DEFAULT_FOLD_LIMIT_MB = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class InductorConfig:
    """Settings for one compiled module, checked against the installed torch when they are made.

    Where several set one option, ``options`` win over ``freezing``, that over ``template``, and that over ``mode``.

    Args:
        mode: A mode of ``torch.compile``: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``,
            ``"max-autotune-no-cudagraphs"`` or ``"lite"`` (``torch._inductor.list_mode_options()`` tells what
            each sets). ``None`` is ``"default"``. Not together with ``options``, as in ``torch.compile``.
        template: The name of a set of Inductor options (``compile_callbacks.templates.names()``), with the mode that
            it implies.
        options: Inductor options by name (``torch._inductor.list_options()``), for example
            ``{"max_autotune": True, "triton.cudagraphs": True}``.
        freezing: Whether weights are baked in where they stand still (test, predict;
            docs/cuda_graphs_and_freezing.md); ``None`` leaves it to ``options`` and ``template``.
        fullgraph: Refuse graph breaks: a model that has one is a compiler failure.
        dynamic: ``True`` compiles for changing shapes at once, ``False`` compiles anew for each shape, ``None``
            for changing shapes after the first change.
        passes: Custom graph passes, run in this order: `GraphPass` objects, or objects of torch's own pass
            classes (those run at ``"post_grad_post"``); as data ``"module:name"``, or a mapping of ``class_path`` and
            ``init_args``.
        fold_weights: Whether what inference graphs compute from weights alone is computed once for each version of
            the weights, and not on each call (docs/fold_weights.md). ``None``: in the infer phase, and not in train,
            where only modules without gradients have inference graphs.
        fold_limit_mb: The most memory that this may take for each graph, in MiB; what would take more is computed
            on each call, as without folding.
        autocast_enabled: Whether targets run under ``torch.autocast``; ``None`` leaves autocast as it is outside. It
            wins over the autocast of a Trainer's precision. Where it is ``True``, outputs come back in the dtype that
            the module gives without it.
        autocast_dtype: What autocast computes in, ``torch.bfloat16`` or ``torch.float16``, or the name of one; ``None``
            is torch's default for the device, float16 on a GPU and bfloat16 on a CPU. In training, float16 needs a
            gradient scaler, which the Trainer's ``precision="16-mixed"`` brings.

    Raises:
        ValueError: An unknown mode, template or option, ``mode`` together with ``options``, a hook point that
            ``options`` or the template set and ``passes`` use, a ``fold_limit_mb`` that is no positive number, an
            ``autocast_dtype`` that autocast does not compute in, or one without ``autocast_enabled=True``.
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
    fold_limit_mb: float = _DEFAULT_FOLD_LIMIT_MB
    autocast_enabled: bool | None = None
    autocast_dtype: torch.dtype | None = None

    @checks_settings
    def __post_init__(self) -> None:
        check_mode(self.mode)
        check_template(self.template)
        object.__setattr__(self, "options", as_options({} if self.options is None else self.options))
        if self.mode is not None and self.options:
            raise ValueError(
                f"mode={self.mode!r} and options={dict(self.options)!r} cannot both be given, as in torch.compile; "
                "give the options that the mode stands for (torch._inductor.list_mode_options()) together with "
                "yours in options"
            )
        if self.freezing is not None and not isinstance(self.freezing, bool):
            raise TypeError(f"freezing={self.freezing!r} must be True, False or None")
        if not isinstance(self.fullgraph, bool):
            raise TypeError(f"fullgraph={self.fullgraph!r} must be True or False")
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise TypeError(f"dynamic={self.dynamic!r} must be True, False or None")
        if self.fold_weights is not None and not isinstance(self.fold_weights, bool):
            raise TypeError(f"fold_weights={self.fold_weights!r} must be True, False or None")
        if isinstance(self.fold_limit_mb, bool) or not isinstance(self.fold_limit_mb, (int, float)):
            raise TypeError(f"fold_limit_mb={self.fold_limit_mb!r} must be a number of MiB")
        if not 0 < self.fold_limit_mb < float("inf"):
            raise ValueError(
                f"fold_limit_mb={self.fold_limit_mb!r} must be above 0 and finite; fold_weights=False folds nothing"
            )
        if self.autocast_enabled is not None and not isinstance(self.autocast_enabled, bool):
            raise TypeError(f"autocast_enabled={self.autocast_enabled!r} must be True, False or None")
        object.__setattr__(self, "autocast_dtype", as_autocast_dtype(self.autocast_dtype))
        if self.autocast_dtype is not None and not self.autocast_enabled:
            raise ValueError(
                f"autocast_dtype={self.autocast_dtype} has no effect with autocast_enabled={self.autocast_enabled}; "
                "give autocast_enabled=True with it"
            )
        object.__setattr__(self, "passes", as_passes(self.passes, "passes"))
        self.check_beside(self.passes)

    def check_beside(self, passes: Sequence[Any]) -> None:
        """Refuse passes at a hook point that ``options`` or the template set.

        Raises:
            ValueError: There is one.
        """
        check_hook_points(passes, self.options, self.template)

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled or deep-copied.
        return _rebuild, ({**self._set_fields(), "options": dict(self.options)},)

    def __eq__(self, other: object) -> bool:
        return self.key() == other.key() if isinstance(other, InductorConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key())

    def describe(self) -> str:
        """What differs from the default settings, in a line; ``"default"`` where nothing does."""
        parts = []
        if self.mode not in (None, "default"):
            parts.append(str(self.mode))
        if self.template is not None:
            parts.append(f"template={self.template}" if parts else self.template)
        if self.options:
            shown = ", ".join(f"{name}: {_identity(value)}" for name, value in sorted(self.options.items()))
            parts.append(f"options={{{shown}}}")
        if self.freezing is not None:
            parts.append(f"freezing={self.freezing}")
        if self.fullgraph:
            parts.append("fullgraph=True")
        if self.dynamic is not None:
            parts.append(f"dynamic={self.dynamic}")
        if self.passes:
            parts.append(f"passes=[{', '.join(pass_name(graph_pass) for graph_pass in self.passes)}]")
        if self.fold_weights is not None:
            parts.append(f"fold_weights={self.fold_weights}")
        if self.fold_limit_mb != _DEFAULT_FOLD_LIMIT_MB:
            parts.append(f"fold_limit_mb={self.fold_limit_mb:g}")
        if self.autocast_enabled is not None:
            parts.append(f"autocast_enabled={self.autocast_enabled}")
        if self.autocast_dtype is not None:
            parts.append(f"autocast_dtype={dtype_name(self.autocast_dtype)}")
        return ", ".join(parts) or "default"

    def key(self) -> str:
        """A hash of the settings: equal for equal settings, also in another process."""
        described = {
            "mode": self.mode or "default",
            "template": self.template and [self.template, _texts(templates.get(self.template).resolved_options())],
            "freezing": self.freezing,
            "options": _texts(self.options),
            "fullgraph": self.fullgraph,
            "dynamic": self.dynamic,
            "passes": [pass_identity(graph_pass) for graph_pass in self.passes],
            "fold_weights": self.fold_weights,
            "fold_limit_mb": float(self.fold_limit_mb),
            "autocast_enabled": self.autocast_enabled,
            "autocast_dtype": self.autocast_dtype and dtype_name(self.autocast_dtype),
        }
        if described["options"]:
            described["mode"] = None
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]

    def resolved_options(self, device: torch.device | None = None) -> dict[str, Any]:
        """Every Inductor option that these settings set, those of mode and template among them, by name.

        Args:
            device: Where the module is, which may lack what the template needs; ``None``: as if it lacked nothing.
        """
        options = _torch.resolve_options(self.mode, {}, self.dynamic)
        if self.template is not None:
            options |= templates.get(self.template).resolved_options(device)
        if self.freezing is not None:
            options["freezing"] = self.freezing
        return options | _torch.resolve_options(None, self.options, self.dynamic)

    def template_falls_back(self, device: torch.device) -> str | None:
        """What the template lacks on a device and what is used instead; ``None`` where it lacks nothing."""
        return None if self.template is None else templates.get(self.template).falls_back(device)

    @checks_settings
    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready data, without those that are as by default.

        Passes are written as ``"module:name"``, dtypes by name.

        Raises:
            ValueError: A pass that stands under no name in its module, or an option that is no plain value.
        """
        data = self._set_fields()
        data["options"] = {name: _plain(name, value) for name, value in self.options.items()}
        data["passes"] = [reference_to(p, _module_of(p)) for p in self.passes]
        data["autocast_dtype"] = self.autocast_dtype and dtype_name(self.autocast_dtype)
        default = {**InductorConfig()._set_fields(), "options": {}, "passes": []}
        return {name: value for name, value in data.items() if value != default[name]}

    @classmethod
    @checks_settings
    def from_dict(cls, data: Mapping[str, Any]) -> InductorConfig:
        """The settings that `to_dict` made ``data`` of.

        Raises:
            ValueError: An unknown field, or a value that is refused.
            TypeError: Not a mapping, or a value of the wrong type.
        """
        if not isinstance(data, Mapping):
            raise TypeError(f"data={data!r} must be a mapping of InductorConfig's fields, not {type(data).__name__}")
        known = [f.name for f in fields(cls)]
        for name in data:
            if name not in known:
                raise ValueError(unknown("field", name, known))
        return cls(**data)

    def to_json(self, path: str | Path) -> None:
        """Write the settings to a file, which is replaced as a whole or not at all.

        Raises:
            ValueError: As `to_dict`.
            OSError: The file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        path = Path(path)
        with appears_whole(path) as beside:
            beside.write_text(text)

    @classmethod
    @checks_settings
    def from_json(cls, path: str | Path) -> InductorConfig:
        """The settings that `to_json` wrote.

        Raises:
            ValueError: The file holds no JSON, with the place where it breaks; or as `from_dict`.
            TypeError: As `from_dict`.
            OSError: The file cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path} holds no JSON: {error}") from error
        return cls.from_dict(data)

    @functools.cached_property
    def uses_cudagraphs(self) -> bool:
        """Whether these settings ask for CUDA graphs."""
        return bool(self.resolved_options().get("triton.cudagraphs"))

    @property
    def freezes(self) -> bool:
        """Whether these settings ask for weights to be baked in where they stand still."""
        return bool(self.resolved_options().get("freezing"))

    def folds_weights(self, phase: Phase) -> bool:
        """Whether inference graphs of a phase are to be folded."""
        return phase == "infer" if self.fold_weights is None else self.fold_weights

    def _set_fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _rebuild(settings: dict[str, Any]) -> InductorConfig:
    return InductorConfig(**settings)


def _plain(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"options[{name!r}]={value!r} cannot be written down: it is no plain value")
    return value


def _module_of(graph_pass: Any) -> str:
    # A pass that a decorator made stands where its function does.
    module: str = getattr(getattr(graph_pass, "function", None) or type(graph_pass), "__module__", "")
    return module


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: _identity(value) for name, value in sorted(options.items())}


def _identity(value: object) -> str:
    if isinstance(value, (GraphPass, *_torch.TORCH_PASS_TYPES)):
        return pass_identity(value)
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)
