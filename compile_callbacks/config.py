"""`InductorConfig`: the settings for one compiled module."""

from __future__ import annotations

import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from compile_callbacks import _torch
from compile_callbacks.choices import unknown
from compile_callbacks.passes import HOOK_OPTIONS, GraphPass, as_passes, pass_hook, pass_identity, pass_name
from compile_callbacks.phases import Phase

EAGER = "eager"
"""The mode string that leaves a phase uncompiled."""

_DEFAULT_FOLD_LIMIT_MB = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class InductorConfig:
    """Settings for one compiled module, checked against the installed torch when they are made.

    Args:
        mode: A mode of ``torch.compile``: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``,
            ``"max-autotune-no-cudagraphs"`` or ``"lite"`` (``torch._inductor.list_mode_options()`` tells what
            each sets). ``None`` is ``"default"``. Not together with ``options``, as in ``torch.compile``.
        options: Inductor options by name (``torch._inductor.list_options()``), for example
            ``{"max_autotune": True, "triton.cudagraphs": True}``.
        fullgraph: Refuse graph breaks: a model that has one is a compiler failure.
        dynamic: ``True`` compiles for changing shapes at once, ``False`` compiles anew for each shape, ``None``
            for changing shapes after the first change.
        passes: Custom graph passes, run in this order: `GraphPass` objects, or objects of torch's own pass
            classes (those run at ``"post_grad_post"``).
        fold_weights: Whether what inference graphs compute from weights alone is computed once for each version of
            the weights, and not on each call (docs/fold_weights.md). ``None``: in the infer phase, and not in train,
            where only modules without gradients have inference graphs.
        fold_limit_mb: The most memory that this may take for each graph, in MiB; what would take more is computed
            on each call, as without folding.

    Raises:
        ValueError: An unknown mode or option, ``mode`` together with ``options``, a hook point that is set
            in ``options`` and used by ``passes``, or a ``fold_limit_mb`` that is no positive number.
        TypeError: An argument or an option value of the wrong type.

    Example::

        >>> InductorConfig(options={"max_autotune": True}, dynamic=False).describe()
        'options={max_autotune: True}, dynamic=False'
    """

    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fullgraph: bool = False
    dynamic: bool | None = None
    passes: tuple[Any, ...] = ()
    fold_weights: bool | None = None
    fold_limit_mb: float = _DEFAULT_FOLD_LIMIT_MB

    def __post_init__(self) -> None:
        _check_mode(self.mode)
        if self.options is None:
            object.__setattr__(self, "options", {})
        _check_options(self.options)
        if self.mode is not None and self.options:
            raise ValueError(
                f"mode={self.mode!r} and options={dict(self.options)!r} cannot both be given, as in torch.compile; "
                "give the options that the mode stands for (torch._inductor.list_mode_options()) together with "
                "yours in options"
            )
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
        object.__setattr__(self, "options", types.MappingProxyType(dict(self.options)))
        object.__setattr__(self, "passes", as_passes(self.passes, "passes"))
        for graph_pass in self.passes:
            option = HOOK_OPTIONS[pass_hook(graph_pass)]
            if self.options.get(option) is not None:
                raise ValueError(
                    f"options[{option!r}] and passes={self.passes!r} use the same hook point; give all of them in "
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
        """What differs from the default settings, in a line; ``"default"`` where nothing does."""
        parts = []
        if self.mode not in (None, "default"):
            parts.append(str(self.mode))
        if self.options:
            shown = ", ".join(f"{name}: {_identity(value)}" for name, value in sorted(self.options.items()))
            parts.append(f"options={{{shown}}}")
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
        return ", ".join(parts) or "default"

    def key(self) -> str:
        """A hash of the settings: equal for equal settings, also in another process."""
        described = {
            "mode": self.mode or "default",
            "options": {name: _identity(value) for name, value in sorted(self.options.items())},
            "fullgraph": self.fullgraph,
            "dynamic": self.dynamic,
            "passes": [pass_identity(graph_pass) for graph_pass in self.passes],
            "fold_weights": self.fold_weights,
            "fold_limit_mb": float(self.fold_limit_mb),
        }
        if described["options"]:
            described["mode"] = None
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]

    def resolved_options(self) -> dict[str, Any]:
        """Every Inductor option that these settings set, the mode's among them, by name."""
        return _torch.resolve_options(self.mode, self.options, self.dynamic)

    @functools.cached_property
    def uses_cudagraphs(self) -> bool:
        """Whether these settings ask for CUDA graphs."""
        return bool(self.resolved_options().get("triton.cudagraphs"))

    @property
    def freezes(self) -> bool:
        """Whether these settings ask for weights to be baked in where they stand still."""
        return bool(self.options.get("freezing"))

    def folds_weights(self, phase: Phase) -> bool:
        """Whether inference graphs of a phase are to be folded."""
        return phase == "infer" if self.fold_weights is None else self.fold_weights

    def _set_fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def as_config(value: object, argument: str) -> InductorConfig | None:
    """The config that a ``train_mode`` or ``infer_mode`` stands for; ``None`` where it is not to be compiled.

    Raises:
        ValueError: An unknown mode or field.
        TypeError: A value that is no mode, mapping or config.
    """
    if value is None or value == EAGER:
        return None
    if isinstance(value, InductorConfig):
        return value
    if isinstance(value, str):
        _check_mode(value, argument, also=(EAGER,))
        return InductorConfig(mode=value)
    if isinstance(value, Mapping):
        known = [f.name for f in fields(InductorConfig)]
        for name in value:
            if name not in known:
                as_option = f" Inductor's options go into {argument}={{'options': {{...}}}}."
                raise ValueError(unknown(f"{argument} field", name, known) + as_option)
        return InductorConfig(**value)
    raise TypeError(
        f"{argument}={value!r} must be a mode, a mapping of InductorConfig's fields, an InductorConfig or None, "
        f"not {type(value).__name__}"
    )


