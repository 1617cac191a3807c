"""Wraps torch's caches of compiled graphs: their keys, entries and folder."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch


@contextlib.contextmanager
def bundled_cache(tag: str) -> Iterator[None]:
    """Within the ``with`` block, AOTAutograd's cache stores compiled graphs instead of keys of Inductor's cache.

    With keys, the cache would return Inductor's code without our object around it. The tag contains the settings that
    change the result.
    """
    from torch._functorch import config as functorch_config

    with functorch_config.patch(bundled_autograd_cache=True), tagged_cache(tag):
        yield


def tagged_cache(tag: str) -> Any:
    """Return a context manager that adds a tag to the keys of torch's caches."""
    before = torch.compiler.config.cache_key_tag
    return torch.compiler.config.patch(cache_key_tag=f"{before} {tag}".strip())  # type: ignore[attr-defined]


def autocast_state() -> str:
    """Return the enabled autocast, by device, as a tag for the cache.

    Workaround (torch<2.12): AOTAutograd's key contains whether autocast is enabled, but not its dtype. The cache would
    return a graph for bfloat16 under float16.
    """
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return " ".join(f"autocast_{device}={torch.get_autocast_dtype(device)}" for device in devices)


def serializable(code: Any) -> Any:
    """Return a copy of a compiled graph that can be pickled.

    Workaround (until torch can pickle a graph from its cache): torch cannot pickle kernels that were launched (2.11 to
    2.15: "pickle should not be called after make_launchers()"). The bundle also contains their binaries.
    """
    copied = copy.copy(code)
    copied.prepare_for_serialization()
    if (bundle := getattr(copied, "_triton_bundle", None)) is not None:
        fresh = [kernel for kernel in bundle.static_autotuners if not kernel.kernel.launchers]
        copied.set_triton_bundle(dataclasses.replace(bundle, static_autotuners=fresh))
    return copied


def restored(code: Any, example_inputs: Sequence[Any], kwargs: Any) -> Any:
    """Make an unpickled compiled graph callable."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants

    constants = CompiledFxGraphConstants()
    code, _ = FxGraphCache.cache_hit_post_compile(code, {}, constants)
    if code is None:
        raise RuntimeError("torch could not load a compiled graph from its cache")
    code.post_compile(example_inputs, constants, kwargs)
    return code


def cache_folder() -> Path:
    """Return the folder of Inductor's caches, also if ``TORCHINDUCTOR_CACHE_DIR`` is not set."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())
