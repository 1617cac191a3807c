"""``compile-callbacks``: the help without torch, and wrong arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("arguments", [[], ["report"], ["reprot", "."]])
def test_main_refuses_wrong_arguments_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: compile-callbacks")
