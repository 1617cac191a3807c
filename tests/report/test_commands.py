"""``compile-callbacks``: the commands report, modes, explain and doctor, the help without torch, and the package."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compile_callbacks
from compile_callbacks import templates
from tests.report.conftest import FILE

# ------------------------------------------------------------------------------------------ report

EVENT = {"kind": "graph_break", "target": "net", "phase": "train", "file": "m.py", "line": 3, "reason": "print\nmore"}
EVENTS = {"events": [{**EVENT, "kind": "from the future"}, EVENT, EVENT]}  # a newer version wrote the first
TRAIN = {"mode": "reduce-overhead", "compile_seconds": 2.5, "speedup": 2.0, "diagnostics": EVENTS}
RECORD = {"version": 1, "call": "fit", "report": {"train": TRAIN}}
DIAGNOSTICS = {"trials": [{}]}, {"events": [{"reason": ["no text"]}]}, {"eager_spread_ms": "wide"}
DAMAGED = [None, {"version": 1}, {"version": 2, "report": RECORD["report"]}, {"version": 1, "report": []}]
DAMAGED += [{"version": 1, "report": {"train": {"mode": "default", "diagnostics": found}}} for found in DIAGNOSTICS]


def write(folder, content):
    folder.mkdir(parents=True)
    (folder / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / FILE


def test_report_prints_the_table_of_the_run(golden, command):
    printed = command("report", golden.board)
    assert str(golden.report) in printed.out
    assert ", call fit, " in printed.out
    assert "torch 2." in printed.out
    assert printed.err == ""
    saved = command("report", golden.board.parents[1] / "saved" / "report.json").out
    assert saved.count(str(golden.report)) == 1
    assert "None" not in saved.splitlines()[0]


def test_report_prints_every_call_below_a_folder_with_its_reasons(tmp_path, command):
    file = write(tmp_path / "a", [RECORD, RECORD | {"call": "test"}])
    write(tmp_path / "b" / "c", [RECORD])
    out = command("report", tmp_path).out
    run = [sys.executable, "-m", "compile_callbacks", "report", tmp_path]
    assert subprocess.check_output(run, text=True).split() == out.split()  # in a process that imports nothing else
    assert out.count("2.00x") == 3
    assert out.index(str(tmp_path / "a")) < out.index("call test") < out.index(str(tmp_path / "b" / "c"))
    assert [text in out for text in ("Graph breaks", "m.py:3", "future")] == [True, True, False]
    assert json.loads(command("report", "--json", file).out)[0] == {"file": str(file), **RECORD}


def test_report_leaves_out_damaged_records_and_files(tmp_path, command):
    contents = ["", "[" * 100_000, "{}", *([RECORD, record, RECORD] for record in DAMAGED)]
    damaged = [f"{write(tmp_path / f'b{i}', content)} cannot be read: " for i, content in enumerate(contents)]
    write(tmp_path / "c", [RECORD])
    for option in ([], ["--json"]):
        printed = command("report", *option, tmp_path, status=2)
        assert printed.out.count("reduce-overhead") == 1 + len(DAMAGED)
        assert all(begin in line for begin, line in zip(damaged, printed.err.splitlines(), strict=True)), printed.err


# ------------------------------------------------------------------------------------------ modes and explain


def test_modes_lists_every_mode_and_template(command):
    listed = {mode["name"]: mode for mode in json.loads(command("modes", "--device", "cpu", "--json").out)["modes"]}
    assert set(listed) == {*torch._inductor.list_mode_options(), "fast", *templates.names()}
    assert listed["default"]["lacks"] is None
    assert "falls back" in listed["tma"]["lacks"]
    assert listed["reduce-overhead"]["options"] == {"triton.cudagraphs": True}
    assert listed["triton"]["mode"] == "max-autotune-no-cudagraphs"


def test_a_wrong_argument_is_refused_in_one_line(command, tmp_path):
    for arguments, hint in (
        *[(("modes", "--device", name), f"--device={name!r}") for name in ("gpu", "cuda:99", "cpu:x")],
        (("explain", "CC1044"), "codes near it: CC104"),
        (("explain", "slow"), "lists all codes"),
        (("report", tmp_path / "nowhere"), f"compile-callbacks report: {tmp_path}/nowhere cannot be read: "),
        (("report", tmp_path), f"{tmp_path} contains no {FILE}"),
    ):
        [line] = command(*arguments, status=2).err.splitlines()
        assert hint in line


def test_every_code_of_the_package_has_an_entry_of_three_paragraphs_and_every_entry_a_code(command):
    package = Path(compile_callbacks.__file__).parent
    used = {code for file in package.rglob("*.py") for code in re.findall(r'"(CC\d{3})"', file.read_text())}
    titles = dict(re.findall(r"^(CC\d{3})[: ]+(.*)", command("explain").out, re.MULTILINE))
    assert used == set(titles)
    for code in used:
        title, *paragraphs = command("explain", code.lower()).out.strip().split("\n\n")
        assert title == f"{code}: {titles[code]}"
        assert [text.partition(".")[0] for text in paragraphs] == ["What happened", "Why", "What to do"], code


# ------------------------------------------------------------------------------------------ the package


PROGRAM = """
import sys, time
started = time.perf_counter()
from compile_callbacks.cli import main
for arguments in (["explain"], ["check", *sys.argv[1:]], ["--help"]):
    try:
        status = main(arguments)
    except SystemExit as exit:
        status = exit.code
    assert status == 0, arguments
