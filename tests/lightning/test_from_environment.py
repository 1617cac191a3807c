"""``COMPILE_CALLBACKS``: Lightning finds the entry point of the package, and the variable selects the mode."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from compile_callbacks import InductorCompile
from tests.support.models import QUIET, Classifier, fit, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

ROOT, VARIABLE = Path(__file__).parents[2], "COMPILE_CALLBACKS"


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """The metadata that an installation of this copy would have. They hide those of the environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "compile_callbacks-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: compile-callbacks\nVersion: 0\n")
    groups = {group: "\n".join(map(" = ".join, names.items())) for group, names in project["entry-points"].items()}
    text = "\n".join(f"[{group}]\n{lines}" for group, lines in groups.items())
    (folder / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def callback_of(run):
    """The callback that compiles: one of the script, or the one of the variable."""
    *_, callback = sorted(
        (callback for callback in run.callbacks if isinstance(callback, InductorCompile)),
        key=lambda callback: not callback.from_environment,
    )
    return callback


MAKE_TRAINERS = """
import sys, lightning.pytorch, pytorch_lightning
for package in (lightning.pytorch, pytorch_lightning):
    before = set(sys.modules)
    package.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    new = sorted(set(sys.modules) - before)
    print([name for name in new if name.startswith(("compile_callbacks", "torch", "lightning."))])
    for name in new: del sys.modules[name]
"""


def test_without_the_variable_a_trainer_imports_no_compiler_and_gets_no_callback(installed, monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    assert not [callback for callback in trainer().callbacks if "compile" in type(callback).__module__]
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PYTHONPATH", f"{installed}{os.pathsep}{ROOT}")
    printed = subprocess.check_output([sys.executable, "-c", MAKE_TRAINERS], text=True, cwd=installed)
    names = ["", ".background", ".callbacks", ".callbacks.from_environment"]
    found = [line for line in printed.splitlines() if line.startswith("[")]
    assert found == [str([f"compile_callbacks{name}" for name in names])] * 2


def test_the_mode_applies_in_the_trainer_of_the_package_pytorch_lightning(monkeypatch):
    from tests.lightning.test_pytorch_lightning import Module, pl

    monkeypatch.setenv(VARIABLE, "default")
    run = pl.Trainer(**QUIET)
    run.predict(Module(), loader(2))
    assert callback_of(run).report.infer.graphs == 1


def test_the_mode_applies_to_both_phases_and_a_wrong_one_fails_in_the_trainer(monkeypatch):
    for mode, ran in {"auto": "auto", "eager": "eager", "fast": "default", "1": "default"}.items():
        monkeypatch.setenv(VARIABLE, mode)
        run = trainer(fast_dev_run=2)
        run.fit(Classifier(), loader(2), loader(2))
        report = callback_of(run).report
        assert (report.train.mode, report.infer.mode) == (ran, ran)
    monkeypatch.setenv(VARIABLE, "defalt")
    with pytest.raises(ValueError, match=r"COMPILE_CALLBACKS='defalt' is unknown; did you mean 'default'\?.*\[CC201"):
        trainer()


def test_a_script_trains_as_with_the_callback(monkeypatch):
    by_hand = fit(InductorCompile(), train=20)
    monkeypatch.setenv(VARIABLE, "default")
    module, run = seeded(), trainer()
    run.fit(module, loader(20), loader(2))
    callback = callback_of(run)
    assert (callback.report.train.graphs, callback.report.infer.graphs) == (1, 1)
    assert module.losses == by_hand.losses
    run.validate(module, loader(2), verbose=False)
    assert callback_of(run) is callback


class WithCallback(Classifier):
    """A module that brings its own callback."""

    def configure_callbacks(self):
        return [InductorCompile("default", None, baseline_steps=0, verify="off")]


def test_the_variable_does_nothing_next_to_a_callback_of_the_script(monkeypatch, logged):
    monkeypatch.setenv(VARIABLE, "eager")
    # Lightning itself replaces the callback by that of a module.
    for module, callbacks, lines in ((WithCallback(), [], 0), (Classifier(), WithCallback().configure_callbacks(), 2)):
        run, before = trainer(*callbacks), len(logged())
        run.fit(module, loader(2))
        assert callback_of(run).report.train.graphs == 1
        run.validate(module, loader(2), verbose=False)
        messages = [line for line in logged()[before:] if VARIABLE in line]
        assert messages == ["COMPILE_CALLBACKS has no effect, because the script has its own InductorCompile"] * lines
