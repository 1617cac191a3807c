"""Arguments of `export`: the path, and the settings with what AOTInductor accepts of them."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.mode import EAGER, Mode, as_config
from compile_callbacks.passes.base import pass_hook, pass_name
from compile_callbacks.passes.hooks import HOOK_OPTIONS

_NO_CUDAGRAPHS = "a package records no CUDA graphs"
_NO_TORCH_CALLS = "it runs on torch's own calls, and torch.export gives ATen operators"
_NO_FALLBACKS = "torch 2.11 calls operators that are not compiled with wrong arguments in a package"  # mode "lite"
_NOT_TAKEN = {
    "fallback_by_default": _NO_FALLBACKS,
    "selective_decompose": _NO_FALLBACKS,
    "aot_inductor.output_path": "export decides where the package goes",
    "aot_inductor.package": "export decides where the package goes",
    HOOK_OPTIONS["pre_grad"]: _NO_TORCH_CALLS,
}


def check_path(path: object) -> Path:
    """Check the ``path`` argument.

    Raises:
        TypeError: The argument is not a path.
        ValueError: The path does not end in ``.pt2``.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path={path!r} must be a path, not {type(path).__name__}")
    found = Path(path)
    if found.suffix != ".pt2":
        raise ValueError(f"path={str(found)!r} must end in '.pt2'")
    return found


def check_writable(path: Path) -> None:
    """Create missing parent folders, and check that a file can be written there before minutes of compiling.

    Raises:
        OSError: The path cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "path is a folder", str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}."):
            pass
    except OSError as error:
        raise type(error)(error.errno, f"path cannot be written: {error.strerror}", str(path)) from error


def check_settings(config: Mode, dynamic_batch: object) -> InductorConfig:
    """Check the ``config`` and ``dynamic_batch`` arguments, and return the settings of the package.

    Raises:
        ValueError: The config has an unknown mode or field, or is ``"eager"``.
        TypeError: A value has the wrong type.
    """
    if not isinstance(dynamic_batch, bool):
        raise TypeError(f"dynamic_batch={dynamic_batch!r} must be True or False")
    if config == EAGER:
        raise ValueError("config='eager' compiles nothing; export(format='export') writes what is not compiled")
    return as_config(config, "config") or InductorConfig()


def package_options(config: InductorConfig, device: torch.device) -> tuple[dict[str, Any], list[Any], list[str]]:
    """Return the options and passes that AOTInductor accepts, and a sentence for each reason that leaves one out.

    Args:
        config: The settings.
        device: The device of the package.
    """
    options: dict[str, Any] = {}
    left_out: dict[str, list[str]] = {}
    for name, value in config.resolved_options(device).items():
        reason = _NO_CUDAGRAPHS if "cudagraph" in name else _NOT_TAKEN.get(name)
        if reason is None:
            options[name] = value
        elif value:
            left_out.setdefault(reason, []).append(name)
    passes = []
    for graph_pass in config.passes:
        if pass_hook(graph_pass) == "pre_grad":
            left_out.setdefault(_NO_TORCH_CALLS, []).append(f"pass {pass_name(graph_pass)}")
        else:
            passes.append(graph_pass)
    if config.fold_weights:
        left_out["a package folds with freezing=True"] = ["fold_weights=True"]
    if config.dynamic is not None:
        left_out["dynamic_batch says what may change"] = [f"dynamic={config.dynamic}"]
    sentences = [f"left out of the package: {', '.join(what)}: {why}" for why, what in left_out.items()]
    falls_back = config.template_falls_back(device)
    return options, passes, sentences if falls_back is None else [falls_back, *sentences]
