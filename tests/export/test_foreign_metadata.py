"""Packages whose metadata another version of this library wrote, or somebody damaged."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch

from compile_callbacks import ExportError, export, load_exported
from tests.support.models import mlp

pytestmark = pytest.mark.all_versions

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packages")
    return {
        kind: export(mlp(), (torch.ones(4, 8),), folder / f"{kind}.pt2", format=kind, verify=False)
        for kind in ("export", "aoti")
    }


def with_metadata(package: Path, to: Path, change) -> Path:
    """A copy of a package; ``change`` gets its metadata as text, and returns other text."""
    found = 0
    with zipfile.ZipFile(package) as original, zipfile.ZipFile(to, "w") as copy:
        for entry in original.infolist():
            data = original.read(entry)
            if entry.filename.endswith("extra/compile_callbacks"):
                data, found = change(data.decode()).encode(), found + 1
            elif entry.filename.endswith("wrapper_metadata.json"):
                of_torch = json.loads(data)
                of_torch["compile_callbacks"] = change(of_torch["compile_callbacks"])
                data, found = json.dumps(of_torch).encode(), found + 1
            copy.writestr(entry, data)
    assert found == 1
    return to


def with_spec(package: Path, to: Path, change) -> Path:
    """A copy of a package; ``change`` gets the description of its inputs as data, and changes it in place."""

    def changed(text: str) -> str:
        metadata = json.loads(text)
        spec = json.loads(metadata["inputs"])
        change(spec)
        return json.dumps({**metadata, "inputs": json.dumps(spec)})

    return with_metadata(package, to, changed)


SPECS = {
    "a newer field of an input": lambda spec: spec["inputs"]["input"].update(quantized=True),
    "a missing field of an input": lambda spec: spec["inputs"]["input"].pop("dtype"),
    "a missing shape": lambda spec: spec["inputs"]["input"].pop("shape"),
    "no inputs": lambda spec: spec.pop("inputs"),
    "no parameters": lambda spec: spec.pop("parameters"),
    "a list of inputs": lambda spec: spec.update(inputs=[1]),
    "a list of parameters": lambda spec: spec.update(parameters=["input"]),
    "an input that is a number": lambda spec: spec["inputs"].update(input=3),
    "a kind that is unknown": lambda spec: spec["parameters"].update(input="POSITIONAL_OR_OTHER"),
    "a kind that is a method": lambda spec: spec["parameters"].update(input="replace"),
    "a name that is none": lambda spec: spec.update(parameters={"not a name": "KEYWORD_ONLY"}),
    "a shape of strings": lambda spec: spec["inputs"]["input"].update(shape=["batch", 8]),
    "a dtype that is a number": lambda spec: spec["inputs"]["input"].update(dtype=32),
    "a memory format that is unknown": lambda spec: spec["inputs"]["input"].update(memory_format="blocked"),
}


@pytest.mark.parametrize("kind", ["export", "aoti"])
@pytest.mark.parametrize("case", SPECS)
def test_inputs_that_cannot_be_read_are_an_export_error(case, kind, packages, tmp_path):
    package = with_spec(packages[kind], tmp_path / "other.pt2", SPECS[case])
    with pytest.raises(ExportError, match=r"other\.pt2 describes its inputs as this version"):
        load_exported(package)


@pytest.mark.parametrize("kind", ["export", "aoti"])
@pytest.mark.parametrize("text", ["", "[1]", "null", '"text"', '{"torch": "2.15"}', "{", DEEP])
def test_metadata_that_cannot_be_read_is_an_export_error(text, kind, packages, tmp_path):
    package = with_metadata(packages[kind], tmp_path / "other.pt2", lambda _: text)
    with pytest.raises(ExportError, match=r"other\.pt2 is damaged"):
        load_exported(package)


@pytest.mark.parametrize("kind", ["export", "aoti"])
@pytest.mark.parametrize("inputs", [None, 3, [1], "", "[1]", "{", DEEP])
def test_inputs_of_another_type_are_an_export_error(inputs, kind, packages, tmp_path):
    package = with_metadata(
        packages[kind], tmp_path / "other.pt2", lambda text: json.dumps({**json.loads(text), "inputs": inputs})
    )
    with pytest.raises(ExportError, match=r"other\.pt2 describes its inputs as this version"):
        load_exported(package)


def test_a_newer_field_beside_the_inputs_is_ignored(packages, tmp_path):
    package = with_metadata(
        packages["export"], tmp_path / "newer.pt2", lambda text: json.dumps({**json.loads(text), "license": "MIT"})
    )
    assert load_exported(package)(torch.ones(4, 8)).shape == (4, 3)


def test_an_encrypted_package_is_an_export_error(packages, tmp_path):
    content = bytearray(packages["export"].read_bytes())
    at = content.index(b"PK\x01\x02")  # the first entry of the directory, whose flags say that it is encrypted
    content[at + 8] |= 1
    (tmp_path / "encrypted.pt2").write_bytes(content)
    with pytest.raises(ExportError, match=r"encrypted\.pt2 is damaged"):
        load_exported(tmp_path / "encrypted.pt2")