assert not {"torch", "lightning", "numpy"} & set(sys.modules)
print(time.perf_counter() - started)
"""


def test_help_explain_and_check_answer_in_under_a_second_and_do_not_import_torch(golden, tmp_path, command):
    arguments = [str(golden.board), "--against", str(tmp_path / "contract.json")]
    command("check", *arguments, "--write")
    run = [sys.executable, "-c", PROGRAM, *arguments]
    printed = [subprocess.check_output(run, text=True) for _ in range(3)]
    assert all("doctor" in text and "CC104" in text for text in printed)
    assert min(float(text.split()[-1]) for text in printed) < 1


def test_version_is_that_of_the_installed_distribution_and_dir_shows_the_public_names_only(capsys, command):
    with pytest.raises(SystemExit, match=r"^0$"):
        command("--version")
    version = importlib.metadata.version("compile-callbacks")
    assert capsys.readouterr().out == f"compile-callbacks {version}\n"
    assert compile_callbacks.__version__ == version
    compile_callbacks.Tune  # noqa: B018  (imports modules of the package)
    assert [name for name in dir(compile_callbacks) if not name.startswith("__")] == sorted(compile_callbacks.__all__)


# ------------------------------------------------------------------------------------------ doctor


@pytest.fixture
def doctor(command):
    def checks(status):
        return {check["name"]: check for check in json.loads(command("doctor", "--json", status=status).out)["checks"]}

    return checks


def test_doctor_finds_that_this_machine_compiles(doctor):
    found = doctor(0)
    assert found["torch"]["result"] == torch.__version__
    assert "right sum" in found["compile on CPU"]["result"]
    assert ("compile on GPU" in found) == torch.cuda.is_available()
    assert all(bool(check["fix"]) == bool(check["impact"]) for check in found.values())


def test_doctor_names_a_missing_compiler_and_the_fix(monkeypatch, doctor):
    monkeypatch.setenv("CXX", "/missing/g++")
    with torch._inductor.config.patch({"cpp.cxx": (None, "/missing/g++")}):
        found = doctor(1)
    failed = found["compile on CPU"]
    assert "apt-get install g++ (macOS: xcode-select --install), and unset CXX" in failed["fix"]
    assert "run uncompiled" in failed["impact"]
    assert found["torch"]["status"] == "ok"


@pytest.mark.parametrize(
    ("cause", "fix"),
    [
        ("fatal error: Python.h: No such file or directory", r"python3\.\d+-dev"),
        ("x.so: failed to map segment from shared object", "TORCHINDUCTOR_CACHE_DIR"),
        ("something else", r"TORCH_LOGS='\+inductor'"),
    ],
)
def test_doctor_names_the_fix_of_a_failed_compile(monkeypatch, doctor, cause, fix):
    def fails(x):
        raise RuntimeError(cause)

    monkeypatch.setattr(torch, "compile", lambda function: fails)
    failed = doctor(1)["compile on CPU"]
    assert (failed["status"], failed["result"]) == ("failed", f"RuntimeError: {cause}")
    assert re.search(fix, failed["fix"])
