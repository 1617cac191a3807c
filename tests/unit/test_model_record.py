"""The small JSON file that runs of one model leave in ``cache_dir``."""

from __future__ import annotations

import os

import pytest

from compile_callbacks.runtime.cache_dir import ModelRecord

EMPTY = {"version": 1, "winners": {}, "shapes": {}, "compile_seconds": {}}


def test_record_keeps_the_latest_values_in_a_private_file(tmp_path):
    record = ModelRecord(tmp_path / "cache", "abc")
    assert record.load() == EMPTY
    for number in range(60):
        assert record.update("winners", str(number), {}) is None
    record.update("winners", "10", {"candidate": "default"})
    winners = ModelRecord(tmp_path / "cache", "abc").load()["winners"]
    assert winners["10"] == {"candidate": "default"}
    assert list(winners) == [*map(str, range(11, 60)), "10"]
    assert ModelRecord(tmp_path / "cache", "other").load() == EMPTY
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model-abc.json"]
    assert record.path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[" * 200_000,
        b"\xff\xfe\x00",
        b'{"winners": {"k": {}}}',
        b'{"version": 2, "winners": {"k": {}}}',
        b'{"version": 1, "winners": null, "shapes": null, "compile_seconds": null}',
        b'{"version": 1, "winners": ["k"]}',
        b'{"version": 1, "winners": {"k": null, "l": "default"}}',
        b'{"version": 1, "winners": {"k": 1' + b"0" * 9000 + b"}}",
    ],
)
def test_damaged_record_reads_as_an_empty_one_and_can_be_written_again(tmp_path, content):
    record = ModelRecord(tmp_path, "abc")
    record.path.write_bytes(content)
    assert record.load() == EMPTY
    assert record.update("winners", "k", {"candidate": "default"}) is None
    assert record.load()["winners"] == {"k": {"candidate": "default"}}


def test_record_that_cannot_be_read_or_written_costs_the_record_only(tmp_path):
    os.mkfifo(ModelRecord(tmp_path, "pipe").path)
    assert ModelRecord(tmp_path, "pipe").load() == EMPTY  # opening a pipe would wait for a writer
    folder = ModelRecord(tmp_path, "folder")
    folder.path.mkdir()
    assert folder.load() == EMPTY
    assert "Error" in folder.update("winners", "k", {})
    assert "TypeError" in ModelRecord(tmp_path, "json").update("winners", "k", {"candidate": object()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-folder.json", "model-pipe.json"]
    (tmp_path / "file").write_text("")
    assert "Error" in ModelRecord(tmp_path / "file", "abc").update("winners", "k", {})
