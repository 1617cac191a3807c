"""What a module is built of: a hash to tell it by, and whether another's weights fit it."""

from __future__ import annotations

import hashlib
import json
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_SHOWN = 3  # more names than this are no help in one message
_KNOWN_BY_VERSION = ("builtins", "abc", "typing", "torch", "lightning", "lightning_fabric", "pytorch_lightning")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def class_name(module: nn.Module) -> str:
    """The name of a module's class, without that of its file: a script's is ``__main__`` in one process alone."""
    return type(module).__qualname__


def architecture_key(module: nn.Module) -> str:
    """A hash of the classes, names and settings of a module's parts, and of its weights' names, shapes and dtypes.

    Equal for modules that were built alike, also in another process; values and devices do not count, nor the shapes
    that a lazy module does not know yet.
    """
    parts = [
        (name, class_name(part), _ADDRESS.sub("", part.extra_repr()))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
    weights = [
        (name, None if is_lazy(tensor) else list(tensor.shape), str(tensor.dtype))
        for named in (module.named_parameters, module.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    ]
    return hashlib.sha256(json.dumps([parts, weights]).encode()).hexdigest()[:16]


def code_key(module: nn.Module) -> str:
    """A hash of what the classes of a module's parts do, without those of torch and Lightning.

    Equal in every process of one version of Python. What they call outside of their classes is not in it.
    """
    classes = {known for part in module.modules() for known in type(part).__mro__}
    own = [known for known in classes if known.__module__.partition(".")[0] not in _KNOWN_BY_VERSION]
    described = sorted(
        (known.__qualname__, name, _described(code))
        for known in own
        for name, member in vars(known).items()
        for code in _code_of(member)
    )
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def _code_of(member: object) -> Iterator[types.CodeType]:
    """The code of a function in a class, beneath whatever wraps it."""
    while member is not None:
        if isinstance(member, types.FunctionType):
            yield member.__code__
        wrapped = (getattr(member, name, None) for name in ("__wrapped__", "__func__", "fget", "func"))
        member = next((inner for inner in wrapped if inner is not None), None)


def _described(value: object) -> str:
    """A constant of a function, the same in every process: sets of texts have another order in each."""
    if isinstance(value, types.CodeType):
        return f"{value.co_code.hex()} {value.co_names} {list(map(_described, value.co_consts))}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_described, value))}"
    if isinstance(value, tuple):
        return f"tuple {list(map(_described, value))}"
    return _ADDRESS.sub("", repr(value))


def why_unfit(module: nn.Module, state_dict: Mapping[str, Any]) -> str | None:
    """How a state_dict differs from a module's own in names, shapes or dtypes; ``None`` where it fits."""
    own = module.state_dict()
    if missing := [name for name in own if name not in state_dict]:
        return f"it lacks {_some(missing)}"
    if unexpected := [name for name in state_dict if name not in own]:
        return f"it has {_some(unexpected)}, which module has not"
    for name, value in own.items():
        here, there = _looks(value), _looks(state_dict[name])
        if here != there:
            return f"{name!r} is {there} in it and {here} in module"
    return None


def _looks(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
