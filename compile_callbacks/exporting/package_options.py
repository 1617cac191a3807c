"""The arguments of `export`: checks of the path, and the settings that AOTInductor accepts."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from compile_callbacks._utils.errors import with_code
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.passes.base import HOOK_OPTIONS, pass_hook, pass_name

Format = Literal["aoti", "export"]
"""The content of a ``.pt2`` file: compiled code, or the program of ``torch.export``."""

VerifyPackage = Literal["off", "warn", "raise"]
"""If a package differs from eager: compare nothing, warn, or raise an error."""

_NO_CUDAGRAPHS = "a package records no CUDA graphs"
_NO_TORCH_CALLS = "passes at 'pre_grad' change torch function calls, and torch.export produces ATen operators"
_NO_FALLBACKS = "torch 2.11 calls operators that are not compiled with wrong arguments in a package"  # mode "lite"
_NOT_ACCEPTED = {
    "fallback_by_default": _NO_FALLBACKS,
    "selective_decompose": _NO_FALLBACKS,
    "aot_inductor.output_path": "export has the argument path",
    "aot_inductor.package": "export always writes a package",
    HOOK_OPTIONS["pre_grad"]: _NO_TORCH_CALLS,
}


def check_path(path: object) -> Path:
    """Check that the ``path`` argument is a path that ends in ``.pt2``."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(with_code("CC202", f"path={path!r} must be a path, not {type(path).__name__}"))
    found = Path(path)
    if found.suffix != ".pt2":
        raise ValueError(with_code("CC205", f"path={str(found)!r} must end in '.pt2'"))
    return found


def check_writable(path: Path) -> None:
    """Create missing folders, and check that the file can be written, before minutes of compiling."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "path is a folder", str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}."):
            pass
    except OSError as error:
        raise type(error)(error.errno, f"path cannot be written: {error.strerror}", str(path)) from error


def check_dynamic_batch(dynamic_batch: object) -> None:
    """Check that the ``dynamic_batch`` argument is a boolean."""
    if not isinstance(dynamic_batch, bool):
        raise TypeError(with_code("CC202", f"dynamic_batch={dynamic_batch!r} must be True or False"))


def package_options(config: InductorConfig, device: torch.device) -> tuple[dict[str, Any], list[Any], list[str]]:
    """Return the options and passes that AOTInductor accepts, and a sentence for each reason that leaves one out."""
    options: dict[str, Any] = {}
    left_out: dict[str, list[str]] = {}
    for name, value in config.resolved_options(device).items():
        reason = _NO_CUDAGRAPHS if "cudagraph" in name else _NOT_ACCEPTED.get(name)
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
        left_out["freezing=True folds the weights of a package"] = ["fold_weights=True"]
    if config.dynamic is not None:
        left_out["dynamic_batch sets which sizes may change"] = [f"dynamic={config.dynamic}"]
    sentences = [f"the package is compiled without {', '.join(names)}: {why}" for why, names in left_out.items()]
    falls_back = config.template_falls_back(device)
    return options, passes, sentences if falls_back is None else [falls_back, *sentences]
