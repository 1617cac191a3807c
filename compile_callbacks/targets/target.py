"""`Target`: one or several `Callee` objects, modules or methods, that are compiled as one piece."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch


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
        return _torch.dynamo.is_sharded(self.module)

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


def compilable_parts(called: Callee) -> list[Callee]:
    """Return a module or a method unchanged, or the innermost parts of the module if FSDP shards it."""
    # FSDP2 (`fully_shard`) gathers and frees weights in forward hooks, and FSDP1 (`FullyShardedDataParallel`) in the
    # `forward` of a wrapper. Dynamo traces neither. The weights of the innermost parts are ordinary tensors while the
    # parts run. torchtitan compiles each transformer block for the same reason.
    if called.method not in (None, "forward"):
        return [called]
    fsdp, name = sys.modules.get("torch.distributed.fsdp"), strip_fsdp1_names(called.name)  # imported if used
    fsdp1, fsdp2 = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule) if fsdp is not None else ((), ())
    units = {path: part for path, part in called.module.named_modules() if isinstance(part, (fsdp1, fsdp2))}
    prefix = "" if name == "forward" else name.removesuffix(".forward")
    parts = []
    for path, unit in units.items():
        if not any(other != path and (not path or other.startswith(f"{path}.")) for other in units):
            unit_name = ".".join(part for part in (prefix, strip_fsdp1_names(path)) if part) or name
            is_fsdp1 = isinstance(unit, fsdp1)
            parts.append(Callee(unit_name, unit.module) if is_fsdp1 else Callee(unit_name, unit, "forward"))
    return parts or [Callee(name, called.module, called.method)]


def strip_fsdp1_names(name: str) -> str:
    """Return the dotted name of a module without the names of FSDP1 wrappers."""
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")
