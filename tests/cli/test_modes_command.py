"""``compile-callbacks modes``: everything that can be asked for by name, and whether it works here."""

from __future__ import annotations

import json

import pytest
import torch

from compile_callbacks import templates
from compile_callbacks.cli.main import main


def test_every_mode_and_template_is_listed(capsys):
    assert main(["modes", "--device", "cpu", "--json"]) == 0
    listed = {mode["name"]: mode for mode in json.loads(capsys.readouterr().out)["modes"]}
    assert set(listed) == {*torch._inductor.list_mode_options(), "default", *templates.names()}
    assert listed["default"]["lacks"] is None
    assert "falls back" in listed["tma"]["lacks"]
    assert listed["reduce-overhead"]["options"] == {"triton.cudagraphs": True}
    assert listed["triton"]["mode"] == "max-autotune-no-cudagraphs"


@pytest.mark.parametrize(("device", "named"), [("gpu", "'gpu'"), ("cuda:99", "'cuda:99'")])
def test_a_device_that_is_not_there_is_refused(device, named, capsys):
    assert main(["modes", "--device", device]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1
