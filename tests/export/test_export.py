"""`export` and `load_exported`: packages equal eager where torch alone is installed, and failures leave nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
import warnings
import zipfile

import pytest
import torch
from torch import nn

from compile_callbacks import (
    CompileWarning,
    ExportError,
    InductorConfig,
    compile_phases,
    export,
    graph_pass,
    load_exported,
    report_of,
    restore,
)
from tests.support.models import mlp

pytestmark = pytest.mark.all_versions

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class ConvNet(nn.Module):
    """The layers of the digits ResNet, one of each, and an input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor, power: int = 1, *, scale: torch.Tensor | None = None) -> dict:
        features = self.norm(self.conv(images.sigmoid())).relu().mean((2, 3))
        logits = self.head(features) ** power
        return {"logits": logits if scale is None else logits * scale, "features": features}


class Takes(nn.Module):
    """Has a signature with one of each kind of parameter."""

    def forward(self, x, /, y, z=None, *rest, last, **others):
        return x + 2 * y["a"] + sum(rest) + last * others["more"]


class ByValue(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # the line that the error names
            return x
        return -x


class FixesBatch(nn.Module):
    def forward(self, x):
        return x + torch.arange(float(x.shape[0])).reshape(-1, 1) if x.shape[0] == 4 else x


class TakesPairs(nn.Module):
    def forward(self, x):
        return x.reshape(-1, 2, 8)


class ShiftsBySum(nn.Module):
    """Its second input has the size that an example batch of 1 is doubled to."""

    def forward(self, x, shift):
        return x + shift.sum()


class Raises(nn.Module):
    def forward(self, x):
        return {}["no such key"]


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 2, 6, 5).to(memory_format=torch.channels_last)


def trained() -> ConvNet:
    """A net whose batch norm has seen data, left in training mode."""
    torch.manual_seed(0)
    net = ConvNet()
    net(images(8) * 3 + 1)
    return net


seen = []


@graph_pass
def counts(graph, is_inference):
    seen.append(is_inference)


@graph_pass
def broken(graph, is_inference):
    raise ZeroDivisionError("by design")


@graph_pass(hook="pre_grad")
def early(graph, is_inference):
    raise AssertionError("runs on torch's own calls")


