"""`export` and `load_exported`: packages equal eager and need only torch, and failures leave no file."""

from __future__ import annotations

import copy
import functools
import inspect
import subprocess
import sys
import textwrap
import warnings
from types import SimpleNamespace

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
from tests.support.wrong_passes import WrongForward

pytestmark = pytest.mark.all_versions

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class ConvNet(nn.Module):
    """A convolution, a batch norm and a linear layer, and an input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor, power: int = 1, *, scale: torch.Tensor | None = None) -> dict:
        features = self.norm(self.conv(images.sigmoid())).relu().mean((2, 3))
        logits = self.head(features) ** power
        return {"logits": logits if scale is None else logits * scale, "features": features}


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def by_value(x):
    if x.sum() > 0:  # the line that the error names
        return x
    return -x


def fixes_batch(x):
    return x + torch.arange(float(x.shape[0])).reshape(-1, 1) if x.shape[0] == 4 else x


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 2, 6, 5).to(memory_format=torch.channels_last)


def trained() -> ConvNet:
    """A network in training mode, whose batch norm has other statistics than a new one."""
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
    raise AssertionError("a package has no graph at this hook point")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A compiled package, a function that calls its module eagerly, and the warnings of the export."""
    module, example, scale = trained(), images(1), torch.ones(1, 1)
    before, generator = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    settings = {"dynamic": True, "dynamo": {"capture_scalar_outputs": True}}
    mode = InductorConfig(mode="reduce-overhead", passes=[counts, broken, early], **settings)
    path = tmp_path_factory.mktemp("aoti") / "folders" / "that are created" / "net.pt2"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(module, (example,), path, kwargs={"scale": scale}, mode=mode)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert all(submodule.training for submodule in module.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    messages = [str(w.message) for w in caught if w.category is CompileWarning]
    return SimpleNamespace(path=path, expected=torch.no_grad()(module.eval().forward), warnings=messages)


# ------------------------------------------------------------------------------------------ AOTInductor


@pytest.mark.slow
def test_a_package_runs_where_only_torch_is_imported(exported, tmp_path):
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
    # The PATH has no compiler.
    subprocess.run(command, cwd=tmp_path, env={"PATH": str(tmp_path)}, check=True, timeout=120)
    expected = [exported.expected(x, scale=scale) for x, scale in inputs]
    torch.testing.assert_close(torch.load(tmp_path / "outputs.pt"), expected, **CLOSE)


def test_a_loaded_package_takes_the_inputs_of_the_module_in_any_layout(exported):
    run = load_exported(exported.path)
    assert (run.format, run.device) == ("aoti", "cpu")
    assert str(inspect.signature(run)) == "(images, *, scale)"
    contiguous, scale = torch.randn(3, 2, 6, 5), torch.randn(3, 1)
    for x in (contiguous, contiguous.to(memory_format=torch.channels_last), contiguous[:, :, :, torch.arange(5)]):
        expected = exported.expected(x, scale=scale)
        torch.testing.assert_close(run(x, scale=scale), expected, **CLOSE)
        torch.testing.assert_close(run(scale=scale, images=x), expected, **CLOSE)
    assert repr(run).endswith("inputs=(images: float32 (batch, 2, 6, 5) on cpu, scale: float32 (batch, 1) on cpu))")


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((images(2),), {}, TypeError, "missing a required .*argument: 'scale'"),
        ((images(2),), {"scale": torch.ones(2, 1), "power": 2}, TypeError, "'power'.*takes images: float32"),
        ((images(2),), {"scale": torch.ones(2, 1).double()}, ValueError, r"'scale' is float64 \(2, 1\)"),
        ((images(2)[:, :1],), {"scale": torch.ones(2, 1)}, ValueError, r"'images' is float32 \(2, 1, 6, 5\)"),
        ((images(2),), {"scale": torch.ones(3, 1)}, ValueError, "batch sizes, 2 in 'images' and 3 in 'scale'"),
        ((images(2).to("meta"),), {"scale": torch.ones(2, 1)}, ValueError, r"'images' is .* on meta; .*\) on cpu"),
        ((2,), {"scale": torch.ones(2, 1)}, ValueError, "'images' is 2; the package takes"),
    ],
)
def test_inputs_that_do_not_fit_a_package_are_refused(exported, args, kwargs, error, text):
    with pytest.raises(error, match=text):
        load_exported(exported.path)(*args, **kwargs)


def test_settings_that_a_package_does_not_support_are_named(exported):
    text = "\n".join(exported.warnings)
    assert "without triton.cudagraphs: a package records no CUDA graphs" in text
    assert "pass early: passes at 'pre_grad' change torch function calls" in text
    assert "dynamic=True: dynamic_batch decides which sizes may change" in text
    assert "ZeroDivisionError: by design" in text
    assert "without dynamo={'capture_scalar_outputs': True}: torch.export has its own settings of Dynamo" in text
    assert len(exported.warnings) == 5
    assert set(seen) == {True}  # the pass that a package supports ran


