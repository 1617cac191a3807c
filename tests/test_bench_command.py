"""``compile-callbacks bench``: rows, files, and what bad input gets."""

from __future__ import annotations

import base64
import json
import sys

import pytest

from compile_callbacks.command_line.cli import main

pytestmark = pytest.mark.newest


def bench(*args, output):
    return main(["bench", *args, "--device", "cpu", "--steps", "4", "--output", str(output)])


def test_modes_side_by_side(tmp_path, capsys):
    output = tmp_path / "bench"
    config = base64.b64encode(json.dumps({"options": {"epilogue_fusion": False}}).encode()).decode()
    args = ["bench_subjects:classifier", "--modes", "default", "--config", config, "--phase", "both"]
    assert bench(*args, output=output) == 0
    said = capsys.readouterr().out
    results = json.loads((output / "results.json").read_text())
    rows = {(row["phase"], row["mode"]): row for row in results["rows"]}
    assert set(rows) == {(phase, name) for phase in ("train", "infer") for name in ("eager", "default", "config")}
    for (_, name), row in rows.items():
        assert row["failure"] is None
        assert row["timed_steps"] == 4
        if name != "eager":
            assert row["relative_error"] < 1e-5
            assert row["report"]["speedup"] > 0
            assert row["report"]["compile_seconds"] > 0
    assert (output / "step_ms.png").read_bytes().startswith(b"\x89PNG")
    assert list(output.rglob("events.out.tfevents.*"))
    assert "compile s" in said
    assert str(output / "results.json") in said


def test_images_of_a_size_in_half_precision_channels_last(tmp_path):
    args = ["--batch-size", "2", "--image-size", "8", "--precision", "bf16", "--channels-last", "--modes", "aten"]
    assert bench("bench_subjects:images", *args, output=tmp_path) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["settings"]["precision"] == "bf16"
    assert [row["mode"] for row in results["rows"]] == ["eager", "aten"]


def test_a_mode_that_fails_is_a_row_with_its_reason(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text('{"fullgraph": true}')
    output = tmp_path / "bench"
    assert bench("bench_subjects:breaks", "--modes", "default", "--config", str(config), output=output) == 1
    rows = {row["mode"]: row for row in json.loads((output / "results.json").read_text())["rows"]}
    assert rows["default"]["failure"] is None
    assert "graph break" in rows["config"]["failure"].lower().replace("_", " ")
    assert "config" in capsys.readouterr().out


def test_without_matplotlib_a_line_says_how_to_get_the_plot(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("bench_subjects:classifier", "--modes", "default", output=tmp_path) == 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["resnet19"], "did you mean 'resnet18'"),
        (["bench_subjects:clasifier"], "did you mean 'bench_subjects:classifier'"),
        (["bench_subjects:no_module"], "must return a torch.nn.Module"),
        (["no_such_package:make"], "cannot be imported"),
        (["bench_subjects:fails"], "fails eagerly"),
        (["bench_subjects:classifier", "--modes", "max-autotun"], "did you mean 'max-autotune'"),
        (["bench_subjects:classifier", "--config", "{bad"], "is no JSON"),
        (["bench_subjects:classifier", "--config", "%%%"], "no base64 of JSON"),
        (["bench_subjects:classifier", "--config", "missing.json"], "no such file"),
        (["bench_subjects:classifier", "--config", '{"optoins": 1}'], "did you mean 'options'"),
        (["bench_subjects:classifier", "--batch-size", "-1"], "--batch-size=-1 must be 1 or more"),
        (["bench_subjects:classifier", "--batch-size", "2"], "has no effect"),
        (["bench_subjects:classifier", "--channels-last"], "has no effect"),
        (["bench_subjects:classifier", "--phase", "trian"], "did you mean 'train'"),
        (["bench_subjects:classifier", "--precision", "fp8"], "--precision='fp8'"),
    ],
)
def test_bad_input_is_a_line_and_leaves_nothing(args, said, tmp_path, capsys):
    output = tmp_path / "bench"
    assert bench(*args, output=output) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not output.exists()


def test_a_file_in_the_folders_place_is_refused(tmp_path, capsys):
    (tmp_path / "bench").write_text("")
    assert bench("bench_subjects:classifier", output=tmp_path / "bench") == 2
    assert "cannot be a folder" in capsys.readouterr().err
