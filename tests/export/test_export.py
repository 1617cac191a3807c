"""`export` and `load_exported`: packages equal eager and need only torch, and failures leave no file."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
import zipfile
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import compile_callbacks
from compile_callbacks import CompileWarning, ExportError, export, graph_pass, load_exported
from tests.support.models import mlp
from tests.support.pairs import made_once

pytestmark = pytest.mark.all_versions

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
X = torch.linspace(-1, 1, 32).reshape(4, 8)
DIFFERS = r"package .*net\.pt2 differs from eager: output 0 has a relative error of "


class ConvNet(nn.Sequential):
    """Layers, and an input by name."""

    def forward(self, images, power=1, *, scale=None):
        logits = super().forward(images.sigmoid()) ** power
        return {"logits": logits if scale is None else logits * scale, "mean": images.mean((1, 2, 3))}


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 2, 6, 5).to(memory_format=torch.channels_last)


def trained() -> ConvNet:
    """A network in training mode, whose batch norm has other statistics than a new one."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = ConvNet(*layers, nn.Linear(4, 3))
    net(images(8) * 3 + 1)
    return net


seen = []


@graph_pass
def counts(graph, is_inference):
    seen.append(is_inference)


def broken(graph, is_inference):
    raise ZeroDivisionError("by design")


