"""`Target`: one or several `Callee` objects, modules or methods, that are compiled as one piece."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.targets.fsdp import innermost_fsdp_units, strip_fsdp1_names

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""The modules whose members the steps call instead, because they have no ``forward``."""


@dataclass(frozen=True, eq=False)
class Callee:
    """A method, or the call of a module (``method=None``). Unlike the call, ``"forward"`` does not run hooks."""

    name: str  # the dotted name in the root module; "forward" is the call of the root module itself
    module: nn.Module
    method: str | None = None
    override: Callable[..., Any] | None = field(init=False)  # the attribute of the module that overrides the method

    def __post_init__(self) -> None:
        # An attribute of the module itself overrides its class: net.forward = patched. It may be a dispatcher.
        override = vars(self.module).get(self.method) if self.method else None
        callee = getattr(override, "callee", None)
        object.__setattr__(self, "override", callee.override if isinstance(callee, Callee) else override)

    @property
    def function(self) -> Callable[..., Any]:
        """The eager code with its hooks, as a function of the module."""
        if (override := self.override) is None:
            function: Callable[..., Any] = getattr(type(self.module), self.method or "_call_impl")
            return function
        if isinstance(override, types.MethodType) and override.__self__ is self.module:
            return override.__func__

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return override(*args, **kwargs)

        return call

    @property
    def eager(self) -> Callable[..., Any]:
        """The eager call with its hooks."""
        call: Callable[..., Any] = self.function.__get__(self.module)
        return call

    @property
    def sharded(self) -> bool:
        """Whether FSDP gathers the weights for each call, and frees them afterwards."""
        return _torch.distributed.is_sharded(self.module)

    def uncompilable_reason(self) -> str | None:
        """Return the reason why torch.compile cannot compile the callee, or ``None`` if it can."""
        if isinstance(self.module, torch.jit.ScriptModule):
            return "it is a TorchScript module, which torch.compile cannot trace"
        method = self.method or "forward"
        function = vars(self.module).get(method, getattr(type(self.module), method, None))
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            return f"its {method} is an async function, and a compiled function would not return a coroutine"
        return None


@dataclass(frozen=True, eq=False)
class Target:
    """A callee that is compiled as one piece, or several callees of the same structure that share compiled code."""

    name: str  # the name of the callee, or of several, such as "encoder.layers.*"
    members: tuple[Callee, ...]  # distinct callees, which share the compiled function

    @property
    def shares_code(self) -> bool:
        """Whether several modules share compiled code, which therefore cannot contain the weights of one module."""
        return len(self.members) > 1

    def label(self, graphs: int) -> str:
        """Return the name of the target in a report, with this number of compiled graphs if callees share them."""
        if not self.shares_code:
            return self.name
        compiled = {0: "", 1: ", one graph"}.get(graphs, f", {graphs} graphs")
        return f"{self.name} ({len(self.members)} blocks{compiled})"


def callees_of(name: str, module: nn.Module) -> list[Callee]:
    """Return the call of a module as a callee, or its innermost parts if FSDP shards it.

    The parts exclude FSDP's own code, which Dynamo does not trace.
    """
    name = strip_fsdp1_names(name)
    if not (units := innermost_fsdp_units(module)):
        return [Callee(name, module)]
    prefix = "" if name == "forward" else name.removesuffix(".forward")
    callees = []
    for path, unit in units:
        unit_name = ".".join(name for name in (prefix, path) if name) or name
        if _torch.distributed.is_fsdp1_unit(unit):
            callees.append(Callee(unit_name, unit.module))  # type: ignore[arg-type]  # the module that FSDP1 wraps
        else:
            callees.append(Callee(unit_name, unit, "forward"))
    return callees


def only_if_named(module: nn.Module) -> bool:
    """Return whether a module is never a default target: a metric, a TorchScript module, or an RNN of torch.

    Metrics only accumulate state. Dynamo does not compile ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` (2.11 and 2.15, unless
    ``allow_rnn`` is set), and breaks the graph of a target that contains them. With ``allow_rnn``, it unrolls the loop
    over time: on a CPU, an ``nn.LSTM`` is not faster than eager, and an ``nn.GRU`` compiles for minutes.
    """
    classes = type(module).__mro__
    is_metric = any(cls.__name__ == "Metric" and cls.__module__.startswith("torchmetrics.") for cls in classes)
    return is_metric or isinstance(module, (torch.jit.ScriptModule, nn.RNNBase))
