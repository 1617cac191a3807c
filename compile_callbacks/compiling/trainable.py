"""Which parameters are trained may change while a module is compiled: parameters freeze, and thaw."""

from __future__ import annotations

from torch import nn

from compile_callbacks import _torch


class TrainableWatch:
    """Has Dynamo look again at parameters that froze or thawed, which torch 2.11 does not by itself.

    A call costs a tenth of a microsecond a parameter. Dynamo's own guards on them, which see it too, cost a millisecond
    a step where there are some hundreds: they read what lies all over the memory.

    Args:
        module: The module whose parameters are watched, those that are put into it later among them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._slots: list[_torch.ParameterSlot] = []
        self._trained: list[bool] = []

    def look(self) -> None:
        """A call is to follow: have Dynamo look at what changed since the last one."""
        parameters = [parameters.get(name) for parameters, name in self._slots]
        trained = [parameter is not None and parameter.requires_grad for parameter in parameters]
        if trained == self._trained:
            return
        for slot, parameter, now, before in zip(self._slots, parameters, trained, self._trained, strict=True):
            if now != before and parameter is not None:  # without it the mapping is another already
                _torch.touch_parameter(slot)
        self._trained = trained

    def compiled(self) -> None:
        """Something was compiled, maybe because the module has other parameters than before."""
        self._slots = _torch.parameter_slots(self._module)
        self._trained = [parameters[name].requires_grad for parameters, name in self._slots]
