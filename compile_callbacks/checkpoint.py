"""State-dict keys: those of users' earlier ``torch.compile`` days load into the original module."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn

_PREFIX = "_orig_mod."  # what torch.compile(module) puts before each key of the module that it wraps


def match_keys(state_dict: MutableMapping[str, Any], module: nn.Module) -> int:
    """Rename keys in place so that ``_orig_mod.`` stands where it stands in ``module``, which is mostly nowhere.

    Args:
        state_dict: The weights that are about to be loaded into ``module``.
        module: The module that they are for.

    Returns:
        How many keys were renamed.
    """
    own_keys = {key.replace(_PREFIX, ""): key for key in module.state_dict(keep_vars=True)}
    renamed = 0
    for key in list(state_dict):
        wanted = own_keys.get(key.replace(_PREFIX, ""), key.replace(_PREFIX, ""))
        if wanted != key and wanted not in state_dict:
            state_dict[wanted] = state_dict.pop(key)
            renamed += 1
    return renamed


class KeyMatcher:
    """Calls `match_keys` before each load into a module, until it is removed.

    A callback's ``on_load_checkpoint`` comes too late: Lightning has loaded the weights by then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._handle = module.register_load_state_dict_pre_hook(_before_load)

    def remove(self) -> None:
        """Match no more keys."""
        self._handle.remove()


def _before_load(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
    if prefix:  # part of a larger module's load: keys of others stand beside ours
        return
    match_keys(state_dict, module)
