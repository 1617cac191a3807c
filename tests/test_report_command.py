"""``compile-callbacks report``: tables from event files alone, and what bad input gets."""

from __future__ import annotations

import json
import runpy
import sys

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from models import Classifier, loader, trainer
from torch.utils.tensorboard import SummaryWriter

from compile_callbacks import CompileReport, InductorCompile, PhaseReport
from compile_callbacks.command_line.cli import main
from compile_callbacks.loggers import log_scalars, log_summary
from compile_callbacks.reporting.eventfiles import event_files

pytestmark = pytest.mark.newest

TRAIN = PhaseReport(
    mode="reduce-overhead",
    targets=("net",),
    compile_seconds=2.5,
    graphs=1,
    graph_breaks=2,
    eager_step_ms=3.0,
    compiled_step_ms=1.5,
    speedup=2.0,
    samples=8,
    break_even_steps=float("inf"),
    fallbacks=1,
    events=(
        {"kind": "graph_break", "target": "net", "phase": "train", "file": "m.py", "line": 3, "reason": "print\nmore"},
        {"kind": "graph_break", "target": "net", "phase": "train", "file": "m.py", "line": 3, "reason": "print\nmore"},
    ),
)
REPORT = CompileReport(train=TRAIN)


def write_run(root, name, report=REPORT, *, complete=True):
    """A run with a report, written by the functions that the callback calls."""
    logger = TensorBoardLogger(root, name="", version=name)
    log_scalars([logger], report.scalars(), step=10)
    if complete:
        log_summary([logger], report, step=10)
    logger.finalize("success")
    return logger


def test_prints_the_table_that_the_run_printed(tmp_path, capsys):
    callback = InductorCompile(baseline_steps=2)
    logger = TensorBoardLogger(tmp_path, name="digits")
    trainer(callback, logger=logger, max_epochs=2).fit(Classifier(), loader(12), loader(8))
    report = callback.report
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{logger.log_dir}\n\n{report}\n")
    assert f"torch {torch.__version__.partition('+')[0]}" in out
    assert err == ""


def test_reasons_are_named_once(tmp_path, capsys):
    write_run(tmp_path, "a")
    assert main(["report", str(tmp_path)]) == 0
    assert "graph break (2 times) in net, train at m.py:3: print\n" in capsys.readouterr().out


def test_every_run_below_a_folder_is_found(tmp_path, capsys):
    for name in ("a", "b/c"):
        write_run(tmp_path, name)
    SummaryWriter(str(tmp_path / "other")).close()  # of something else: no error
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.index(str(tmp_path / "a")) < out.index(str(tmp_path / "b" / "c"))
    assert out.count("2.00x") == 2


