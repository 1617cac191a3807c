"""Atomic file writes, and small JSON files."""

from __future__ import annotations

import os
import time

import pytest

from compile_callbacks._utils.files import ABANDONED_SECONDS, atomic_write, read_json, write_json


def test_atomic_write_deletes_what_killed_processes_left_and_no_other_file(tmp_path):
    abandoned, in_use, of_another, of_user = (
        tmp_path / name
        for name in (".a[1].0123abcd.json", ".a[1].deadbeef.json", ".b.0123abcd.json", ".a[1].mine.json")
    )
    for path in (abandoned, in_use, of_another, of_user):
        path.touch()
    for path in (abandoned, of_another, of_user):
        os.utime(path, (0, time.time() - ABANDONED_SECONDS - 1))
    with atomic_write(tmp_path / "a[1].json") as temporary:
        temporary.write_text("complete")
        assert not (tmp_path / "a[1].json").exists()
    assert (tmp_path / "a[1].json").read_text() == "complete"
    assert not abandoned.exists()
    assert in_use.exists()
    assert of_another.exists()
    assert of_user.exists()


def test_atomic_write_keeps_the_old_file_if_the_block_fails(tmp_path):
    def fail():
        with atomic_write(tmp_path / "a.json") as temporary:
            temporary.write_text("ha")
            raise RuntimeError

    (tmp_path / "a.json").write_text("before")
    with pytest.raises(RuntimeError):
        fail()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_write_json_keeps_the_old_file_if_json_has_no_form_for_the_data(tmp_path):
    write_json(tmp_path / "a.json", {"name": "Zoë", "sizes": [1, 2]})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"sizes": {1, 2}})
    assert read_json(tmp_path / "a.json") == {"name": "Zoë", "sizes": [1, 2]}
    assert len(list(tmp_path.iterdir())) == 1
