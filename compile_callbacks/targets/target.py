"""`Target`: one or several `Callee` objects, modules or methods, that are compiled as one piece."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.targets.fsdp import innermost_fsdp_units, strip_fsdp1_names


@dataclass(frozen=True, eq=False)
class Callee:
    """A method, or the call of a module (``method=None``). Unlike the call, ``"forward"`` does not run hooks."""

    name: str  # the dotted name in the root module; "forward" is the call of the root module itself
    module: nn.Module
    method: str | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The eager code with its hooks, as a function of the module."""
        function: Callable[..., Any] = getattr(type(self.module), self.method or "_call_impl")
        return function

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
        """Return the reason why the callee cannot be compiled, or ``None`` if it can."""
        if isinstance(self.module, torch.jit.ScriptModule):
            return "it is a TorchScript module, which torch.compile cannot trace"
        name = self.method or "forward"
        if self.method and is_replaced(self.module, name):
            return f"its {name} is an attribute of the object, not a method of the class. Name the module instead"
        if inspect.iscoroutinefunction(getattr(type(self.module), name, None)):
            return f"its {name} is an async function, and a compiled function would not return a coroutine"
        return None


def is_replaced(module: nn.Module, method: str) -> bool:
    """Return whether an attribute of a module that is not a dispatcher replaces a method of its class."""
    return method in vars(module) and not hasattr(vars(module)[method], "callee")


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
