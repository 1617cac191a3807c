"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import time

import pytest

from compile_callbacks.files.whole_files import ABANDONED_SECONDS, appears_whole

pytestmark = pytest.mark.newest


def test_what_killed_processes_left_goes_and_what_others_write_stays(tmp_path):
    left, written, anothers, users = (
        tmp_path / name
        for name in (".a[1].0123abcd.json", ".a[1].deadbeef.json", ".b.0123abcd.json", ".a[1].mine.json")
    )
    for path in (left, written, anothers, users):
        path.touch()
    for path in (left, anothers, users):
        os.utime(path, (0, time.time() - ABANDONED_SECONDS - 1))
    with appears_whole(tmp_path / "a[1].json") as beside:
        beside.write_text("whole")
        assert not (tmp_path / "a[1].json").exists()
    assert (tmp_path / "a[1].json").read_text() == "whole"
    assert not left.exists()
    assert written.exists()
    assert anothers.exists()
    assert users.exists()


def test_what_fails_leaves_what_was_there(tmp_path):
    def fail():
        with appears_whole(tmp_path / "a.json") as beside:
            beside.write_text("ha")
            raise RuntimeError

    (tmp_path / "a.json").write_text("before")
    with pytest.raises(RuntimeError):
        fail()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
