"""Replaces the wrappers of the user's own ``torch.compile`` in a module, and renames state_dict keys of wrappers."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from compile_callbacks import _torch
from compile_callbacks._utils.phases import PHASES, Phase

_PREFIX = "_orig_mod."  # torch.compile(module) adds this prefix to each key of the wrapped module
LIGHTNING_MODULE = "the LightningModule"
"""The name of a compiled LightningModule in the list of `unwrap_compiled`. The other names are names of children."""

_STEPS = {"training_step": "train", "validation_step": "infer", "test_step": "infer", "predict_step": "infer"}


def unwrap_compiled(root: nn.Module, uncompiled: frozenset[Phase]) -> list[str]:
    """Replace each wrapper of ``torch.compile(module)`` by the module, compiled in place with the same settings."""
    if uncompiled == frozenset(PHASES):
        return []
    replaced = []
    # For ``torch.compile(lightning_module)``, Lightning sets compiled methods on the module.
    if getattr(root, "_compiler_ctx", None) is not None:
        steps = ["forward", *(step for step, phase in _STEPS.items() if phase not in uncompiled)]
        if methods := [name for name in steps if name in vars(root)]:
            for name in methods:
                del vars(root)[name]
            replaced.append(LIGHTNING_MODULE)
        if not uncompiled:
            root._compiler_ctx = None  # type: ignore[assignment]
    for prefix, parent in list(root.named_modules(remove_duplicate=False)):
        for name, child in list(parent._modules.items()):
            if child is not None and _torch.dynamo.is_dynamo_wrapper(child):
                parent._modules[name] = _torch.dynamo.compiled_in_place(child)
                replaced.append(f"{prefix}.{name}".removeprefix("."))
    return replaced


def match_orig_mod_keys(module: nn.Module) -> RemovableHandle:
    """Install a hook that adds ``_orig_mod.`` to the keys of each state_dict to load, or removes it."""
    # A callback's ``on_load_checkpoint`` would be too late, because Lightning has already loaded the weights.
    handle: RemovableHandle = module.register_load_state_dict_pre_hook(_MatchKeys())
    return handle


class _MatchKeys:
    """Renames keys. A pickle of the module contains a no-op instead, so loading it does not need this library."""

    def __call__(self, module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
        """Rename the keys of a state_dict before it is loaded into a module."""
        if prefix:  # a parent module is loaded, so the state_dict also has keys of its other submodules
            return
        own_keys = {key.replace(_PREFIX, ""): key for key in module.state_dict(keep_vars=True)}
        for key in list(state_dict):
            plain = key.replace(_PREFIX, "")
            wanted = own_keys.get(plain, plain)
            if wanted not in state_dict:
                state_dict[wanted] = state_dict.pop(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ("", "format")
