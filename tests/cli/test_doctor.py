"""``compile-callbacks doctor``: what it finds here, and what it says if something is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from compile_callbacks.cli import doctor, main


def test_doctor_finds_that_this_machine_compiles():
    found = doctor.run_checks()
    assert [check.result for check in found.values() if check.status == "failed"] == []
    assert found["torch"].result == torch.__version__
    assert "right sum" in found["compile on CPU"].result
    assert ("compile on GPU" in found) == torch.cuda.is_available()
    assert all(bool(check.fix) == bool(check.impact) for check in found.values())


@pytest.mark.slow
def test_doctor_names_a_missing_compiler_and_the_fix(tmp_path):
    compiler = str(tmp_path / "g++")
    environment = {**os.environ, "PATH": "", "CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "compile_callbacks", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    missing = checks["C++ compiler"]
    assert compiler in missing["result"]
    assert "run uncompiled" in missing["impact"]
    assert "apt-get install g++" in missing["fix"]
    assert "unset CXX" in missing["fix"]
    assert missing["status"] == checks["compile on CPU"]["status"] == "failed"
    assert checks["torch"]["status"] == "ok"


def test_doctor_names_a_compiler_that_links_torchs_cpp_library(tmp_path, monkeypatch):
    """A GCC that finds only the archive of libstdc++."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-print-file-name=libstdc++.so*) echo libstdc++.so;; '
        f'*) exec {shutil.which("g++")} "$@";; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}):
        check = doctor.check_cpp_compiler()
    assert check.status == "warning"
    assert "there is no libstdc++.so for it" in check.result
    assert "packages for a GPU crash" in check.impact
    assert "export CXX=/usr/bin/g++" in check.fix


@pytest.mark.parametrize(
    ("cause", "fix"),
    [
        ("fatal error: Python.h: No such file or directory", r"python3\.\d+-dev"),
        ("fatal error: 'omp.h' file not found", "libomp-dev"),
        ("Failed to find C compiler. Please specify via CC environment variable", "install gcc"),
        ("x.so: failed to map segment from shared object", "TORCHINDUCTOR_CACHE_DIR"),
        ("something else", r"TORCH_LOGS='\+inductor'"),
    ],
)
def test_doctor_names_the_fix_of_a_failed_compile(monkeypatch, cause, fix):
    def fails(x):
        raise RuntimeError(cause)

    monkeypatch.setattr(torch, "compile", lambda function: fails)
    check = doctor.check_compile("cpu")
    assert (check.status, check.result) == ("failed", f"RuntimeError: {cause}")
    assert re.search(fix, check.fix)


def test_doctor_survives_a_check_that_raises(monkeypatch, capsys):
    def raises():
        raise OSError("no such driver")

    monkeypatch.setattr(doctor, "_CHECKS", {"GPU": raises})
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "the check failed: OSError: no such driver" in printed
    assert printed.startswith("checking this machine and compiling an addition")
    assert printed.endswith("nothing failed: add InductorCompile() to your Trainer's callbacks\n")


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.10.1", "failed"),
        ("2.11.0rc1", "failed"),
        ("2.11.0.dev20260101", "failed"),
        ("2.11", "ok"),
        ("2.11.0+cpu", "ok"),
        ("2.15.0a0+git1234", "ok"),
    ],
)
def test_doctor_orders_prereleases_of_torch_before_the_release(monkeypatch, version, status):
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.check_package("torch").status == status
