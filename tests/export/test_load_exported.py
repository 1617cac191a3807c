"""`load_exported` refuses files that are damaged, foreign or from another version; a smoke test finds crashes first."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

from compile_callbacks import ExportError, _torch, export, load_exported
from compile_callbacks.exporting.loaded_package import load_after_smoke_test
from tests.support.models import mlp

X = torch.ones(4, 8)
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    """A package of each format."""
    folder = tmp_path_factory.mktemp("packages")
    return {
        format_: export(mlp(), (X,), folder / f"{format_}.pt2", format=format_, verify="off")
        for format_ in ("export", "aoti")
    }


def changed(package: Path, to: Path, change) -> Path:
    """Copy a package; ``change`` gets the name and the content of each entry, and returns the new content."""
    with zipfile.ZipFile(package) as original, zipfile.ZipFile(to, "w") as copy:
        for entry in original.infolist():
            copy.writestr(entry, change(entry.filename, original.read(entry)))
    return to


def with_metadata(package: Path, to: Path, change) -> Path:
    """Copy a package; ``change`` gets the library's metadata as text, and returns other text."""

    def change_entry(name: str, data: bytes) -> bytes:
        if name.endswith("extra/compile_callbacks"):
            return change(data.decode()).encode()
        if name.endswith("wrapper_metadata.json"):
            of_torch = json.loads(data)
            return json.dumps(of_torch | {"compile_callbacks": change(of_torch["compile_callbacks"])}).encode()
        return data

    return changed(package, to, change_entry)


def with_inputs(change):
    """Change the description of the inputs in the metadata; ``change`` gets it as data."""

    def change_text(text: str) -> str:
        metadata = json.loads(text)
        spec = json.loads(metadata["inputs"])
        change(spec)
        return json.dumps({**metadata, "inputs": json.dumps(spec)})

    return change_text


INPUTS = {
    "a newer field of an input": lambda spec: spec["inputs"]["input"].append("quantized"),
    "no inputs": lambda spec: spec.pop("inputs"),
    "an unknown kind of parameter": lambda spec: spec["parameters"].update(input="POSITIONAL_OR_OTHER"),
    "a wrong name": lambda spec: spec.update(parameters={"not a name": "KEYWORD_ONLY"}),
    "an unknown memory format": lambda spec: spec["inputs"]["input"].__setitem__(2, "torch.blocked"),
}


@pytest.mark.all_versions
@pytest.mark.parametrize("format_", ["export", "aoti"])
def test_metadata_and_inputs_that_cannot_be_read_are_an_export_error(format_, packages, tmp_path):
    changes = [with_inputs(change) for change in INPUTS.values()]
    changes += [
        lambda text, inputs=inputs: json.dumps({**json.loads(text), "inputs": inputs})
        for inputs in (None, [1], "{", DEEP)
    ]
    changes += [lambda _, metadata=metadata: metadata for metadata in ("", "null", '{"torch": "2.15"}', DEEP)]
    text = r"other\.pt2 is damaged, or another version of compile_callbacks wrote it: "
    for change in changes:
        package = with_metadata(packages[format_], tmp_path / "other.pt2", change)
        with pytest.raises(ExportError, match=text):
            load_exported(package)


@pytest.mark.all_versions
def test_files_that_are_not_packages_are_refused(packages, tmp_path):
    content = packages["aoti"].read_bytes()
    path = tmp_path / "net.pt2"

    def error_of(data):
        path.write_bytes(data)
        with pytest.raises(ExportError, match=str(path)) as failed:
            load_exported(path)
        return str(failed.value)

    assert "is not a .pt2 package" in error_of(b"")
    assert "is not a .pt2 package, or is truncated" in error_of(content[: len(content) // 2])
    for place in (1 / 4, 1 / 2, 3 / 4):
        at = int(len(content) * place)
        damaged = content[:at] + bytes(255 - byte for byte in content[at : at + 64]) + content[at + 64 :]
        assert "damaged" in error_of(damaged)
    encrypted = bytearray(packages["export"].read_bytes())
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1  # the flags of the directory's first entry
    assert "is damaged" in error_of(encrypted)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "neither compiled code nor a program" in error_of(path.read_bytes())
    torch.export.save(torch.export.export(mlp().eval(), (X,)), path)
    assert "was not written by compile_callbacks.export; load it with torch" in error_of(path.read_bytes())
    with pytest.raises(FileNotFoundError, match=r"missing\.pt2.*does not exist"):
        load_exported(tmp_path / "missing.pt2")
    with pytest.raises(ExportError, match=r"is not a \.pt2 package"):
        load_exported(tmp_path)


@pytest.mark.all_versions
def test_a_package_for_another_device_or_torch_is_refused(packages, tmp_path):
    for_gpu = with_metadata(
        packages["export"], tmp_path / "gpu.pt2", lambda text: text.replace('"device": "cpu"', '"device": "xpu"')
    )
    with pytest.raises(ExportError, match="was exported for a device of type xpu, which is not available here"):
        load_exported(for_gpu)
    version = torch.__version__.encode()
    # Another major version of the schema is what a later torch would write.
    newer = changed(
        packages["export"],
        tmp_path / "newer.pt2",
        lambda _, data: data.replace(version, b"9.0").replace(b'"major": 8', b'"major": 99'),
    )
    with pytest.raises(ExportError, match=r"torch 9\.0 wrote it, and this is torch"):
        load_exported(newer)


# ------------------------------------------------------------------------------------------ the smoke test

_CRASHES = """\
#include <cstdlib>
__attribute__((constructor)) static void end_the_process_that_loads_it() { std::abort(); }
"""


def crashing(package: Path, to: Path) -> Path:
    """Copy a package, with code that crashes when it is loaded."""
    source = to.with_suffix(".cpp")
    source.write_text(_CRASHES)
    builder = CppBuilder(source.stem, str(source), CppTorchOptions(warning_all=False), str(source.parent))
    builder.build()
    library = Path(builder.get_target_file_path()).read_bytes()
    return changed(package, to, lambda name, data: library if name.endswith(".wrapper.so") else data)


@pytest.mark.slow
def test_a_package_that_crashes_ends_only_the_smoke_test(packages, tmp_path, monkeypatch):
    for name in ("torch", "numpy", "typing_extensions"):
        (tmp_path / f"{name}.py").write_text("import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    load_after_smoke_test(packages["aoti"], (X,), {}, torch.device("cuda"))
    assert list(tmp_path.glob("*.ran")) == []  # modules planted in the current folder are not imported
    with pytest.raises(ExportError, match=r"the package crashed: python\S* was ended by SIGABRT"):
        load_after_smoke_test(crashing(packages["aoti"], tmp_path / "crashing.pt2"), (X,), {}, torch.device("cuda"))


@pytest.mark.gpu
def test_an_export_for_a_gpu_that_crashes_leaves_no_file(tmp_path, monkeypatch):
    compile_package = _torch.export.compile_package

    def compile_crashing(program, path, options):
        compiled = tmp_path / "compiled.pt2"
        compile_package(program, str(compiled), options)
        crashing(compiled, Path(path))

    monkeypatch.setattr(_torch.export, "compile_package", compile_crashing)
    with pytest.raises(ExportError, match="was ended by SIGABRT"):
        export(mlp().cuda(), (X.cuda(),), tmp_path / "folder" / "net.pt2")
    assert not (tmp_path / "folder" / "net.pt2").exists()


def test_a_path_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"path=3 must be a path, not int \[CC202"):
        load_exported(3)
