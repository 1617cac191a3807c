"""``compile_report.json``: where it is written, what it holds, and that it never ends a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fsspec
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from compile_callbacks import CompileReport, CompileWarning, InductorCompile, PhaseReport
from compile_callbacks.report.file import FILE_NAME, append_record
from tests.support.models import Classifier, loader, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")


def read(folder):
    return json.loads(Path(folder, FILE_NAME).read_text())


def fit(folder, callback=None, module=None, **settings):
    callback = callback or InductorCompile(baseline_steps=0, verify="off")
    run = trainer(callback, default_root_dir=folder, **settings)
    run.fit(module or Classifier(), loader(2))
    return callback


def test_each_call_appends_a_record(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="digits")
    callback, module = InductorCompile(baseline_steps=0), Classifier()
    run = trainer(callback, logger=logger)
    run.fit(module, loader(3), loader(2))
    after_fit = callback.report
    run.test(module, loader(2), verbose=False)

    first, second = read(logger.log_dir)
    assert (first["version"], first["call"], first["global_step"], first["exception"]) == (1, "fit", 3, None)
    assert second["call"] == "test"
    assert first["environment"]["torch"]
    assert CompileReport.from_dict(first["report"]) == after_fit
    assert CompileReport.from_dict(second["report"]) == callback.report


class Remote(Logger):
    name, version = "remote", 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        pass


@pytest.mark.parametrize("logger", [False, Remote()])
def test_without_a_folder_of_a_logger_the_file_is_in_the_root_folder(logger, tmp_path):
    fit(tmp_path, logger=logger)
    assert [record["call"] for record in read(tmp_path)] == ["fit"]


def test_folder_may_be_a_url():
    fit("memory://runs/digits")
    files = fsspec.filesystem("memory")
    assert files.ls("/runs/digits", detail=False) == [f"/runs/digits/{FILE_NAME}"]
    assert json.loads(files.cat_file(f"/runs/digits/{FILE_NAME}"))[0]["call"] == "fit"


def test_an_exception_is_recorded_and_the_log_folder_is_read_once_in_setup(tmp_path, monkeypatch):
    class Failing(Classifier):
        def on_train_epoch_end(self):
            raise KeyError("no such thing")

    readers, real = [], Trainer.log_dir.fget
    callers = property(lambda run: readers.append(sys._getframe(1).f_globals["__name__"]) or real(run))
    monkeypatch.setattr(Trainer, "log_dir", callers)
    with pytest.raises(KeyError):
        fit(tmp_path, module=Failing())
    assert readers.count("compile_callbacks.report.loggers") == 1
    assert [record["exception"] for record in read(tmp_path)] == ["KeyError"]


@pytest.mark.parametrize("settings", [{"fast_dev_run": 2}, {"callback": InductorCompile(None, None)}])
def test_nothing_is_written_in_a_fast_dev_run_or_if_nothing_is_compiled(settings, tmp_path):
    fit(tmp_path, **settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"[", b"\xff\xfe", b"{}", b"null", b'"text"', b"[" * 100_000])
def test_a_damaged_file_is_replaced_with_a_warning(content, tmp_path):
    Path(tmp_path, FILE_NAME).write_bytes(content)
    with pytest.warns(CompileWarning, match="is damaged and will be replaced"):
        fit(tmp_path)
    assert len(read(tmp_path)) == 1


def test_earlier_records_are_kept_whatever_they_hold(tmp_path):
    earlier = [{"version": 1, "report": "gone"}, {"version": 2}]
    Path(tmp_path, FILE_NAME).write_text(json.dumps(["no record", *earlier]))
    fit(tmp_path)
    assert read(tmp_path)[:-1] == earlier


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").touch()
    module = Classifier()
    with pytest.warns(CompileWarning, match="the compile report was not written to .*file/logs"):
        fit(tmp_path / "file" / "logs", module=module)
    assert len(module.losses) == 2


def test_a_killed_writer_leaves_the_old_file(tmp_path, monkeypatch):
    files = fsspec.filesystem("file")
    append_record(files, str(tmp_path), {"version": 1, "number": 1})
    monkeypatch.setattr(type(files), "mv", lambda *args, **kwargs: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        append_record(files, str(tmp_path), {"version": 1, "number": 2})
    assert [record["number"] for record in read(tmp_path)] == [1]


def test_the_file_keeps_the_last_hundred_records(tmp_path):
    files = fsspec.filesystem("file")
    for number in range(103):
        append_record(files, str(tmp_path), {"version": 1, "number": number})
    assert [record["number"] for record in read(tmp_path)] == list(range(3, 103))


def test_report_from_dict_takes_data_with_missing_unknown_and_mistyped_fields():
    whole = CompileReport(train=PhaseReport(mode="default", compile_seconds=2.5, graphs=1, targets=("net",)))
    data = json.loads(json.dumps(whole.to_dict()))
    del data["infer"], data["before"], data["train"]["diagnostics"]["events"]
    data["train"] |= {"speedup": "fast", "graphs": None, "recompiles": True, "verdict": "good", "from_the_future": 1}
    found = CompileReport.from_dict(data)
    assert found == CompileReport(train=PhaseReport(mode="default", compile_seconds=2.5, targets=("net",)))
    assert CompileReport.from_dict({"train": [], "before": 3, "artifacts": "x"}) == CompileReport()
