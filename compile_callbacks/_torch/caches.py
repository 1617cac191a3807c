"""torch's caches of compiled graphs: keys, entries and the folder."""

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
    """A context in which AOTAutograd's cache holds the compiled graphs, not the keys of Inductor's cache.

    With the keys it would return Inductor's code without the object around it. The tag names everything else that the
    result depends on.
    """
    from torch._functorch import config as functorch_config

    with functorch_config.patch(bundled_autograd_cache=True), tagged_cache(tag):
        yield


def tagged_cache(tag: str) -> Any:
    """A context in which the keys of torch's caches contain a tag."""
    before = torch.compiler.config.cache_key_tag
    return torch.compiler.config.patch(cache_key_tag=f"{before} {tag}".strip())  # type: ignore[attr-defined]


def autocast_state() -> str:
    """The autocast that is enabled, by device, as a tag for the cache.

    Workaround (torch<2.12): AOTAutograd's key says that autocast is enabled, and not its dtype. A graph that was
    compiled under bfloat16 would be returned under float16.
    """
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return " ".join(f"autocast_{device}={torch.get_autocast_dtype(device)}" for device in devices)


def serializable(code: Any) -> Any:
    """A copy of a compiled graph that can be pickled.

    Workaround (until torch can pickle a graph that came from its cache): kernels that were launched since cannot be
    pickled (2.11 to 2.15: "pickle should not be called after make_launchers()"). Their binaries are in the bundle too.
    """
    copied = copy.copy(code)
    copied.prepare_for_serialization()
    if (bundle := getattr(copied, "_triton_bundle", None)) is not None:
        fresh = [kernel for kernel in bundle.static_autotuners if not kernel.kernel.launchers]
        copied.set_triton_bundle(dataclasses.replace(bundle, static_autotuners=fresh))
    return copied


def restored(code: Any, example_inputs: Sequence[Any], kwargs: Any) -> Any:
    """Make a compiled graph callable after it was unpickled."""
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
