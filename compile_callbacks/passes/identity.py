"""Computes the identity of a graph pass for torch's compile cache from its code, its arguments and our version."""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import functools
import logging
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.fingerprints import digest, installed_version

_MAX_TENSOR_BYTES = 2**20  # hashing a larger tensor would take too long
_TORCH_AND_PYTHON = {"torch", *sys.stdlib_module_names}


class UndescribableError(Exception):
    """Raised if a value has no text that is the same in every process."""


@dataclasses.dataclass(frozen=True)
class DescribedCall:
    """The description of a call's arguments at the time of the call."""

    text: str
    """The arguments as text, with a number instead of each function and class."""
    code: tuple[Any, ...]
    """The functions and classes among the arguments. `identity_of_call` describes them."""


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DescribedCall | None:
    """Describe the arguments of a call before they can change, or return ``None`` if one cannot be described."""
    describer = _Describer()
    try:
        return DescribedCall(describer.text([args, dict(kwargs)]), tuple(describer.code))
    except (UndescribableError, RecursionError):
        return None


def identity_of_call(made: object, details: Iterable[str], call: DescribedCall) -> str | None:
    """Return a hash of an object's code, of the call that created it, and of ``details``. `GraphPass.uuid` tells more.

    The function reads the code that Python has loaded, because the source file may have changed since. It returns
    ``None`` if it cannot describe a value.
    """
    describer = _CodeDescriber(made, call.code)
    try:
        code = [describer.class_text(type(made)), *map(describer.text, call.code)]
    except (UndescribableError, RecursionError):
        return None
    return digest([installed_version("compile-callbacks") or "source", *details, call.text, *code])


class _Describer:
    """Describes values as text that is the same in every process. Only collects functions and classes in ``code``.

    `_CodeDescriber` describes their code later, when the global names in the code are defined.
    """

    def __init__(self) -> None:
        self.code: list[Any] = []

    def text(self, value: Any) -> str:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}={self.text(value.value)}"
        if isinstance(value, _torch.inductor.TORCH_PASS_TYPES):
            return self.pass_text(value)
        if isinstance(value, torch.Tensor):
            return _tensor_text(value)
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}[{','.join(map(self.text, value))}]"
        if isinstance(value, (set, frozenset)):
            return f"set[{','.join(sorted(map(self.text, value)))}]"
        if isinstance(value, Mapping):
            return f"dict[{','.join(sorted(f'{self.text(k)}={self.text(v)}' for k, v in value.items()))}]"
        if isinstance(value, (types.FunctionType, type)):
            return self.code_text(value)
        if isinstance(value, _torch.graphs.OPERATOR_TYPES):
            return str(value)
        if isinstance(value, types.BuiltinFunctionType):
            return _name(value)
        if isinstance(value, re.Pattern):
            return f"{value.pattern!r} {value.flags}"
        if isinstance(value, logging.Logger):
            return f"logger {value.name}"
        if value is ... or type(value).__module__ == "dataclasses":  # MISSING, for a field without a default
            return type(value).__name__
        if isinstance(value, functools._lru_cache_wrapper):
            return f"cached {self.text(value.__wrapped__)}"
        if isinstance(value, torch.library.CustomOpDef):  # type: ignore[attr-defined]
            return f"{value!r} {self.text(value._init_fn)}"
        if _package(type(value).__module__) == "triton" and hasattr(value, "fn"):
            return f"kernel {[str(config) for config in getattr(value, 'configs', ())]} {self.text(value.fn)}"
        raise UndescribableError

    def pass_text(self, value: Any) -> str:
        if (uuid := value.uuid()) is None:
            raise UndescribableError
        return str(uuid)

    def code_text(self, value: Any) -> str:
        self.code.append(value)
        return f"code {len(self.code)}"


