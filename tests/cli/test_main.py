"""``compile-callbacks``: the help without torch, the list of modes, ``explain``, and the scripts in ``benchmarks/``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compile_callbacks
from compile_callbacks import templates
from compile_callbacks.cli import main
from compile_callbacks.cli.explain import EXPLANATIONS, read_entries


@pytest.mark.parametrize("argument", ["--help", "explain"])
def test_main_does_not_import_torch_for(argument):
    program = f"""
import sys
from compile_callbacks.cli import main
try:
    main([{argument!r}])
except SystemExit as exit:
    assert exit.code == 0
assert not {{"torch", "lightning", "numpy"}} & set(sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "doctor" in printed or "CC104" in printed


def test_version_is_that_of_the_installed_distribution(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"compile-callbacks {importlib.metadata.version('compile-callbacks')}\n"
    assert compile_callbacks.__version__ == importlib.metadata.version("compile-callbacks")


def test_dir_shows_the_public_names_only():
    compile_callbacks.Tune  # noqa: B018  (imports modules of the package)
    assert [name for name in dir(compile_callbacks) if not name.startswith("__")] == sorted(compile_callbacks.__all__)


def test_modes_lists_every_mode_and_template(capsys):
    assert main(["modes", "--device", "cpu", "--json"]) == 0
    listed = {mode["name"]: mode for mode in json.loads(capsys.readouterr().out)["modes"]}
    assert set(listed) == {*torch._inductor.list_mode_options(), "default", *templates.names()}
    assert listed["default"]["lacks"] is None
    assert "falls back" in listed["tma"]["lacks"]
    assert listed["reduce-overhead"]["options"] == {"triton.cudagraphs": True}
    assert listed["triton"]["mode"] == "max-autotune-no-cudagraphs"


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:x"])
def test_modes_refuses_a_device_that_this_machine_does_not_have(device, capsys):
    assert main(["modes", "--device", device]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--device={device!r}" in line


def test_explain_prints_the_entry_of_a_code(capsys):
    assert main(["explain", "cc104"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("CC104: A target cannot be compiled\n\nWhat happened. ")
    assert printed.count("\n\n") == 3


@pytest.mark.parametrize(("code", "hint"), [("CC1044", "codes near it: CC104"), ("slow", "lists all codes")])
def test_explain_refuses_an_unknown_code(code, hint, capsys):
    assert main(["explain", code]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted(EXPLANATIONS.glob("*.md")), ids=lambda file: file.name)
def test_every_entry_has_its_three_paragraphs(file):
    entries = [entry for entry in read_entries().values() if entry.code[2] == file.name[0]]
    assert re.findall(r"^## (.*)", file.read_text(), re.MULTILINE) == [f"{e.code}: {e.title}" for e in entries]
    assert sorted(entry.code for entry in entries) == [entry.code for entry in entries]
    for entry in entries:
        paragraphs = [paragraph.partition(".**")[0] for paragraph in entry.text.split("\n\n")]
        assert paragraphs == ["**What happened", "**Why", "**What to do"], entry.code


def test_every_code_of_the_package_has_an_entry_and_every_entry_a_code():
    package = Path(compile_callbacks.__file__).parent
    used = {code for file in package.rglob("*.py") for code in re.findall(r'"(CC\d{3})"', file.read_text())}
    assert used == set(read_entries())


ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.slow
def test_every_benchmark_imports(tmp_path):
    modules = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert "warm_start" in modules
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{BENCHMARKS}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", f"import {', '.join(modules)}"]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=280, check=True)
