"""The report of a run as data, table, plot and file: ``compile_report.json``."""

from __future__ import annotations

import contextlib
import json
import math
import re
from unittest import mock

import fsspec
import pytest
from lightning.pytorch.loggers import Logger

from compile_callbacks import CompileReport, CompileWarning, InductorCompile, PhaseReport
from tests.cases.zoo import Calls
from tests.report.conftest import FILE
from tests.support.models import Classifier, RecordingLogger, fit, mlp
from tests.support.step_times import Times

pytestmark = [
    pytest.mark.usefixtures("no_codegen"),
    pytest.mark.filterwarnings("ignore:nothing is compiled in the train phase:compile_callbacks.CompileWarning"),
]


def report_of(**train):
    return CompileReport.from_dict({"train": {"mode": "default", **train}})


def test_never_and_nothing_survive_json_and_missing_and_unknown_fields_are_left_out():
    report = report_of(break_even_steps="never")
    assert report.train.break_even_steps == math.inf
    assert report.to_dict()["train"]["break_even_steps"] == "never"
    assert report.to_dict()["infer"]["speedup"] is None
    assert CompileReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert "never" in str(report)
    whole = report_of(compile_seconds=2.5, graphs=1, targets=["net"])
    data = json.loads(json.dumps(whole.to_dict()))
    del data["infer"], data["train"]["diagnostics"]["events"]
    data["train"] |= {"graphs": None, "from_the_future": 1}
    assert CompileReport.from_dict(data) == report_of(compile_seconds=2.5, targets=["net"])
    assert CompileReport.from_dict({"train": [], "artifacts": "x"}) == CompileReport()


def test_a_report_is_text_whose_long_cells_wrap_without_loss_in_any_environment(monkeypatch):
    train = PhaseReport(mode=f"options={{{'§' * 150}}}", targets=("[red]:smile:[/red]", *"abcde"))
    report = CompileReport(train=train, infer=PhaseReport(mode="max-autotune-no-cudagraphs", targets=tuple("abcd")))
    text = str(report)
    assert re.search(r" \[red\]:smile:\[/red\], a, b, c, d, e +a, b, c, d$", text, re.MULTILINE)
    assert text.count("§") == 150
    assert max(map(len, text.splitlines())) < 105
    assert "\x1b" not in text
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "20", "TTY_COMPATIBLE": "1"}.items():
        monkeypatch.setenv(name, value)
        assert str(report) == text, name


class Rescaled(Classifier):
    """Torch recompiles in the 33rd step, with the same workload, because of an attribute."""

    def __init__(self):
        super().__init__(Calls(mlp(), lambda net, x: net(x) if net.early else net(-x)))
        self.net.net.early = True

    def on_train_batch_start(self, batch, batch_idx):
        self.net.net.early = batch_idx < 32


@pytest.mark.all_versions
@pytest.mark.usefixtures("recompiles_at_once")
def test_warm_up_and_compiling_steps_are_no_samples_and_slower_steps_are_warned_about(monkeypatch):
    """The import of the compiler counts in the phase that compiles first."""
    monkeypatch.setattr("compile_callbacks._torch.inductor.import_inductor", lambda: 1000.0)
    eager, compiled = iter([90, 80, *[3] * 5]), iter([900, 70, 60, *[4] * 11, 500, 50, 40, *[4] * 5])
    ms = {"eager": eager, None: compiled}
    Times(monkeypatch, train=lambda variant, workload: next(ms[variant]), infer={"eager": 10, None: 9})
    callback = InductorCompile(baseline_steps=5)
    with pytest.warns(CompileWarning, match=r"compiled train steps are slower.*train_mode='eager'"):
        fit(callback, make=Rescaled, train=50, validation=18)
    found = callback.report.to_dict()["train"]
    samples = found["diagnostics"]["eager_samples"], found["diagnostics"]["compiled_samples"]
    assert (samples, found["recompiles"]) == ((5, 16), 1)
    assert (found["eager_step_ms"], found["compiled_step_ms"]) == pytest.approx((3, 4))
    assert found["diagnostics"]["compiled_spread_ms"] == pytest.approx(0, abs=1e-6)
    assert found["break_even_steps"] == "never"
    assert found["net_seconds_saved"] < -999
    assert -100 < callback.report.infer.net_seconds_saved < 100


