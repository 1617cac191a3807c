"""``compile-callbacks doctor``: what it finds, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from compile_callbacks.checks import run
from compile_callbacks.checks.packages import check_torchvision
from compile_callbacks.checks.toolchain import check_cpp_compiler
from compile_callbacks.command_line.cli import main

pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def found():
    """The checks of this machine, by name."""
    return {check.name: check for check in run.run_checks()}


def test_this_machine_compiles(found):
    assert [check.found for check in found.values() if check.status == "failed"] == []
    assert found["torch"].found == torch.__version__
    assert "right sum" in found["compile on CPU"].found
    assert ("compile on GPU" in found) == torch.cuda.is_available()
    assert all(bool(check.remedy) == bool(check.consequence) for check in found.values())


def test_without_a_compiler_it_names_the_piece_and_the_remedy(tmp_path):
    compiler = str(tmp_path / "g++")
    environment = {**os.environ, "PATH": "", "CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "compile_callbacks", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    missing = checks["C++ compiler"]
    assert compiler in missing["found"]
    assert "run uncompiled" in missing["consequence"]
    assert "apt-get install g++" in missing["remedy"]
    assert "unset CXX" in missing["remedy"]
    assert missing["status"] == checks["compile on CPU"]["status"] == "failed"
    assert checks["torch"]["status"] == "ok"


def test_beside_a_gpu_a_missing_compiler_is_a_failure_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        check = check_cpp_compiler()
    assert check.status == "failed"
    assert "'no-such-compiler' does not run" in check.found
    assert "on any device, the template cpp_wrapper" in check.consequence


def test_a_compiler_with_a_cpp_library_of_its_own_is_a_warning(tmp_path):
    compiler = tmp_path / "gcc-of-our-own"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-print-file-name=libstdc++.so*) echo libstdc++.so;; *) exec g++ "$@";; esac\n'
    )
    compiler.chmod(0o755)
    with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}):
        check = check_cpp_compiler()
    assert check.status == "warning"
    assert "there is no libstdc++.so for it" in check.found
    assert "packages for a GPU may crash" in check.consequence
    assert "LIBRARY_PATH" in check.remedy
    assert check_cpp_compiler().status == "ok"


def test_a_check_that_crashes_is_a_warning(monkeypatch, capsys):
    def crashes():
        raise OSError("no such driver")

    monkeypatch.setattr(run, "_CHECKS", {"GPU": crashes})
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "could not be looked at: OSError: no such driver" in said
    assert "nothing failed" in said


def test_a_torchvision_of_another_torch_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # importing it raises
    check = check_torchvision()
    assert check is not None
    assert check.status == "failed"
    assert "torchvision" in check.remedy