def test_compare_puts_runs_side_by_side(tmp_path, capsys):
    write_run(tmp_path, "a")
    infer = PhaseReport(mode="default", targets=("net",), compile_seconds=9.0, speedup=1.25)
    write_run(tmp_path, "b", CompileReport(train=TRAIN, infer=infer))
    assert main(["report", "--compare", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [["a", "b", "b"], ["train", "train", "infer"]]
    rows = {line.split("  ")[0]: line.split()[-3:] for line in lines[3:]}
    assert rows["mode"] == ["reduce-overhead", "reduce-overhead", "default"]
    assert rows["speedup"] == ["2.00x", "2.00x", "1.25x"]
    assert rows["compile seconds"] == ["2.5", "2.5", "9.0"]


def test_json_is_the_report_as_data(tmp_path, capsys):
    write_run(tmp_path, "a")
    assert main(["report", "--json", str(tmp_path)]) == 0
    [run] = json.loads(capsys.readouterr().out)
    assert run["run"] == str(tmp_path / "a")
    assert run["complete"] is True
    assert run["train"] == json.loads(json.dumps(TRAIN.to_dict()))
    assert run["environment"]["torch"]


def test_a_run_that_is_not_over_shows_what_it_logged(tmp_path, capsys):
    write_run(tmp_path, "a", complete=False)
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "the run is not over, or was killed" in out
    rows = {line.split("  ")[0]: line.split()[-2:] for line in out.splitlines()}
    assert rows["mode"] == ["unknown", "eager"]
    assert rows["speedup"] == ["2.00x", "-"]
    assert rows["graph breaks"] == ["2", "0"]


def test_settings_of_a_run_that_is_not_over_are_those_of_its_hparams(tmp_path, capsys):
    class Killed(Classifier):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                raise KeyError("the machine went away")

    module = Killed()
    module.save_hyperparameters({"lr": 0.1})
    callback = InductorCompile("max-autotune-no-cudagraphs", baseline_steps=2)
    lightning = trainer(callback, logger=TensorBoardLogger(tmp_path), max_epochs=2)
    with pytest.raises(KeyError):
        lightning.fit(module, loader(12), loader(8))
    capsys.readouterr()
    assert main(["report", "--json", str(tmp_path)]) == 0
    [run] = json.loads(capsys.readouterr().out)
    assert run["train"]["mode"] == "max-autotune-no-cudagraphs"
    assert run["train"]["targets"] == ["forward", "net"]


def test_later_scalars_of_the_same_folder_are_newer_than_its_report(tmp_path, capsys):
    write_run(tmp_path, "a")
    logger = TensorBoardLogger(tmp_path, name="", version="a")
    log_scalars([logger], {"step/train/speedup": 3.0, "compile/train/graphs": 2.0}, step=20)
    logger.finalize("success")
    assert main(["report", "--json", str(tmp_path)]) == 0
    [run] = json.loads(capsys.readouterr().out)
    assert (run["train"]["speedup"], run["train"]["graphs"], run["train"]["fallbacks"]) == (3.0, 2, 1)


def test_scalars_under_a_loggers_prefix_are_found(tmp_path, capsys):
    logger = TensorBoardLogger(tmp_path, prefix="fold1")
    log_scalars([logger], REPORT.scalars(), step=1)
    logger.finalize("success")
    assert main(["report", str(tmp_path)]) == 0
    assert "2.00x" in capsys.readouterr().out


def test_a_missing_folder_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"compile-callbacks report: {tmp_path / 'nowhere'} does not exist\n"


def test_a_file_is_an_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["report", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"compile-callbacks report: {tmp_path / 'file'} is not a folder\n"


def test_a_folder_without_our_scalars_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "has no event files; runs with InductorCompile" in capsys.readouterr().err
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("train/step/loss", 1.0, 1)
    assert main(["report", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"{tmp_path} has event files without a compile report; runs with InductorCompile" in err


@pytest.mark.parametrize(
    ("breaking", "said"),
    [
        (lambda data: data[:-5], "is truncated: it ends within a record"),
        (lambda data: data[: data.rindex(b"compile_report")], "is truncated: it ends within a record"),
        (lambda data: data.replace(b"step/train/speedup", b"step/train/speedap"), "a record does not match its"),
        (lambda data: data + b"no record at all, but more than a header", "is no event file, or damaged at byte"),
    ],
)
def test_a_broken_event_file_is_named_and_read_as_far_as_it_goes(tmp_path, capsys, breaking, said):
    whole, broken = write_run(tmp_path, "a"), write_run(tmp_path, "b")
    [path] = event_files(tmp_path / "b")
    path.write_bytes(breaking(path.read_bytes()))
    assert main(["report", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert str(path) in err
    assert said in err
    assert whole.log_dir in out
    assert broken.log_dir in out  # its first scalars


def test_a_file_that_only_looks_like_an_event_file_is_named(tmp_path, capsys):
    path = tmp_path / "events.out.tfevents.1"
    path.write_text("hello, this is text and no event file")
    assert main(["report", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    link = "[see docs/troubleshooting.md#an-event-file-is-damaged]"
    assert err == f"compile-callbacks report: {path} is no event file, or damaged at byte 0 {link}\n"


def test_files_of_one_second_are_read_in_the_order_of_their_count(tmp_path):
    for count in (10, 9, 100):
        (tmp_path / f"events.out.tfevents.1700000000.host.7.{count}").touch()
    (tmp_path / "events.out.tfevents.1700000000.host.7.8.profile-empty").touch()
    assert [path.suffix for path in event_files(tmp_path)] == [".9", ".10", ".100"]


@pytest.mark.parametrize("arguments", [[], ["report"], ["reprot", "."]])
def test_wrong_arguments_are_refused_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: compile-callbacks")


def test_runs_as_a_module(tmp_path, capsys, monkeypatch):
    write_run(tmp_path, "a")
    monkeypatch.setattr(sys, "argv", ["compile_callbacks", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("compile_callbacks", run_name="__main__")
    assert caught.value.code == 0
    assert "2.00x" in capsys.readouterr().out