class Exported:
    """A package, the module that it was made of, and what was said meanwhile."""

    def __init__(self, folder) -> None:
        self.module = trained()
        example, scale = images(1), torch.ones(1, 1)
        before, generator = {k: v.clone() for k, v in self.module.state_dict().items()}, torch.get_rng_state()
        config = InductorConfig(mode="reduce-overhead", passes=[counts, broken, early], fold_weights=True, dynamic=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.path = export(
                self.module, (example,), folder / "net.pt2", example_kwargs={"scale": scale}, config=config
            )
        self.said = [str(w.message) for w in said if w.category is CompileWarning]
        assert all(torch.equal(value, before[name]) for name, value in self.module.state_dict().items())
        assert all(part.training for part in self.module.modules())
        self.drew = not torch.equal(torch.get_rng_state(), generator)

    def expected(self, *args, **kwargs) -> dict:
        self.module.eval()
        with torch.no_grad():
            return self.module(*args, **kwargs)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Exported:
    return Exported(tmp_path_factory.mktemp("aoti") / "made" / "on the way")


# ------------------------------------------------------------------------------------------ AOTInductor


def test_a_package_runs_where_torch_alone_is_imported(exported, tmp_path):
    inputs = [(images(batch), torch.randn(batch, 1)) for batch in (1, 5)]
    torch.save(inputs, tmp_path / "inputs.pt")
    code = """
        import sys, torch
        run = torch._inductor.aoti_load_package(sys.argv[1])
        outputs = [run(images, scale=scale) for images, scale in torch.load("inputs.pt")]
        torch.save(outputs, "outputs.pt")
        assert not {"compile_callbacks", "lightning"} & set(sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(exported.path)]
    # No compiler is to be found there.
    subprocess.run(command, cwd=tmp_path, env={"PATH": str(tmp_path)}, check=True, timeout=120)
    expected = [exported.expected(x, scale=scale) for x, scale in inputs]
    torch.testing.assert_close(torch.load(tmp_path / "outputs.pt"), expected, **CLOSE)


def test_a_loaded_package_takes_what_the_module_takes(exported):
    run = load_exported(exported.path)
    assert (run.format, run.device, run.torch_version) == ("aoti", "cpu", torch.__version__)
    assert str(inspect.signature(run)) == "(images, *, scale)"
    contiguous, scale = torch.randn(3, 2, 6, 5), torch.randn(3, 1)
    for x in (contiguous, contiguous.to(memory_format=torch.channels_last), contiguous[:, :, :, torch.arange(5)]):
        expected = exported.expected(x, scale=scale)
        torch.testing.assert_close(run(x, scale=scale), expected, **CLOSE)
        torch.testing.assert_close(run(scale=scale, images=x), expected, **CLOSE)
    assert repr(run).endswith("inputs=(images: float32 (batch, 2, 6, 5), scale: float32 (batch, 1)))")


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "what"),
    [
        ((), {}, TypeError, "missing a required argument: 'images'"),
        ((images(2),), {}, TypeError, "missing a required .*argument: 'scale'"),
        ((images(2), 1), {"scale": torch.ones(2, 1)}, TypeError, "too many positional"),
        ((images(2),), {"scale": torch.ones(2, 1), "power": 2}, TypeError, "'power'.*takes images: float32"),
        ((images(2),), {"scale": 1.0}, TypeError, "'scale' must be a tensor, not float"),
        ((images(2),), {"scale": torch.ones(2, 1).double()}, TypeError, "'scale' is of dtype float64"),
        ((images(2)[:, :1],), {"scale": torch.ones(2, 1)}, ValueError, r"'images' has the shape \(2, 1, 6, 5\)"),
        ((images(2)[0],), {"scale": torch.ones(2, 1)}, ValueError, r"'images' has the shape \(2, 6, 5\)"),
        ((images(2),), {"scale": torch.ones(3, 1)}, ValueError, "different sizes: 2 in 'images' and 3 in 'scale'"),
        ((images(2).to("meta"),), {"scale": torch.ones(2, 1)}, ValueError, "'images' is on meta, .* runs on cpu"),
    ],
)
def test_inputs_that_a_package_is_not_for_are_refused(exported, args, kwargs, error, what):
    with pytest.raises(error, match=what):
        load_exported(exported.path)(*args, **kwargs)


def test_settings_that_have_no_place_in_a_package_are_named(exported):
    said = "\n".join(exported.said)
    assert "triton.cudagraphs: a package records no CUDA graphs" in said
    assert "pass early: it runs on torch's own calls" in said
    assert "fold_weights=True: a package folds with freezing=True" in said
    assert "dynamic=True: dynamic_batch says what may change" in said
    assert "ZeroDivisionError: by design" in said
    assert "without it" in said
    assert len(exported.said) == 5
    assert set(seen) == {True}  # and the pass that does have one ran
    assert not exported.drew


def test_a_compiler_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "net.pt2"
    path.write_text("an older package")
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/bin/false",)}),
        pytest.raises(ExportError, match="AOTInductor failed: ") as failed,
    ):
        export(mlp(), (torch.randn(4, 8),), path)
    assert "\n" not in str(failed.value)
    assert path.read_text() == "an older package"
    assert [file.name for file in tmp_path.iterdir()] == ["net.pt2"]


# ------------------------------------------------------------------------------------------ what can be exported


def exported_program(module, args, path, **settings):
    return load_exported(export(module, args, path / "net.pt2", format="export", **settings))


def test_a_program_equals_eager_and_holds_no_example(tmp_path):
    net = trained()
    run = exported_program(net, (images(4), 2), tmp_path)
    assert run.format == "export"
    net.eval()
    for batch in (1, 7):
        x = images(batch)
        outputs = run(x, 2)
        torch.testing.assert_close(outputs, net(x, 2), **CLOSE)
        assert not outputs["logits"].requires_grad
    with pytest.raises(ValueError, match="'power' is 3, and was exported as 2"):
        run(images(2), 3)
    assert torch.export.load(run.path).example_inputs is None


def test_every_kind_of_parameter_is_taken(tmp_path):
    one = torch.randn(3, 2)
    kwargs = {"last": one * 5, "more": one * 6}
    run = exported_program(Takes(), (one, {"a": one * 2}, one * 3, one * 4), tmp_path, example_kwargs=kwargs)
    assert str(inspect.signature(run)) == "(x, /, y, z, *rest, last, more)"
    args = (one, {"a": one}, one, one)
    torch.testing.assert_close(run(*args, **kwargs), Takes()(*args, **kwargs))
    with pytest.raises(TypeError, match=r"input \"y\['b'\]\" was not exported"):
        run(one, {"a": one, "b": one}, one, one, **kwargs)
    with pytest.raises(TypeError, match=r"input 'rest\[0\]' is missing"):
        run(one, {"a": one}, one, **kwargs)


@pytest.mark.parametrize("how", ["ours", "torch", "wrapped"])
def test_a_compiled_module_gives_the_original(tmp_path, how):
    net = mlp().eval()
    expected = net(torch.ones(2, 8))
    compiled = net
    if how == "ours":
        compile_phases(net)
        with torch.no_grad():
            net(torch.ones(2, 8))
    elif how == "torch":
        net.compile(backend="aot_eager")
        net(torch.ones(2, 8))
    else:
        compiled = torch.compile(net, backend="aot_eager")
    run = exported_program(compiled, (torch.randn(4, 8),), tmp_path)
    torch.testing.assert_close(run(torch.ones(2, 8)), expected, **CLOSE)
    if how == "ours":
        assert report_of(net).infer.graphs == 1  # still compiled, and for nothing else
        restore(net)


def test_the_autocast_in_effect_is_part_of_the_package(tmp_path):
    net = mlp()
    with torch.autocast("cpu", torch.bfloat16):
        run = exported_program(net, (torch.randn(4, 8),), tmp_path)
        x = torch.randn(2, 8)
        expected = net.eval()(x)
    assert expected.dtype == torch.bfloat16
    torch.testing.assert_close(run(x), expected.detach())


def test_inputs_of_another_size_are_no_batch_where_the_example_is_a_batch_of_one(tmp_path):
    run = exported_program(ShiftsBySum(), (torch.zeros(1, 3), torch.zeros(2)), tmp_path)
    x, shift = torch.zeros(5, 3), torch.ones(2)
    torch.testing.assert_close(run(x, shift), ShiftsBySum()(x, shift), rtol=0, atol=0)


def test_one_batch_size_is_exported_on_request(tmp_path):
    run = exported_program(FixesBatch(), (torch.zeros(4, 1),), tmp_path, dynamic_batch=False)
    torch.testing.assert_close(run(torch.zeros(4, 1)), torch.arange(4.0).reshape(4, 1))
    with pytest.raises(ValueError, match=r"'x' has the shape \(5, 1\); the package takes float32 \(4, 1\)"):
        run(torch.zeros(5, 1))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (ByValue(), f"decides by the values of a tensor.*data-dependent.*{__file__}:"),
        (FixesBatch(), "every batch size of input 'x'.*dynamic_batch=False"),
        (TakesPairs(), r"input 'x': it takes .*% 16\) == 0 for granted; dynamic_batch=False"),
        (Raises(), f"KeyError: 'no such key'.*{__file__}:"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_exported_is_told_with_its_line_and_leaves_no_file(tmp_path, capfd, module, said):
    with pytest.raises(ExportError, match=said) as failed:
        export(module, (torch.randn(4, 8),), tmp_path / "net.pt2")
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    if isinstance(module, ByValue):
        line = 1 + lines.index("        if x.sum() > 0:  # the line that the error names")
        assert f":{line})" in str(failed.value)
    assert len(str(failed.value)) < 700
    assert list(tmp_path.iterdir()) == []
    assert module.training
    assert "def forward" not in capfd.readouterr().err  # torch prints the graph that it has so far


# ------------------------------------------------------------------------------------------ files


def test_a_path_that_cannot_be_written_is_told_before_anything_is_traced(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.pt2").mkdir()
    for path in (tmp_path / "file" / "net.pt2", tmp_path / "folder.pt2", "/proc/net.pt2"):
        with pytest.raises(OSError, match=str(path)):
            export(Raises(), (torch.randn(4, 8),), path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder.pt2"]


def test_files_that_are_no_packages_are_told(exported, tmp_path):
    whole = exported.path.read_bytes()
    path = tmp_path / "net.pt2"

    def said(content):
        path.write_bytes(content)
        with pytest.raises(ExportError) as failed:
            load_exported(path)
        assert str(path) in str(failed.value)
        return str(failed.value)

    assert "is no .pt2 package" in said(b"")
    assert "is no .pt2 package, or the end of it is missing" in said(whole[: len(whole) // 2])
    for place in (1 / 4, 1 / 2, 3 / 4):
        at = int(len(whole) * place)
        assert "damaged" in said(whole[:at] + bytes(255 - byte for byte in whole[at : at + 64]) + whole[at + 64 :])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "holds no exported program" in said(path.read_bytes())
    with pytest.raises(FileNotFoundError, match=r"missing\.pt2.*does not exist"):
        load_exported(tmp_path / "missing.pt2")
    with pytest.raises(ExportError, match=r"is no \.pt2 package"):
        load_exported(tmp_path)


def changed(path, to, change):
    """A copy of a package with other metadata."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(to, "w") as copy:
        for entry in source.infolist():
            data = source.read(entry)
            copy.writestr(entry, change(data) if entry.filename.endswith(("extra/compile_callbacks", "json")) else data)
    return to


def test_a_package_for_another_device_or_torch_says_so(exported, tmp_path):
    program = export(mlp(), (torch.randn(4, 8),), tmp_path / "program.pt2", format="export")
    other_device = changed(
        program, tmp_path / "gpu.pt2", lambda data: data.replace(b'"device": "cpu"', b'"device": "xpu"')
    )
    with pytest.raises(ExportError, match="was exported for a xpu device, and none is available"):
        load_exported(other_device)
    version = torch.__version__.encode()
    # Another major version of the schema is what a later torch would write.
    newer = changed(
        program,
        tmp_path / "newer.pt2",
        lambda data: data.replace(version, b"9.0").replace(b'"major": 8', b'"major": 99'),
    )
    with pytest.raises(ExportError, match=r"torch 9\.0 wrote it, and this is"):
        load_exported(newer)


def test_a_package_that_export_did_not_write_is_refused(tmp_path):
    torch.export.save(torch.export.export(mlp().eval(), (torch.randn(4, 8),)), tmp_path / "plain.pt2")
    with pytest.raises(
        ExportError, match=r"plain\.pt2 was not written by compile_callbacks\.export; load it with torch"
    ):
        load_exported(tmp_path / "plain.pt2")


# ------------------------------------------------------------------------------------------ arguments

X = (torch.randn(4, 8),)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"module": 3}, TypeError, r"module=3 must be a torch\.nn\.Module"),
        ({"example_inputs": X[0]}, TypeError, r"tuple of positional inputs, not Tensor; one tensor is \(tensor,\)"),
        ({"example_inputs": (X[0], 3)}, TypeError, "too many positional arguments"),
        ({"example_inputs": (torch.tensor(1.0),)}, ValueError, "no batch; dynamic_batch=False"),
        ({"example_kwargs": [1]}, TypeError, r"example_kwargs=\[1\] must map names"),
        ({"path": 3}, TypeError, "path=3 must be a path"),
        ({"path": "net.pt"}, ValueError, r"path='net\.pt' must end in '\.pt2'"),
        ({"format": "aot"}, ValueError, "format='aot' is unknown; did you mean 'aoti'"),
        ({"config": "defualt"}, ValueError, "config='defualt' is unknown; did you mean 'default'"),
        ({"config": "eager"}, ValueError, r"export\(format='export'\) writes what is not compiled"),
        ({"verify": None}, TypeError, "verify=None must be True or False"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, change, error, said):
    arguments = {"module": mlp(), "example_inputs": X, "path": tmp_path / "net.pt2", **change}
    with pytest.raises(error, match=said):
        export(arguments.pop("module"), arguments.pop("example_inputs"), arguments.pop("path"), **arguments)
    assert list(tmp_path.iterdir()) == []
