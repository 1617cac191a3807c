"""Files that appear as a whole or not at all, whoever writes or reads them meanwhile."""

from __future__ import annotations

import contextlib
import glob
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

ABANDONED_SECONDS = 3600
"""Age from which on a file that was to take another's place is one that a killed process left."""


@contextlib.contextmanager
def appears_whole(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to: it takes the place of ``path`` in the end, and goes where it fails.

    Many processes may do so at once, each to a file of its own; the last one counts. The ending of ``path`` stays. What
    killed processes left goes after an hour.

    Raises:
        OSError: The file cannot be put in its place.
    """
    for left in path.parent.glob(f".{glob.escape(path.stem)}.{'[0-9a-f]' * 8}{glob.escape(path.suffix)}"):
        with contextlib.suppress(OSError):  # another process was first
            if time.time() - left.lstat().st_mtime > ABANDONED_SECONDS:
                left.unlink()
    beside = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield beside
        beside.replace(path)
    finally:
        # Where the folder takes no file, there is none to remove, and the first error tells more.
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