class _CodeDescriber(_Describer):
    """Describes functions and classes by their code, and by the code and values that they refer to."""

    def __init__(self, made: object, code: Iterable[Any]) -> None:
        self._made = made
        self._own_packages = {_package(known.__module__) for known in (type(made), *code)}
        self._seen: set[Any] = set()

    def pass_text(self, value: Any) -> str:
        return "itself" if value is self._made else super().pass_text(value)

    def code_text(self, value: Any) -> str:
        if isinstance(value, types.FunctionType):
            return self._function_text(value)
        version = self._version(value.__module__)
        return self.class_text(value) if version is None else f"{_name(value)} {version}"

    def class_text(self, kind: type) -> str:
        """Return the text of a class and its bases, except those of torch and Python."""
        if kind in self._seen:
            return _name(kind)
        self._seen.add(kind)
        texts = []
        for base in kind.__mro__:
            texts.append(_name(base))
            if _package(base.__module__) not in _TORCH_AND_PYTHON:
                only_code = self._version(base.__module__) is not None
                members = sorted(vars(base).items())
                texts += [f"{name}={self._member_text(name, member, only_code)}" for name, member in members]
        return " ".join(texts)

    def _member_text(self, name: str, member: Any, only_code: bool) -> str:
        parts = [getattr(member, part, None) for part in ("fget", "fset", "fdel", "__func__", "func")]
        functions = [part for part in (member, *parts) if isinstance(part, types.FunctionType)]
        if functions:
            return f"{type(member).__name__} {[self._function_text(function) for function in functions]}"
        if only_code or name == "_abc_impl" or name.startswith("__") or hasattr(type(member), "__get__"):
            return type(member).__name__  # a member that Python adds, or a descriptor without code
        return self.text(member)

    def _function_text(self, function: types.FunctionType) -> str:
        if function in self._seen:
            return _name(function)
        self._seen.add(function)
        text = f"{_name(function)} {self._bytecode_text(function.__code__)}"
        if (version := self._version(function.__globals__.get("__name__"))) is not None:
            # The wrapper of a decorator of torch or Python, such as `torch.no_grad()`, has the user's function inside.
            return f"{text} {version} {self.text(getattr(function, '__wrapped__', None))}"
        values = [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            try:
                values.append(cell.cell_contents)
            except ValueError as error:  # the cell is empty, so the function cannot be called yet
                raise UndescribableError from error
        globals_ = [f"{name}={self.text(value)}" for name, value in self._globals(function)]
        return f"{text} {self.text(values)} {' '.join(globals_)}"

    def _bytecode_text(self, code: types.CodeType) -> str:
        constants = [
            self._bytecode_text(constant) if isinstance(constant, types.CodeType) else self.text(constant)
            for constant in code.co_consts
        ]
        table = code.co_exceptiontable.hex()
        return "|".join([code.co_code.hex(), table, repr(code.co_names), repr(code.co_varnames), *constants])

    def _globals(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """Yield the values that a function refers to by global names, including values that it reads from modules."""
        for code in _nested_code(function.__code__):
            loads = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
            for name in sorted(loads):
                if name in function.__globals__:
                    yield from self._value_or_attributes(name, function.__globals__[name], code)
                elif not hasattr(builtins, name):
                    raise UndescribableError  # the global name is not defined yet

    def _value_or_attributes(self, name: str, value: Any, code: types.CodeType) -> Iterator[tuple[str, Any]]:
        """Yield a value. If the value is a module, yield its attributes whose names occur in the code instead."""
        if not isinstance(value, types.ModuleType):
            yield name, value
        elif value not in self._seen and self._version(value.__name__) is None:
            self._seen.add(value)
            for inner in sorted(set(code.co_names) & set(vars(value))):
                yield from self._value_or_attributes(inner, vars(value)[inner], code)
            self._seen.remove(value)

    def _version(self, module_name: str | None) -> str | None:
        """Return the version of an installed package, which represents its code, or ``None`` to describe the code."""
        package = _package(module_name)
        if package == "compile_callbacks" or package in _TORCH_AND_PYTHON:
            return ""
        if package in self._own_packages:
            return None
        module = sys.modules.get(package)
        folders = Path(getattr(module, "__file__", None) or "").parts
        is_installed = {"site-packages", "dist-packages"} & set(folders)
        return str(getattr(module, "__version__", "")) if is_installed else None


def _package(module_name: str | None) -> str:
    return (module_name or "").partition(".")[0]


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested_code(constant)


def _tensor_text(tensor: torch.Tensor) -> str:
    if tensor.numel() * tensor.element_size() > _MAX_TENSOR_BYTES or tensor.layout is not torch.strided:
        raise UndescribableError
    layout = f"{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}{tensor.device.type}"
    if tensor.device.type == "meta":
        return layout
    content = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return layout + digest(bytes(content.tolist()).hex())
