"""Small JSON files that runs leave for one another."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from compile_callbacks.files.whole_files import appears_whole


class JsonFiles:
    """Files in a folder, by name.

    A file is replaced as a whole or not at all, so that processes may write at once: the last one counts.

    Args:
        folder: Where the files are; made when there is something to keep.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)

    def load(self, name: str) -> Any:
        """What a file holds; ``None`` where there is none, or it cannot be read."""
        path = self.path(name)
        try:
            # A pipe that somebody put there would be waited for.
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (OSError, ValueError, RecursionError):  # the last of brackets in brackets
            return None

    def save(self, name: str, data: Any) -> str | None:
        """Write a file.

        Returns:
            Why it could not be written, or ``None``.
        """
        try:
            # The folder above holds compile artifacts too, which are loaded from where nobody else can write alone.
            self._folder.parent.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
            self._folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
            with appears_whole(self.path(name)) as beside:
                beside.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def path(self, name: str) -> Path:
        """Where a file is, or would be."""
        return self._folder / f"{name}.json"
