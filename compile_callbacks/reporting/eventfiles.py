"""TensorBoard event files, read strictly: a broken one is an error that names it.

TensorBoard's own readers take the end of a truncated file for the end of the data, and check every byte in Python,
which is slow for a long run. This one checks each record's length, and the whole of those that it is asked for.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

_HEADER = struct.Struct("<QI")  # the record's length, and the checksum of its eight bytes
_CHECKSUM = struct.Struct("<I")


class BrokenEventFileError(ValueError):
    """An event file that is truncated or damaged; the message names it."""


def event_files(folder: Path) -> list[Path]:
    """The event files of one folder, oldest first: the time that they were made at is in their names."""
    found = (
        path
        for path in folder.iterdir()
        if "tfevents" in path.name and not path.name.endswith(".profile-empty") and path.is_file()
    )
    return sorted(found, key=_by_numbers)


def _by_numbers(path: Path) -> list[int | str]:
    """Order names by the numbers in them: files of one second are told apart by a count."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def folders_with_event_files(top: Path) -> Iterator[Path]:
    """``top`` and the folders below it that hold event files, in order of their paths."""
    for path, folders, files in os.walk(top):
        folders.sort()
        if any("tfevents" in name for name in files):
            yield Path(path)


def read_values(path: Path, marks: Collection[bytes]) -> Iterator[Summary.Value]:
    """The values in an event file whose record contains one of ``marks``, in order.

    Args:
        path: The event file.
        marks: Parts of tags that are looked for; records without any are skipped unread, which is what makes a
            file of a million scalars quick to look through.

    Raises:
        BrokenEventFileError: The file is truncated or damaged; what comes before that has been yielded.
    """
    for data, checksum in _records(path):
        if not any(mark in data for mark in marks):
            continue
        try:
            if masked_crc32c(data) != checksum:
                raise BrokenEventFileError(f"{path} is damaged: a record does not match its checksum")
            event = Event.FromString(data)
        except DecodeError as error:
            raise BrokenEventFileError(f"{path} is damaged: {error}") from error
        yield from event.summary.value


def _records(path: Path) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as file:
        while header := file.read(_HEADER.size):
            if len(header) == _HEADER.size:
                length, checksum = _HEADER.unpack(header)
                if masked_crc32c(header[:8]) != checksum:
                    raise BrokenEventFileError(f"{path} is no event file, or damaged at byte {file.tell() - 12}")
                record = file.read(length + _CHECKSUM.size)
                if len(record) == length + _CHECKSUM.size:
                    yield record[:length], _CHECKSUM.unpack(record[length:])[0]
                    continue
            raise BrokenEventFileError(f"{path} is truncated: it ends within a record")
