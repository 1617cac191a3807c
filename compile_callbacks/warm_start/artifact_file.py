"""The format of a file of compile artifacts: a head with a checksum, metadata in JSON, and the contents.

Nothing of a file is unpickled before its checksum was seen to fit.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_MAGIC = b"CCARTIF\n"
_FORMAT_VERSION = 1
_HEAD = struct.Struct(">8sIQQ32s")  # magic, format version, bytes of metadata, bytes of contents, SHA-256 of both

SEVERAL_PER_KEY = ("inductor", "aot_autograd")
"""Torch's caches of graphs hold several under one key, told apart by guards; others hold what came last."""


class Artifact(NamedTuple):
    """One entry of one of torch's caches.

    Attributes:
        kind: Which cache it belongs to.
        key: Its name in it.
        content: What is kept under that name.
        unused_runs: How many runs have written the file since one used this.
    """

    kind: str
    key: str
    content: bytes
    unused_runs: int = 0

    @property
    def place(self) -> tuple[Any, ...]:
        """What can hold one artifact alone."""
        return self[:3] if self.kind in SEVERAL_PER_KEY else self[:2]


def pack(artifacts: Sequence[Artifact], key: str) -> Iterator[bytes]:
    """The parts of a file, in order."""
    entries = [[kind, name, len(content), unused_runs] for kind, name, content, unused_runs in artifacts]
    metadata = json.dumps({"key": key, "artifacts": entries}).encode()
    digest = hashlib.sha256(metadata)
    for artifact in artifacts:
        digest.update(artifact.content)
    size = sum(len(artifact.content) for artifact in artifacts)
    yield _HEAD.pack(_MAGIC, _FORMAT_VERSION, len(metadata), size, digest.digest())
    yield metadata
    for artifact in artifacts:
        yield artifact.content


def unpack(data: bytes, key: str) -> list[Artifact]:
    """The artifacts of a file.

    Raises:
        ValueError: It is not as it was written, of another format, or of another key.
    """
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise ValueError("it is damaged, or no file of compile artifacts")
    _, version, metadata_size, size, digest = _HEAD.unpack_from(data)
    if version != _FORMAT_VERSION:
        raise ValueError(f"it is of format {version}, and this version of the library reads {_FORMAT_VERSION}")
    body = memoryview(data)[_HEAD.size :]
    if len(body) != metadata_size + size or hashlib.sha256(body).digest() != digest:
        raise ValueError("it is damaged: its checksum does not fit")
    try:
        metadata = json.loads(bytes(body[:metadata_size]))
    except RecursionError:  # brackets in brackets
        raise ValueError("its metadata is no list of artifacts") from None
    if metadata["key"] != key:
        raise ValueError("it was made with other versions, on another device, or for other settings")
    artifacts, start = [], metadata_size
    for kind, name, length, unused_runs in metadata["artifacts"]:
        if not (isinstance(kind, str) and isinstance(name, str) and type(length) is type(unused_runs) is int):
            raise ValueError("its metadata is no list of artifacts")
        if length < 0 or start + length > len(body):
            raise ValueError("its artifacts do not add up to its size")
        artifacts.append(Artifact(kind, name, bytes(body[start : start + length]), unused_runs))
        start += length
    return artifacts
