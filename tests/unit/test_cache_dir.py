"""A cache folder: which folders are refused, and the small JSON file of each model."""

from __future__ import annotations

import os
import re

import pytest

from compile_callbacks.cache.folder import CompileCache, ModelRecord, check_cache_dir

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


root_only = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")


# ------------------------------------------------------------------------------------------ environment


def environment():
    return [os.environ.get(variable) for variable in VARIABLES]


def test_begin_and_end_set_and_restore_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    cache = CompileCache(tmp_path / "kept", pytest.fail)
    for _ in range(2):
        cache.begin()
        assert environment() == [str(tmp_path / "kept" / name) for name in ("inductor", "triton")]
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    for _ in range(2):
        cache.end()
        assert environment() == ["/somewhere", None]


def writable(part):
    def open_to_others(folder):
        (folder / part).mkdir(exist_ok=True)
        (folder / part).chmod(0o777)

    return open_to_others


def is_a_file(folder):
    folder.rmdir()
    folder.touch()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (writable("."), "is not used.*chmod go-w"),
        (writable("inductor"), "is not used.*chmod go-w"),
        (writable("triton"), "is not used.*chmod go-w"),
        pytest.param(lambda folder: os.chown(folder, 12345, 12345), r"another user \(12345\)", marks=root_only),
        (lambda folder: (folder / "inductor").symlink_to(folder.parent), "is not used"),
        (is_a_file, "is not used"),
    ],
)
def test_a_folder_that_cannot_be_used_costs_the_cache_only(tmp_path, spoil, said):
    (tmp_path / "kept").mkdir()
    spoil(tmp_path / "kept")
    messages, before = [], environment()
    cache = CompileCache(tmp_path / "kept", messages.append)
    cache.begin()
    assert (cache.active, environment()) == (False, before)
    cache.end()
    [message] = messages
    assert re.search(said, message)


@pytest.mark.parametrize(
    ("folder", "error", "message"),
    [
        (3, TypeError, "cache_dir=3 must be the path of a folder, not int"),
        (b"kept", TypeError, "cache_dir=b'kept'"),
        ("", ValueError, "'.' is the current folder"),
        (__file__, ValueError, "must be a folder, but is a file"),
    ],
)
def test_check_cache_dir_names_the_argument_and_the_value(folder, error, message):
    with pytest.raises(error, match=message):
        check_cache_dir(folder)


# ------------------------------------------------------------------------------------------ the file of a model

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