def test_a_plot_shows_step_times_from_zero_and_the_verdict(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    pytest.importorskip("matplotlib")
    times = {"eager": range(12), "compiled": [*range(13, 53), *range(54, 74)], "compiling": [12, 53]}
    ms = {"eager": [10.0] * 12, "compiled": [4.0] * 60, "compiling": [100.0, 900.0]}
    series = [{"kind": kind, "candidate": None, "steps": [*times[kind]], "ms": ms[kind]} for kind in times]
    figures = {"eager_step_ms": 10.0, "compiled_step_ms": 4.0, "verdict": "not comparable"}
    report = report_of(diagnostics={"series": series}, **figures)
    figure = report.plot()
    (times,), (title,) = figure.axes, (part.get_suptitle() for part in figure.subfigs)
    legend = {entry.get_text() for entry in times.get_legend().get_texts()}
    assert legend == {"eager: 10 ms", "compiled: 4 ms", "2 steps that compile"}
    assert times.get_ylim()[0] == 0
    assert 10 < times.get_ylim()[1] < 20  # the compiling step of 900 ms does not flatten the others
    verdict = str(report).partition("\n")[0].removeprefix("train   ")
    assert verdict.endswith("also set OMP_NUM_THREADS=1")
    assert title.replace("\n", " ").endswith(verdict)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP" not in str(report)


@pytest.mark.all_versions
def test_each_call_appends_a_record_and_only_a_fit_on_rank_zero_prints_the_report_and_names_the_file(golden):
    first, second = golden.records
    assert (first["version"], first["call"], first["global_step"], first["exception"]) == (1, "fit", 24, None)
    assert second["call"] == "test"
    assert first["environment"]["torch"]
    assert CompileReport.from_dict(second["report"]) == golden.report
    assert first["report"] == golden.after_fit
    assert golden.lines == [f"report: tensorboard/version_0/{FILE}"]
    assert golden.printed.count("compared with eager") == 1
    assert "net seconds saved" in golden.printed


def test_the_sanity_check_is_eager_and_not_measured(golden):
    assert golden.sanity_graphs == 0
    for phase, count in (("infer", 16), ("train", 18)):  # a window of ten compiled steps, then untimed steps
        kinds = {part["kind"]: part["steps"] for part in golden.after_fit[phase]["diagnostics"]["series"]}
        assert sorted(step for steps in kinds.values() for step in steps) == list(range(1, count + 1))
    assert kinds["eager"] == [1, 2, 3, 4, 5, 6, 7]
    assert 8 in kinds["compiling"]


class Interrupted(Classifier):
    def on_train_epoch_end(self):
        raise KeyboardInterrupt


def run(logger, *, make=Classifier, train_mode="default", **settings):
    """A run that has a report without a compile, because the steps do not call the target."""
    callback = InductorCompile(train_mode, None, targets=["forward"], baseline_steps=0)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        return fit(callback, make=make, train=2, validation=None, logger=logger, **settings)
    return None


@pytest.mark.parametrize(
    ("logger", "make", "path"),
    [
        (
            lambda base: [RecordingLogger(), RecordingLogger(base / "work")],
            Interrupted,
            FILE,
        ),  # the first has no folder
        (RecordingLogger, Interrupted, f"BASE/{FILE}"),
        (lambda base: RecordingLogger("memory://runs/digits"), Classifier, f"memory://runs/digits/{FILE}"),
    ],
    ids=["inside", "outside", "url"],
)
def test_a_line_names_the_file(logger, make, path, tmp_path, monkeypatch, logged):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = path.replace("BASE", str(tmp_path))
    run(logger(tmp_path), make=make)
    with fsspec.open(path) as file:
        [record] = json.load(file)
    assert (record["call"], record["exception"]) == ("fit", "KeyboardInterrupt" if make is Interrupted else None)
    assert [line for line in logged() if FILE in line] == [f"report: {path}"]


def test_no_file_is_written_without_a_folder_of_a_logger(tmp_path, monkeypatch, logged):
    monkeypatch.chdir(tmp_path)
    for logger, settings in (
        (False, {}),
        (RecordingLogger(), {}),
        (RecordingLogger("logs"), {"fast_dev_run": 2}),
        (RecordingLogger("logs"), {"train_mode": None}),
        (mock.MagicMock(Logger), {}),  # its folders are mocks
    ):
        run(logger, default_root_dir=tmp_path, **settings)
        assert list(tmp_path.iterdir()) == []
    assert [line for line in logged() if FILE in line] == []


def test_a_damaged_file_is_replaced_and_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    for content in (b"", b"{}", b"[" * 100_000):
        (tmp_path / FILE).write_bytes(content)
        with pytest.warns(CompileWarning, match="is damaged and will be replaced"):
            run(RecordingLogger(tmp_path))
        assert len(json.loads((tmp_path / FILE).read_text())) == 1
    with pytest.warns(CompileWarning, match=f"the compile report was not written to .*{FILE}/logs"):
        assert len(run(RecordingLogger(tmp_path / FILE / "logs")).losses) == 2
