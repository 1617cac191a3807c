"""What Inductor compiles C++ into, in torch's cache folder: libraries, of which torch's own artifacts hold none."""

from __future__ import annotations

import sys
from pathlib import Path

from compile_callbacks import _torch
from compile_callbacks.files.whole_files import appears_whole


def loaded_libraries() -> dict[str, Path]:
    """The kernels out of torch's cache folder that this process has loaded, by their names in it."""
    folder, found = _torch.cache_folder(), {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")  # of its own: some modules import what is asked for
        if isinstance(file, str) and not file.endswith(".py") and (path := Path(file)).is_relative_to(folder):
            found[path.relative_to(folder).as_posix()] = path
    return found


def probe_libraries() -> dict[str, Path]:
    """What Inductor compiled to learn which vector instructions there are, by names in torch's cache folder.

    Each takes a second to compile, and they come before the first kernel. Torch 2.15 puts an empty file beside each
    that could be loaded. The folder is that of all programs of the user: other libraries in it, packages with the
    weights of other models among them, are none of this run's.
    """
    folder = _torch.cache_folder()
    probes = [path for path in folder.glob("*/*.so") if "." not in path.stem and _is_probe(path)]
    marks = [mark for path in probes if (mark := path.with_name(f"{path.name}.load_ok")).exists()]
    return {path.relative_to(folder).as_posix(): path for path in (*probes, *marks)}


def _is_probe(library: Path) -> bool:
    try:
        return _torch.IN_SOURCE_OF_PROBES in library.with_suffix(".cpp").read_bytes()
    except OSError:
        return False


def put_library(name: str, content: bytes) -> None:
    """Put a library into torch's cache folder, unless there is one of this name, which is a hash of its source.

    Raises:
        OSError: It cannot be written.
    """
    path = _torch.cache_folder() / name
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with appears_whole(path) as beside:
        beside.write_bytes(content)
