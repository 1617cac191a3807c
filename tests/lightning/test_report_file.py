"""``compile_report.json``: its path and contents. A failure to write it does not end a run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import fsspec
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from compile_callbacks import CompileReport, CompileWarning, InductorCompile, PhaseReport
from compile_callbacks.report.data import FILE_NAME
from tests.support import models
from tests.support.models import Classifier, LoggerIn, RecordingLogger, loader, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")


def read(folder):
    return json.loads(Path(folder, FILE_NAME).read_text())


def fit(folder, callback=None, **arguments):
    callback = callback or InductorCompile(baseline_steps=0, verify="off")
    return models.fit(callback, train=2, validation=None, **{"logger": LoggerIn(folder), **arguments})


def lines_about_the_file(logged):
    return [line for line in logged() if FILE_NAME in line]


def test_each_call_appends_a_record_and_a_line_at_the_end_of_a_fit_names_the_file(tmp_path, monkeypatch, logged):
    monkeypatch.chdir(tmp_path)
    callback, module = InductorCompile(baseline_steps=0), Classifier()
    run = trainer(callback, logger=TensorBoardLogger("runs", name="start"), default_root_dir=".")
    run.fit(module, loader(3), loader(2))
    after_fit = callback.report
    run.test(module, loader(2), verbose=False)

    path = f"runs/start/version_0/{FILE_NAME}"
    first, second = read(Path(path).parent)
    assert (first["version"], first["call"], first["global_step"], first["exception"]) == (1, "fit", 3, None)
    assert second["call"] == "test"
    assert first["environment"]["torch"]
    assert CompileReport.from_dict(first["report"]) == after_fit
    assert CompileReport.from_dict(second["report"]) == callback.report
    assert lines_about_the_file(logged) == [f"report: {path}"]  # with the printed report, so not after the test
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    run.fit(module, loader(3))
    assert len(lines_about_the_file(logged)) == 1


class Interrupted(Classifier):
    def on_train_epoch_end(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_line_names_the_file_of_an_interrupted_run(where, tmp_path, monkeypatch, logged):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path if where == "inside" else tmp_path / "elsewhere")
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        fit(tmp_path, make=Interrupted, logger=[RecordingLogger(), LoggerIn(tmp_path)])  # the first has no folder
    assert [record["exception"] for record in read(tmp_path)] == ["KeyboardInterrupt"]
    path = FILE_NAME if where == "inside" else f"{tmp_path}/{FILE_NAME}"
    assert lines_about_the_file(logged) == [f"report: {path}"]


def test_folder_may_be_a_url(logged):
    fit("memory://runs/digits")
    assert lines_about_the_file(logged) == [f"report: memory://runs/digits/{FILE_NAME}"]
    files = fsspec.filesystem("memory")
    assert f"/runs/digits/{FILE_NAME}" in files.ls("/runs/digits", detail=False)
    assert json.loads(files.cat_file(f"/runs/digits/{FILE_NAME}"))[0]["call"] == "fit"


class SharedFolder(RecordingLogger):
    """Has a folder for all runs, as a WandbLogger, whose default is the working folder."""

    save_dir, name, version = ".", "digits", "k3x9"


def test_runs_that_share_the_folder_of_a_logger_have_their_own_files(tmp_path, monkeypatch, logged):
    monkeypatch.chdir(tmp_path)
    fit(tmp_path, logger=SharedFolder())
    assert lines_about_the_file(logged) == [f"report: ./digits/k3x9/{FILE_NAME}"]
    assert len(read("digits/k3x9")) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"logger": False},
        {"logger": RecordingLogger()},
        {"fast_dev_run": 2},
        {"callback": InductorCompile(None, None)},
    ],
)
def test_no_file_is_written_without_a_folder_of_a_logger(settings, tmp_path, monkeypatch, logged):
    monkeypatch.chdir(tmp_path)
    fit(tmp_path, default_root_dir=tmp_path, **settings)
    assert list(tmp_path.iterdir()) == []
    assert lines_about_the_file(logged) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000])
def test_a_damaged_file_is_replaced_with_a_warning(content, tmp_path):
    Path(tmp_path, FILE_NAME).write_bytes(content)
    with pytest.warns(CompileWarning, match="is damaged and will be replaced"):
        fit(tmp_path)
    assert len(read(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(CompileWarning, match="the compile report was not written to .*file/logs"):
        module = fit(tmp_path / "file" / "logs")
    assert len(module.losses) == 2


def test_report_from_dict_takes_data_with_missing_unknown_and_mistyped_fields():
    whole = CompileReport(train=PhaseReport(mode="default", compile_seconds=2.5, graphs=1, targets=("net",)))
    data = json.loads(json.dumps(whole.to_dict()))
    del data["infer"], data["train"]["diagnostics"]["events"]
    data["train"] |= {"speedup": "fast", "graphs": None, "recompiles": True, "verdict": "good", "from_the_future": 1}
    found = CompileReport.from_dict(data)
    assert found == CompileReport(train=PhaseReport(mode="default", compile_seconds=2.5, targets=("net",)))
    assert CompileReport.from_dict({"train": [], "artifacts": "x"}) == CompileReport()
