"""A cache folder: which entries are deleted, which folders are refused, and the small JSON file of each model."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from compile_callbacks.runtime import cache_dir
from compile_callbacks.runtime.cache_dir import (
    CompileCache,
    ModelRecord,
    check_folder,
    delete_incomplete_libraries,
    delete_old_entries,
)

DAY = 24 * 3600
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def write(path, size=100, *, age=10 * DAY):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    used = time.time() - age
    os.utime(path, (used, used))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_dir, "MAX_BYTES", 1000)
    for name in ("inductor", "triton"):
        (tmp_path / name).mkdir()
    return tmp_path


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_least_recently_used_entries_are_deleted_whole(folder):
    old = [write(folder / "triton" / "OLD" / name, 300, age=9 * DAY) for name in ("kernel.cubin", "kernel.json")]
    write(folder / "triton" / "NEW" / "kernel.cubin", age=9 * DAY)
    library = [write(folder / "inductor" / "ab" / name, 350, age=8 * DAY) for name in ("cab.main.cpp", "cab.main.so")]
    kept = [
        folder / "triton" / "NEW" / "kernel.cubin",
        write(folder / "triton" / "NEW" / "kernel.json", age=2 * DAY),  # an entry is as recent as its latest file
        write(folder / "inductor" / "ab" / "cxy.py", age=5 * DAY),
        write(folder / "inductor" / "fxgraph" / "ab" / "fkey" / "one", age=7 * DAY),
        write(folder / "inductor" / "fxgraph" / "ab" / "fkey" / "two", age=3 * DAY),
        write(folder / "inductor" / "aotautograd" / "akey" / "one", age=4 * DAY),
    ]
    delete_old_entries(folder)
    assert files(folder) == sorted(str(path.relative_to(folder)) for path in kept)
    assert not any(path.parent.name == "OLD" and path.parent.exists() for path in old)
    assert not any(path.exists() for path in library)


@pytest.mark.skipif(sys.platform != "linux", reason="the check knows the file format of Linux only")
def test_libraries_that_a_killed_linker_left_incomplete_are_deleted(folder):
    whole = Path(next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc" in line))
    library = whole.read_bytes()
    for name, content in {
        "cwhole.main.so": library,
        "ccut.main.so": library[: len(library) // 2],
        "cempty.main.o": b"",
        "ctext.main.so": b"half of a library",
    }.items():
        path = write(folder / "inductor" / "ab" / name)
        path.write_bytes(content)
        os.utime(path, (time.time() - 60, time.time() - 60))
    (folder / "inductor" / "ab" / "cyoung.main.so").write_bytes(b"still being written")
    delete_incomplete_libraries(folder)
    assert files(folder) == ["inductor/ab/cwhole.main.so", "inductor/ab/cyoung.main.so"]


def test_entries_used_within_a_day_are_kept_although_the_folder_is_too_large(folder):
    write(folder / "triton" / "A" / "kernel.cubin", 5000, age=DAY - 100)
    write(folder / "inductor" / "ab" / "cab.so", 5000, age=0)
    delete_old_entries(folder)
    assert files(folder) == ["inductor/ab/cab.so", "triton/A/kernel.cubin"]


def test_files_of_the_user_and_locks_are_kept(folder):
    write(folder / "model.ckpt", 5000)
    write(folder / "notes" / "triton" / "A" / "x", 5000)
    write(folder / "inductor" / "locks" / "a.lock", 5000)
    write(folder / "triton" / "A" / "kernel.cubin", 5000)
    delete_old_entries(folder)
    assert files(folder) == ["inductor/locks/a.lock", "model.ckpt", "notes/triton/A/x"]


def test_links_are_not_followed(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    precious = write(elsewhere / "precious", 5000)
    (folder / "triton" / "link").symlink_to(elsewhere)
    (folder / "inductor" / "ab").symlink_to(elsewhere)
    write(folder / "triton" / "A" / "kernel.cubin", 5000)
    delete_old_entries(folder)
    assert precious.exists()
    assert files(folder / "triton") == []


root_only = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")


@root_only
def test_entries_with_files_of_another_user_are_deleted(folder):
    planted = write(folder / "triton" / "A" / "kernel.so", age=0)
    write(folder / "triton" / "A" / "kernel.json", age=0)
    os.chown(planted, 12345, 12345)
    write(folder / "triton" / "B" / "kernel.so", age=0)
    delete_old_entries(folder)
    assert files(folder) == ["triton/B/kernel.so"]


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
def test_check_folder_names_the_argument_and_the_value(folder, error, message):
    with pytest.raises(error, match=message):
        check_folder("cache_dir", folder)


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
