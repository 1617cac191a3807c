"""Files that appear as a whole or not at all, whoever writes or reads them meanwhile."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def appears_whole(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to: it takes the place of ``path`` in the end, and goes where it fails.

    Many processes may do so at once, each to a file of its own; the last one counts. The ending of ``path`` stays.

    Raises:
        OSError: The file cannot be put in its place.
    """
    beside = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield beside
        beside.replace(path)
    finally:
        # Where the folder takes no file, there is none to remove, and the first error tells more.
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
