"""A package that crashes ends the process that tries it, and not the one that made it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from compile_callbacks import ExportError, _torch, export
from compile_callbacks.exporting.loaded_package import load_after_trial, try_in_new_process
from tests.support.models import mlp

_CRASHES = """\
#include <cstdlib>
__attribute__((constructor)) static void ends_whatever_loads_it() { std::abort(); }
"""


def crashing(package: Path, to: Path) -> Path:
    """A copy of a package whose code crashes when it is loaded."""
    source = to.with_suffix(".cpp")
    source.write_text(_CRASHES)
    library = Path(_torch.inductor.build_cpp(source)).read_bytes()
    with zipfile.ZipFile(package) as original, zipfile.ZipFile(to, "w") as copy:
        for entry in original.infolist():
            copy.writestr(entry, library if entry.filename.endswith(".wrapper.so") else original.read(entry))
    return to


def test_a_package_is_tried_in_another_process_which_alone_ends_if_it_crashes(tmp_path, monkeypatch):
    x, gpu = torch.randn(4, 8), torch.device("cuda")
    package = export(mlp(), (x,), tmp_path / "net.pt2")
    for name in ("torch", "numpy", "typing_extensions"):
        (tmp_path / f"{name}.py").write_text("import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    assert try_in_new_process(package, (x,), {})
    assert list(tmp_path.glob("*.ran")) == []  # modules planted in the current folder are not imported
    with pytest.raises(ExportError, match=r"the package crashes: python\S* was ended by SIGABRT"):
        load_after_trial(crashing(package, tmp_path / "crashing.pt2"), (x,), {}, gpu)


@pytest.mark.gpu
def test_an_export_for_a_gpu_that_crashes_is_refused_and_leaves_no_file(tmp_path, monkeypatch):
    compile_package = _torch.export.compile_package

    def compile_crashing(program, path, options):
        made = tmp_path / "made.pt2"
        compile_package(program, str(made), options)
        crashing(made, Path(path))

    monkeypatch.setattr(_torch.export, "compile_package", compile_crashing)
    with pytest.raises(ExportError, match="was ended by SIGABRT"):
        export(mlp().cuda(), (torch.randn(4, 8, device="cuda"),), tmp_path / "folder" / "net.pt2")
    assert not (tmp_path / "folder" / "net.pt2").exists()
