"""The small JSON file that runs of one model leave in ``cache_dir``."""

from __future__ import annotations

import importlib.metadata
import json
import os

import pytest
import torch

from compile_callbacks import GraphPass
from compile_callbacks._utils import fingerprints
from compile_callbacks._utils.fingerprints import digest
from compile_callbacks.runtime.model_record import ModelRecord, conditions

EMPTY = {"version": 1, "winners": {}, "shapes": {}, "compile_seconds": {}}


class Idle(GraphPass):
    def __call__(self, graph, is_inference):
        pass


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


def test_record_of_another_rank_is_read_only(tmp_path):
    ModelRecord(tmp_path, "abc").update("winners", "k", {})
    other = ModelRecord(tmp_path, "abc", read_only=True)
    assert other.update("winners", "l", {}) is None
    assert list(other.load()["winners"]) == ["k"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[" * 200_000,
        b"\xff\xfe\x00",
        b'{"winners": {"k": {}}}',
        b'{"version": 2, "winners": {"k": {}}}',
        b'{"version": 1, "winners": null, "shapes": null}',
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


def test_conditions_change_with_everything_that_may_change_the_fastest_config(monkeypatch):
    def key(**changed):
        given = {"model": "m", "targets": ("net",), "passes": (), "precision": "32-true", "device": torch.device("cpu")}
        return digest(conditions(**(given | changed)))

    before = key()
    assert key() == before
    changes = {"model": "n", "targets": ("head",), "passes": (Idle(),), "precision": "16-mixed", "ranks": 2}
    for name, value in {**changes, "device": torch.device("meta")}.items():
        assert key(**{name: value}) != before, name
    for owner, name, value in (
        (torch, "get_num_threads", lambda: 99),
        (torch, "get_float32_matmul_precision", lambda: "medium"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"),
        (fingerprints, "cpu_info", lambda *fields: "another CPU"),
        (importlib.metadata, "version", lambda package: "0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert key() != before, name
    assert json.dumps(conditions(model="m", targets=(), passes=(), precision="", device=torch.device("cpu")))
