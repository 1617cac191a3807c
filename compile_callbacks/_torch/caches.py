"""Torch's caches of compiled graphs: keys, entries and the folder."""

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
    """Have AOTAutograd's cache hold compiled graphs themselves, and not the keys of Inductor's cache.

    Else it gives back what Inductor compiled, without what was made around it.

    Args:
        tag: What the result depends on beside graph and settings, for the cache's key.
    """
    from torch._functorch import config as functorch_config

    with functorch_config.patch(bundled_autograd_cache=True), tagged_cache(tag):
        yield


def tagged_cache(tag: str) -> Any:
    """Have the keys of torch's caches cover something that torch does not know of."""
    before = torch.compiler.config.cache_key_tag
    return torch.compiler.config.patch(cache_key_tag=f"{before} {tag}".strip())  # type: ignore[attr-defined]


def autocast_state() -> str:
    """The autocast that is on, by device: torch 2.11's AOTAutograd cache knows that there is one, not its dtype.

    There a graph that was compiled under bfloat16 would be given back under float16.
    """
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return " ".join(f"autocast_{device}={torch.get_autocast_dtype(device)}" for device in devices)


def serializable(code: Any) -> Any:
    """A copy of a compiled graph that can be pickled."""
    copied = copy.copy(code)
    copied.prepare_for_serialization()
    if (bundle := getattr(copied, "_triton_bundle", None)) is not None:
        # A graph that came from Inductor's cache holds kernels that were launched since, which cannot be pickled (torch
        # 2.11 to 2.15: "pickle should not be called after make_launchers()"). Their binaries are in the bundle too.
        fresh = [kernel for kernel in bundle.static_autotuners if not kernel.kernel.launchers]
        copied.set_triton_bundle(dataclasses.replace(bundle, static_autotuners=fresh))
    return copied


def restored(code: Any, example_inputs: Sequence[Any], kwargs: Any) -> Any:
    """A compiled graph that was pickled, made callable again."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants

    constants = CompiledFxGraphConstants()
    code, _ = FxGraphCache.cache_hit_post_compile(code, {}, constants)
    if code is None:
        raise RuntimeError("a compiled graph could not be loaded from torch's cache")
    code.post_compile(example_inputs, constants, kwargs)
    return code


def cache_folder() -> Path:
    """The folder of Inductor's caches. ``TORCHINDUCTOR_CACHE_DIR`` names it only if it is set."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())
