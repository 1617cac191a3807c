"""``compile-callbacks doctor``: what it finds, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from compile_callbacks.cli import doctor as doctor_command
from compile_callbacks.cli import machine_checks as machine
from compile_callbacks.cli.machine_checks import check_cpp_compiler
from compile_callbacks.cli.main import main


@pytest.fixture(scope="module")
def found():
    """The checks of this machine, by name."""
    return {check.name: check for check in doctor_command.run_checks()}


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


@pytest.fixture
def compiler_without_libstdcxx(tmp_path):
    """A GCC that finds only the archive of libstdc++."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-print-file-name=libstdc++.so*) echo libstdc++.so;; '
        f'*) exec {shutil.which("g++")} "$@";; esac\n'
    )
    compiler.chmod(0o755)
    return compiler


def test_a_compiler_that_links_a_second_cpp_library_is_a_warning_with_a_remedy_that_works(
    compiler_without_libstdcxx, monkeypatch
):
    system_compiler = shutil.which("g++")
    monkeypatch.setenv("PATH", str(compiler_without_libstdcxx.parent), prepend=os.pathsep)
    with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler_without_libstdcxx))}):
        check = check_cpp_compiler()
    assert check.status == "warning"
    assert "there is no libstdc++.so for it" in check.found
    assert "packages for a GPU crash" in check.consequence
    assert check.remedy == f"export CXX={system_compiler}"
    with torch._inductor.config.patch({"cpp.cxx": (None, system_compiler)}):
        assert check_cpp_compiler().status == "ok"


def test_without_another_compiler_the_remedy_installs_one(compiler_without_libstdcxx, monkeypatch):
    monkeypatch.setattr(machine, "_COMPILER_FOLDERS", ())
    with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler_without_libstdcxx))}):
        monkeypatch.setattr(os, "get_exec_path", lambda: [str(compiler_without_libstdcxx.parent)])
        check = check_cpp_compiler()
    assert "install g" in check.remedy
    assert check.remedy.endswith("export CXX=/usr/bin/g++")


def test_a_check_that_crashes_is_a_warning(monkeypatch, capsys):
    def crashes():
        raise OSError("no such driver")

    monkeypatch.setattr(doctor_command, "_CHECKS", {"GPU": crashes})
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "the check failed: OSError: no such driver" in said
    assert "nothing failed" in said
