"""State-dict keys with ``_orig_mod.``, from runs with ``torch.compile(module)``, load into the original module."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_PREFIX = "_orig_mod."  # torch.compile(module) puts it in front of each key of the module that it wraps


def match_orig_mod_keys(module: nn.Module) -> RemovableHandle:
    """Rename the keys of each state_dict that is loaded into a module, until the handle is removed.

    A key gets ``_orig_mod.`` where the module's own key has it, which is nowhere in most modules. A callback's
    ``on_load_checkpoint`` is too late for this: Lightning has loaded the weights before.
    """
    handle: RemovableHandle = module.register_load_state_dict_pre_hook(_MatchKeys())
    return handle


class _MatchKeys:
    """The hook. A pickle of the module has a function in its place that does nothing and does not need this library."""

    def __call__(self, module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
        """Rename the keys of a state_dict before it is loaded into a module."""
        if prefix:  # the module is a part of the loaded one, and other parts have keys in the state_dict, too
            return
        own_keys = {key.replace(_PREFIX, ""): key for key in module.state_dict(keep_vars=True)}
        for key in list(state_dict):
            plain = key.replace(_PREFIX, "")
            wanted = own_keys.get(plain, plain)
            if wanted not in state_dict:
                state_dict[wanted] = state_dict.pop(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> _MatchKeys:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ("", "format")
