"""``compile-callbacks``: the help without torch, wrong arguments, and the list of modes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from compile_callbacks import templates
from compile_callbacks.cli.main import main


@pytest.mark.parametrize("argument", ["--help", "explain"])
def test_main_does_not_import_torch_for(argument):
    program = f"""
import sys
from compile_callbacks.cli.main import main
try:
    main([{argument!r}])
except SystemExit as exit:
    assert exit.code == 0
assert not {{"torch", "lightning", "numpy"}} & set(sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "bench" in printed or "CC104" in printed


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
