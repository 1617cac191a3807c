"""Which entries of a cache folder are deleted, and which folders are refused."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from compile_callbacks.runtime import cache_dir
from compile_callbacks.runtime.cache_dir import (
    CompileCache,
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


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
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


@pytest.mark.parametrize("part", ["", "inductor", "triton"])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, part):
    (tmp_path / part).mkdir(exist_ok=True)
    (tmp_path / part).chmod(0o777)
    messages, before = [], environment()
    cache = CompileCache(tmp_path, messages.append)
    cache.begin()
    assert (cache.active, environment()) == (False, before)
    [message] = messages
    assert "is not used" in message
    assert "chmod go-w" in message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 12345, 12345)
    messages = []
    CompileCache(tmp_path, messages.append).begin()
    assert "belongs to another user (12345)" in messages[0]


@pytest.mark.parametrize("name", ["link", "file"])
def test_a_folder_that_cannot_be_used_costs_the_cache_only(tmp_path, name):
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "inductor").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    messages = []
    cache = CompileCache(tmp_path / name, messages.append)
    cache.begin()
    cache.end()
    assert len(messages) == 1
    assert not cache.active


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
