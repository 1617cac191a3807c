"""The store of compile artifacts: files that load as they were written, or are refused with the reason."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compile_callbacks.warm_start import artifact_file
from compile_callbacks.warm_start import artifacts as artifacts_file
from compile_callbacks.warm_start.artifact_file import Artifact, pack, unpack
from compile_callbacks.warm_start.artifacts import ArtifactError, ArtifactStore, check_folder

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owner here"),
]

GRAPH = Artifact("inductor", "graph", b"g" * 40)
BACKWARD = Artifact("aot_autograd", "backward", b"b" * 70)
KERNEL = Artifact("autotune", "kernel", b"k")


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "kept" / "artifacts")


def write(store, key, data, *, mode=0o600):
    store.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    store.path(key).write_bytes(data)
    store.path(key).chmod(mode)


def refused(store, match, key="key"):
    with pytest.raises(ArtifactError, match=match) as error:
        store.load(key)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_was_saved_is_loaded_and_is_the_owners_alone(store):
    assert store.load("key") == []
    written = store.save("key", [GRAPH, BACKWARD, KERNEL])
    assert (written.left_out, written.size_bytes) == (0, store.path("key").stat().st_size)
    assert ArtifactStore(str(store.folder)).load("key") == [GRAPH, BACKWARD, KERNEL]
    assert store.load("other") == []
    assert [path.name for path in store.folder.iterdir()] == ["key.artifacts"]
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert store.path("key").stat().st_mode & 0o777 == 0o600


def test_a_poorer_process_takes_nothing_from_a_richer_file(store):
    store.save("key", [GRAPH, BACKWARD, KERNEL])
    ArtifactStore(store.folder).save("key", [GRAPH])
    assert {artifact.place for artifact in store.load("key")} == {GRAPH.place, BACKWARD.place, KERNEL.place}


def test_graphs_share_a_key_and_other_caches_hold_what_came_last(store):
    store.save("key", [GRAPH, KERNEL])
    guarded_otherwise, tuned_again = GRAPH._replace(content=b"other guards"), KERNEL._replace(content=b"tuned")
    store.save("key", [guarded_otherwise, tuned_again])
    assert store.load("key") == [guarded_otherwise, tuned_again, GRAPH]


def test_what_run_after_run_does_not_use_goes(store):
    store.save("key", [GRAPH])
    for run in range(6):
        of_a_run = ArtifactStore(store.folder)
        for part in range(2):  # one run writes several times, and counts once
            of_a_run.save("key", [BACKWARD._replace(key=f"{run}-{part}")])
        assert (GRAPH.place in {artifact.place for artifact in store.load("key")}) == (run < 4)
        if run == 1:
            kept = next(artifact for artifact in store.load("key") if artifact.key == "graph")
            assert kept.unused_runs == 2


def test_a_file_holds_what_fits_into_the_limit(tmp_path):
    store = ArtifactStore(tmp_path / "small", limit_mb=200 / 2**20)
    large = Artifact("inductor", "large", b"l" * 201)
    assert store.save("key", [GRAPH, large, BACKWARD]).left_out == 1
    assert store.load("key") == [GRAPH, BACKWARD]
    assert store.save("key", [Artifact("inductor", "new", b"n" * 150)]).left_out == 0
    assert [artifact.key for artifact in store.load("key")] == ["new", "graph"]


def test_files_that_were_loaded_longest_ago_make_room(tmp_path):
    store = ArtifactStore(tmp_path, limit_mb=1000 / 2**20)
    names = [letter * 32 for letter in "abc"]
    for age, key in enumerate(names):
        store.save(key, [GRAPH])
        os.utime(store.path(key), (0, time.time() - 100 + age))
    abandoned, in_use, users = f".{'a' * 32}.1.0000000a.tmp", f".{'b' * 32}.2.0000000b.tmp", ["my.artifacts", "my.tmp"]
    for name in (abandoned, in_use, *users):
        (tmp_path / name).write_text("" if name == in_use else "u" * 5000)
    for name in (abandoned, *users):
        os.utime(tmp_path / name, (0, time.time() - 7200))
    store.load("a" * 32)
    store.save("d" * 32, [Artifact("inductor", "d", b"d" * 600)])
    kept = [f"{letter * 32}.artifacts" for letter in "ad"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([in_use, *kept, *users])


def test_what_killed_writers_left_is_told_by_its_lock(tmp_path):
    left, written, just_begun = (tmp_path / f".{letter * 32}.1.0000000a.tmp" for letter in "abc")
    for path in (left, written, just_begun):
        path.write_bytes(b"u" * 5000)
    for path in (left, written):
        os.utime(path, (0, time.time() - 60))
    with written.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        ArtifactStore(tmp_path).save("d" * 32, [GRAPH])
        assert [path.exists() for path in (left, written, just_begun)] == [False, True, True]
    ArtifactStore(tmp_path).save("d" * 32, [BACKWARD])
    assert [path.exists() for path in (written, just_begun)] == [False, True]


@pytest.mark.parametrize(
    "artifacts",
    ["[" * 100_000, '[["g", 3, 1, 0]]', '[["g", "g", -1, 0]]', '[["g", "g", 9, 0]]', '[["g", "g", 1.0, 0]]'],
    ids=["too deep", "no name", "a negative size", "too large", "no integer"],
)
def test_metadata_that_makes_no_sense_is_refused_whatever_its_checksum(store, artifacts):
    metadata = f'{{"key": "key", "artifacts": {artifacts}}}'.encode()
    digest = hashlib.sha256(metadata + b"g").digest()
    head = artifact_file._HEAD.pack(artifact_file._MAGIC, artifact_file._FORMAT_VERSION, len(metadata), 1, digest)
    store.save("key", [GRAPH])
    store.path("key").write_bytes(head + metadata + b"g")
    refused(store, "metadata is no list|do not add up")
    store.save("key", [GRAPH])
    assert store.load("key") == [GRAPH]


def test_a_file_cut_off_anywhere_is_damaged(store):
    whole = b"".join(pack([GRAPH, BACKWARD], "key"))
    assert unpack(whole, "key") == [GRAPH, BACKWARD]
    for size in range(len(whole)):
        with pytest.raises(ValueError, match="damaged"):
            unpack(whole[:size], "key")
    write(store, "key", whole[:-1])
    assert str(store.path("key")) in refused(store, "damaged: its checksum does not fit")
    write(store, "key", whole + b"\0")
    refused(store, "damaged")


def test_a_flipped_bit_anywhere_is_seen(store):
    whole = b"".join(pack([GRAPH, BACKWARD], "key"))
    for place in range(len(whole)):
        with pytest.raises(ValueError, match=r"damaged|of format"):
            unpack(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], "key")


def test_files_of_other_formats_and_keys_are_not_taken(store):
    whole = b"".join(pack([GRAPH], "made on another torch"))
    write(store, "key", whole)
    refused(store, "made with other versions")
    write(store, "key", whole[:11] + b"\x63" + whole[12:])
    refused(store, "of format 99")
    write(store, "key", b"PK\3\4 no artifacts at all" * 10)
    refused(store, "no file of compile artifacts")


def test_a_damaged_file_is_replaced_by_the_next_write(store):
    write(store, "key", b"")
    refused(store, "damaged")
    store.save("key", [GRAPH])
    assert store.load("key") == [GRAPH]


@pytest.fixture
def by_another_user(monkeypatch):
    """Has a path belong to somebody else, or where that takes rights that one has not, oneself be somebody else."""

    def plant(path):
        if os.geteuid() == 0:
            os.chown(path, 65534, -1)
        else:
            found = path.stat().st_uid
            monkeypatch.setattr(os, "geteuid", lambda: found + 1)

    return plant


def test_a_file_that_another_user_planted_is_refused(store, by_another_user):
    store.save("key", [GRAPH])
    by_another_user(store.path("key"))
    refused(store, r"key.artifacts belongs to another user \(\d+\).*takes its place")
    if os.geteuid() == 0:
        store.save("key", [GRAPH])
        assert store.load("key") == [GRAPH]


def test_a_folder_of_another_user_is_refused(store, by_another_user):
    store.save("key", [GRAPH])
    by_another_user(store.folder)
    if os.geteuid() == 0:
        refused(store, "belongs to another user.*folder of your own")
        with pytest.raises(ArtifactError, match="belongs to another user"):
            store.save("key", [GRAPH])


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused_until_mended(store, mode):
    store.save("key", [GRAPH])
    store.folder.chmod(mode)
    assert f"chmod go-w {store.folder}" in refused(store, "others than its owner can write")
    with pytest.raises(ArtifactError, match="others than its owner"):
        store.save("key", [GRAPH])
    store.folder.chmod(mode & ~0o022)
    assert store.load("key") == [GRAPH]


def test_a_file_that_others_can_write_to_is_refused(store):
    store.save("key", [GRAPH])
    store.path("key").chmod(0o620)
    refused(store, "others than its owner can write to .*key.artifacts; what this run compiles takes its place")
    store.save("key", [GRAPH])
    assert store.load("key") == [GRAPH]


def test_links_pipes_and_folders_are_no_files_of_ours(store, tmp_path):
    store.save("key", [GRAPH])
    elsewhere = tmp_path / "elsewhere"
    store.path("key").rename(elsewhere)
    store.path("key").symlink_to(elsewhere)
    refused(store, "is a symbolic link")
    store.path("key").unlink()
    store.path("key").symlink_to(tmp_path / "nothing")
    refused(store, "is a symbolic link")
    os.mkfifo(store.path("pipe"))
    refused(store, "no regular file", key="pipe")
    store.path("folder").mkdir()
    refused(store, r"no regular file|directory", key="folder")
    store.save("key", [BACKWARD])  # takes the link's place, and leaves alone what it points to
    assert store.load("key") == [BACKWARD]
    assert unpack(elsewhere.read_bytes(), "key") == [GRAPH]


def test_a_folder_may_be_a_link_of_the_users_own(store, tmp_path):
    store.save("key", [GRAPH])
    link = tmp_path / "link"
    link.symlink_to(store.folder)
    assert ArtifactStore(link).load("key") == [GRAPH]


def test_what_was_checked_is_what_is_read(store, monkeypatch):
    """A file that takes the place of another between the check and the reading is not read."""
    store.save("key", [GRAPH])
    planted = b"".join(pack([BACKWARD], "key"))
    check = ArtifactStore._check_file

    def check_and_exchange(self, path, found):
        check(self, path, found)
        path.unlink()
        path.write_bytes(planted)

    monkeypatch.setattr(ArtifactStore, "_check_file", check_and_exchange)
    assert store.load("key") == [GRAPH]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_write_that_fails_is_told_in_a_line_and_leaves_nothing(store, monkeypatch, call):
    store.save("key", [GRAPH])

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if call == "write":
            patch.setattr(artifacts_file, "pack", full)
        else:
            patch.setattr(os, call, full)
        with pytest.raises(ArtifactError, match="No space left on device"):
            store.save("key", [BACKWARD])
    assert [path.name for path in store.folder.iterdir()] == ["key.artifacts"]
    assert store.load("key") == [GRAPH]


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    store = ArtifactStore(tmp_path / "file" / "below")
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"Not a directory|File exists"):
        store.save("key", [GRAPH])
    with pytest.raises(ArtifactError, match="Not a directory"):
        store.load("key")


def test_an_interrupted_write_leaves_the_file_that_was_there(store, monkeypatch):
    store.save("key", [GRAPH])

    def interrupted(file):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.save("key", [BACKWARD])
    assert [path.name for path in store.folder.iterdir()] == ["key.artifacts"]
    assert store.load("key") == [GRAPH]


def test_a_platform_without_owners_loads_and_writes_nothing(store, monkeypatch):
    store.save("key", [GRAPH])
    monkeypatch.delattr(os, "geteuid")
    with pytest.raises(ArtifactError, match="does not tell whose file"):
        store.load("key")
    with pytest.raises(ArtifactError, match="does not tell whose file"):
        store.save("key", [GRAPH])


def test_a_hundred_writers_and_kills_at_random_moments_leave_a_folder_that_loads(tmp_path):
    folder = tmp_path / "kept"
    script = Path(__file__).parent / "artifact_writers.py"
    result = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["failed"] == 0
    assert found["killed"] > 0
    assert found["found"] > 0
    assert found["reads"] > 1
    store = ArtifactStore(folder)
    store.save("a", [GRAPH])  # with or without what a killed writer left
    assert store.load("a")[0] == GRAPH


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"limit_mb": 0}, ValueError, "limit_mb=0"),
        ({"limit_mb": float("inf")}, ValueError, "limit_mb=inf"),
        ({"limit_mb": "1"}, TypeError, "limit_mb='1'"),
        ({"limit_mb": True}, TypeError, "limit_mb=True"),
    ],
)
def test_bad_limits_are_refused_by_name(tmp_path, settings, error, said):
    with pytest.raises(error, match=said):
        ArtifactStore(tmp_path, **settings)


def test_bad_folders_are_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    for folder, error in ((3, TypeError), (b"folder", TypeError), ("", ValueError), (tmp_path / "file", ValueError)):
        with pytest.raises(error, match="cache_dir="):
            check_folder("cache_dir", folder)
    assert check_folder("cache_dir", None) is None
    assert check_folder("cache_dir", "~/kept") == Path.home() / "kept"