def write_packages(folder):
    """Write a package and a program of `ConvNet`, and the warnings of the exports."""
    module, before, example = trained(), trained().state_dict(), images(1)
    passes = [counts, graph_pass(hook="pre_grad")(broken)]
    mode = {"passes": passes, "dynamic": True, "dynamo": {"capture_scalar_outputs": True}, "mode": "reduce-overhead"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path, generator = folder / "folders" / "that are created" / "net.pt2", torch.get_rng_state()
        export(module, (example,), path, kwargs={"scale": torch.ones(1, 1)}, mode=mode)
        assert torch.equal(torch.get_rng_state(), generator)
    with pytest.raises(ExportError, match=r"graph pass 'broken' .* ZeroDivisionError: by design"):
        export(module, (example,), folder / "broken.pt2", mode={"passes": [graph_pass(broken)]})
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert all(submodule.training for submodule in module.modules())
    said = [str(warning.message) for warning in caught if warning.category is CompileWarning]
    (folder / "said.json").write_text(json.dumps({"warnings": said, "seen": sorted(set(seen))}))


@pytest.fixture
def packages(tmp_path_factory, worker_id):
    """The packages, and the function whose package ``net`` is."""
    folder = made_once("packages", write_packages, tmp_path_factory, worker_id)
    paths = {path.stem: path for path in folder.rglob("*.pt2")}
    eager = torch.no_grad()(trained().eval().forward)
    return SimpleNamespace(**paths, eager=eager, **json.loads((folder / "said.json").read_text()))


CALLS_PACKAGE = """
import sys, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
for x, scale, expected in torch.load("calls.pt"):
    torch.testing.assert_close(run(x, scale=scale), expected, rtol=1e-4, atol=1e-5)
assert not {"compile_callbacks", "lightning"} & set(sys.modules)
"""


@pytest.mark.slow
def test_a_package_runs_where_only_torch_is_imported_without_a_compiler(packages, tmp_path):
    inputs = [(images(batch).contiguous(), torch.randn(batch, 1)) for batch in (1, 5)]
    torch.save([(x, scale, packages.eager(x, scale=scale)) for x, scale in inputs], tmp_path / "calls.pt")
    command = [sys.executable, "-c", CALLS_PACKAGE, str(packages.net)]
    subprocess.run(command, cwd=tmp_path, env={"PATH": str(tmp_path)}, check=True, timeout=120)


def test_a_loaded_package_takes_the_inputs_of_the_module_in_any_layout_and_refuses_others(packages, monkeypatch):
    # torch's function compiles programs to find the instructions of the processor. Loading starts no compiler.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", pytest.fail)
    run, eager = load_exported(packages.net), packages.eager
    assert run.device == "cpu"
    assert repr(run).endswith("inputs=(images: float32 (batch, 2, 6, 5) on cpu, scale: float32 (batch, 1) on cpu))")
    contiguous, scale = torch.randn(3, 2, 6, 5), torch.randn(3, 1)
    for x in (contiguous, contiguous.to(memory_format=torch.channels_last), contiguous[:, :, :, torch.arange(5)]):
        for outputs in (run(x, scale=scale), run(scale=scale, images=x)):
            torch.testing.assert_close(outputs, eager(x, scale=scale), **CLOSE)
    for first, kwargs, error, text in (
        (x, {}, TypeError, "input 'scale' is missing"),
        (x, {"scale": scale, "power": 2}, TypeError, "'power'.*takes images: float32"),
        (x, {"scale": scale.double()}, ValueError, r"'scale' is float64 \(3, 1\)"),
        (x[:, :1], {"scale": scale}, ValueError, r"'images' is float32 \(3, 1, 6, 5\)"),
        (x, {"scale": torch.ones(2, 1)}, ValueError, "batch sizes, {'images': 3, 'scale': 2}"),
        (x.to("meta"), {"scale": scale}, ValueError, r"'images' is .* on meta; .*\) on cpu"),
        (2, {"scale": scale}, ValueError, "'images' is 2; the package takes"),
    ):
        with pytest.raises(error, match=text):
            run(first, **kwargs)


def test_an_export_names_settings_that_a_package_does_not_support(packages):
    (text,) = packages.warnings
    for name in ("triton.cudagraphs", "pass broken", "dynamic=True", "dynamo={'capture_scalar_outputs': True}"):
        assert name in text
    assert packages.seen == [True]  # the pass that a package supports ran


@pytest.fixture
def programs(monkeypatch):
    """Instead of compiled code, packages contain the program of `torch.export`, or that of another module in a list."""
    others = []

    def saves(program, *, package_path, inductor_configs):
        if others:
            program = torch.export.export(others[0].eval(), (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        metadata = json.dumps(inductor_configs["aot_inductor.metadata"])
        torch.export.save(program, package_path, extra_files={"wrapper_metadata.json": metadata})

    def loads(path):
        with warnings.catch_warnings(action="ignore"):  # torch 2.11 warns about torch
            run = torch.no_grad()(torch.export.load(path).module(check_guards=False))
        return lambda tensors: run(*tensors)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", saves)
    monkeypatch.setattr("compile_callbacks._torch.inductor.load_package", loads)
    return others


def test_a_package_that_differs_from_eager_does_not_replace_an_older_one(tmp_path, programs):
    programs.append(mlp())  # with other weights
    path = tmp_path / "net.pt2"
    path.write_text("an older package")
    with pytest.raises(ExportError, match=DIFFERS):
        export(mlp(), (X,), path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("net.pt2", "an older package")]


def test_a_package_that_differs_from_eager_for_another_batch_size_raises(tmp_path, programs):
    programs.append(calling(lambda x: x + x.shape[0] // 5))
    with pytest.raises(ExportError, match=DIFFERS):
        export(calling(lambda x: x + 0), (X,), tmp_path / "net.pt2")
    export(calling(lambda x: x + 0), (X,), tmp_path / "net.pt2", dynamic_batch=False)
    with pytest.warns(CompileWarning, match=DIFFERS):
        export(calling(lambda x: x + 0), (X,), tmp_path / "net.pt2", verify="warn")
    assert load_exported(tmp_path / "net.pt2")(X[:1]).sum() == X[:1].sum()  # the package is written


def loaded(module, args, folder, **settings):
    return load_exported(export(module, args, folder / "net.pt2", **settings))


def test_the_original_of_a_compiled_module_is_exported(tmp_path, no_codegen, programs):
    compile_phases, backend = compile_callbacks.compile_phases, {"backend": "eager"}
    for how in (compile_phases, lambda net: net.compile(**backend) or net, lambda net: torch.compile(net, **backend)):
        net = mlp().eval()
        expected, compiled = net(X[:2]), how(net)
        with torch.no_grad():
            compiled(X[:2])
        torch.testing.assert_close(loaded(compiled, (X,), tmp_path)(X[:2]), expected, **CLOSE)
        if how is compile_phases:
            assert compile_callbacks.report_of(net).infer.graphs == 1  # still compiled; the export compiled none
            compile_callbacks.restore(net)


def calling(function):
    """A module that calls a function."""
    return type("Calls", (nn.Module,), {"forward": lambda self, x: function(x)})()


def fixes_batch(x):
    return x + torch.arange(float(x.shape[0])).reshape(-1, 1) if x.shape[0] == 4 else x


def test_without_dynamic_batch_a_package_takes_one_batch_size(tmp_path, programs):
    with pytest.raises(TypeError, match="dynamic_batch='yes' must be True or False"):
        export(mlp(), (X,), tmp_path / "net.pt2", dynamic_batch="yes")
    run = loaded(calling(fixes_batch), (torch.zeros(4, 1),), tmp_path, dynamic_batch=False)
    torch.testing.assert_close(run(torch.zeros(4, 1)), torch.arange(4.0).reshape(4, 1))
    with pytest.raises(ValueError, match=r"'x' is float32 \(5, 1\) on cpu; the package takes x: float32 \(4, 1\)"):
        run(torch.zeros(5, 1))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x if x.sum() > 0 else -x, "data-dependent.*LINE"),
        (fixes_batch, "every batch size .*dynamic_batch=False"),
        (lambda x: x.reshape(-1, 2, 8), r"every batch size .*% 16\) == 0.*; dynamic_batch=False"),
        (lambda x: dict[str, int]()["no such key"], "KeyError: 'no such key'.*LINE"),
    ],
)
def test_a_module_that_cannot_be_exported_is_an_error_with_its_line(tmp_path, function, text):
    module, line = calling(function), rf"\(at {__file__}:{function.__code__.co_firstlineno}\)"
    with pytest.raises(ExportError, match=text.replace("LINE", line)) as failed:
        export(module, (X,), tmp_path / "net.pt2")
    assert len(str(failed.value)) < 750
    assert list(tmp_path.iterdir()) == []
    assert module.training
    torch.nn.modules.module._global_buffer_registration_hooks.clear()  # torch 2.11 leaves one after a failed export


def changed(package, to, change):
    """Copy a package; ``change`` gets the name and the content of each entry, and returns the new content."""
    with zipfile.ZipFile(package) as original, zipfile.ZipFile(to, "w") as copy:
        for entry in original.infolist():
            copy.writestr(entry, change(entry.filename, original.read(entry)))
    return to


def test_metadata_and_inputs_that_cannot_be_read_are_an_export_error(packages, tmp_path):
    deep, path = "[" * 100_000, tmp_path / "other.pt2"
    others = [json.dumps({"torch": "2.15", "device": "cpu", "inputs": inputs}) for inputs in (None, [1], {"texts": {}})]
    for text in (*others, "", "null", '{"torch": "2.15"}', deep):

        def change(name, data, text=text):
            if not name.endswith("wrapper_metadata.json"):
                return data
            return json.dumps({**json.loads(data), "compile_callbacks": text}).encode()

        changed(packages.net, path, change)
        with pytest.raises(ExportError, match=r"other\.pt2 is damaged, or was not written by"):
            load_exported(path)


def test_files_that_are_not_packages_are_refused(packages, tmp_path):
    content, other, of_torch = packages.net.read_bytes(), io.BytesIO(), io.BytesIO()
    encrypted = bytearray(content)
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1  # the flags of the directory's first entry
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme.txt", "hello")
    torch.export.save(torch.export.export(mlp().eval(), (X,)), of_torch)
    damaged = [bytearray(content), bytearray(content), bytearray(content)]
    for quarter, data in enumerate(damaged, start=1):
        places = slice(len(data) * quarter // 4, len(data) * quarter // 4 + 64)
        data[places] = bytes(255 - byte for byte in data[places])
    path = tmp_path / "net.pt2"
    for data, text in (
        (b"", "File is not a zip file"),
        (content[: len(content) // 2], "File is not a zip file"),
        *zip(damaged, ["(not match its checksum|zip|magic number|Error)"] * 3, strict=True),
        (encrypted, "encrypted"),
        (other.getvalue(), "no item named 'wrapper_metadata.json'"),
        (of_torch.getvalue(), "no item named 'wrapper_metadata.json'"),
    ):
        path.write_bytes(data)
        with pytest.raises(ExportError, match=f"{path} is damaged, or was not written by .*: .*{text}"):
            load_exported(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.pt2.*does not exist"):
        load_exported(tmp_path / "missing.pt2")
    with pytest.raises(ExportError, match=r"is damaged, or was not written by .*: IsADirectoryError"):
        load_exported(tmp_path)


def test_a_package_for_another_device_or_torch_is_refused(packages, tmp_path, monkeypatch):
    other = changed(packages.net, tmp_path / "gpu.pt2", lambda _, data: data.replace(rb"\"cpu\"", rb"\"xpu\""))
    with pytest.raises(ExportError, match="was exported for a device of type xpu, which is not available here"):
        load_exported(other)
    monkeypatch.setattr("compile_callbacks._torch.inductor.load_package", lambda path: 1 / 0)
    with pytest.raises(ExportError, match=r"ZeroDivisionError.*torch \S+ wrote it, and this is torch"):
        load_exported(packages.net)