@pytest.mark.parametrize("verify", ["raise", pytest.param("warn", marks=pytest.mark.slow)])
def test_a_package_that_differs_from_eager_raises_or_warns(tmp_path, verify):
    path = tmp_path / "net.pt2"
    path.write_text("an older package")
    arguments = {"mode": {"passes": [WrongForward("infer")]}, "verify": verify}
    text = "the package differs from eager: output 0 has a relative error of "
    if verify == "raise":
        with pytest.raises(ExportError, match=text):
            export(mlp(), (torch.randn(4, 8),), path, **arguments)
        assert path.read_text() == "an older package"
    else:
        with pytest.warns(CompileWarning, match=rf"net\.pt2: {text}"):
            export(mlp(), (torch.randn(4, 8),), path, **arguments)
        assert load_exported(path).format == "aoti"
    assert [file.name for file in tmp_path.iterdir()] == ["net.pt2"]


# ------------------------------------------------------------------------------------------ torch.export


def export_program(module, args, folder, **settings):
    return load_exported(export(module, args, folder / "net.pt2", format="export", **settings))


def test_a_program_equals_eager_and_contains_no_example(tmp_path):
    net = trained()
    run = export_program(net, (images(4), 2), tmp_path)
    assert run.format == "export"
    net.eval()
    for batch in (1, 7):
        x = images(batch)
        outputs = run(x, 2)
        torch.testing.assert_close(outputs, net(x, 2), **CLOSE)
        assert not outputs["logits"].requires_grad
    with pytest.raises(ValueError, match=r"'power' is 3; the package takes .*power=2"):
        run(images(2), 3)
    assert torch.export.load(run.path).example_inputs is None


def compile_in_place(net):
    net.compile(backend="aot_eager")
    return net


@pytest.mark.parametrize("how", [compile_phases, compile_in_place, functools.partial(torch.compile, backend="eager")])
def test_the_original_of_a_compiled_module_is_exported(tmp_path, how):
    net = mlp().eval()
    expected = net(torch.ones(2, 8))
    compiled = how(net)
    with torch.no_grad():
        compiled(torch.ones(2, 8))
    run = export_program(compiled, (torch.randn(4, 8),), tmp_path)
    torch.testing.assert_close(run(torch.ones(2, 8)), expected, **CLOSE)
    if how is compile_phases:
        assert report_of(net).infer.graphs == 1  # still compiled, and the export compiled no graph
        restore(net)


def test_dynamic_batch_false_exports_one_batch_size(tmp_path):
    run = export_program(Calls(fixes_batch), (torch.zeros(4, 1),), tmp_path, dynamic_batch=False)
    torch.testing.assert_close(run(torch.zeros(4, 1)), torch.arange(4.0).reshape(4, 1))
    with pytest.raises(ValueError, match=r"'x' is float32 \(5, 1\) on cpu; the package takes x: float32 \(4, 1\)"):
        run(torch.zeros(5, 1))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (by_value, f"control flow depends on the values of a tensor.*data-dependent.*{__file__}:"),
        (fixes_batch, "every batch size of input 'x'.*dynamic_batch=False"),
        (lambda x: x.reshape(-1, 2, 8), r"input 'x': it assumes .*% 16\) == 0; dynamic_batch=False"),
        (lambda x: dict[str, int]()["no such key"], f"KeyError: 'no such key'.*{__file__}:"),
    ],
    ids=["by_value", "fixes_batch", "takes_pairs", "raises"],
)
def test_a_module_that_cannot_be_exported_is_an_error_with_its_line(tmp_path, capfd, function, text):
    module = Calls(function)
    with pytest.raises(ExportError, match=text) as failed:
        export(module, (torch.randn(4, 8),), tmp_path / "net.pt2")
    if function is by_value:
        assert f":{by_value.__code__.co_firstlineno + 1})" in str(failed.value)
    assert len(str(failed.value)) < 750
    assert list(tmp_path.iterdir()) == []
    assert module.training
    assert "def forward" not in capfd.readouterr().err  # torch prints the unfinished graph


X = (torch.randn(4, 8),)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"module": 3}, TypeError, r"module=3 must be a torch\.nn\.Module"),
        ({"args": X[0]}, TypeError, r"tuple of positional inputs, not Tensor; pass one tensor as \(tensor,\)"),
        ({"args": (torch.tensor(1.0),)}, ValueError, "no batch; set dynamic_batch=False"),
        ({"path": "net.pt"}, ValueError, r"path='net\.pt' must end in '\.pt2'"),
        ({"format": "aot"}, ValueError, "format='aot' is unknown; did you mean 'aoti'"),
        ({"mode": "defualt"}, ValueError, "mode='defualt' is unknown; did you mean 'default'"),
        ({"mode": None}, ValueError, "mode=None compiles nothing"),
        ({"verify": "eager"}, ValueError, "verify='eager' is unknown"),
    ],
)
def test_wrong_arguments_are_refused_by_name(tmp_path, change, error, text):
    arguments = {"module": mlp(), "args": X, "path": tmp_path / "net.pt2", **change}
    with pytest.raises(error, match=text):
        export(**arguments)
    assert list(tmp_path.iterdir()) == []