def _rebuild(settings: dict[str, Any]) -> InductorConfig:
    return InductorConfig(**settings)


def _check_mode(mode: object, argument: str = "mode", also: tuple[str, ...] = ()) -> None:
    if mode is None:
        return
    if not isinstance(mode, str):
        raise TypeError(f"{argument}={mode!r} must be the name of a mode, not {type(mode).__name__}")
    choices = [*_torch.mode_names(), *also]
    if mode not in choices:
        raise ValueError(unknown(argument, mode, choices))


def _check_options(options: object) -> None:
    if not isinstance(options, Mapping):
        raise TypeError(f"options={options!r} must map option names to values, not {type(options).__name__}")
    for name, value in options.items():
        if not isinstance(name, str):
            raise TypeError(f"options has the key {name!r}, which is no option name")
        if name.replace("-", "_") not in _torch.option_names():
            raise ValueError(unknown("options key", name, [n for n in sorted(_torch.option_names()) if n[0].islower()]))
        if name in HOOK_OPTIONS.values():
            as_passes((value,) if value is not None else (), f"options[{name!r}]")
        elif not _fits(value, expected := _torch.option_type(name.replace("-", "_"))):
            raise TypeError(
                f"options[{name!r}]={value!r} must be of type {_type_name(expected)}, not {type(value).__name__}"
            )


def _fits(value: object, expected: Any) -> bool:
    """Whether a value is of an annotated type; an annotation that cannot be judged admits everything."""
    origin = typing.get_origin(expected)
    if origin is typing.Literal:
        return value in typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in typing.get_args(expected))
    if origin is not None:
        return _fits(value, origin)
    if expected is Callable or not isinstance(expected, type):
        return True
    if isinstance(value, bool) and expected is not bool:  # bool is an int to isinstance, and no number to a user
        return expected is object
    return isinstance(value, expected)


def _type_name(expected: Any) -> str:
    return expected.__name__ if isinstance(expected, type) else str(expected)


def _identity(value: object) -> str:
    if isinstance(value, (GraphPass, *_torch.TORCH_PASS_TYPES)):
        return pass_identity(value)
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)
