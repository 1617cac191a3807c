"""Method targets: what the module itself has in the method's place, and pickles of the module in mid-run."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from torch import nn

from compile_callbacks import InductorCompile, compile_phases, report_of, restore
from tests.support.models import CLASSES, FEATURES, Classifier, loader, mlp, seeded, trainer
from tests.support.processes import run_in_new_process

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def encode(self, x):
        return self.net(x)

    def forward(self, x):
        return self.net(x)


def doubled(module: nn.Module, method: str):
    """A function that takes the place of a method, as a closure."""
    original = getattr(module, method)

    def patched(*args, **kwargs):
        return 2 * original(*args, **kwargs)

    return patched


def as_method(module: nn.Module, method: str):
    def patched(self, x):
        return 2 * self.net(x)

    return types.MethodType(patched, module)


class PatchesItsNet(Classifier):
    """Sets a method of the instance; the step calls it."""

    def __init__(self, method: str, patch) -> None:
        super().__init__(Encoder())
        self.method = method
        setattr(self.net, method, patch(self.net, method))

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0]) if self.method == "forward" else self.net.encode(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize("method", ["forward", "encode"])
@pytest.mark.parametrize("patch", [doubled, as_method])
def test_a_patched_method_is_what_is_compiled(method, patch):
    def run(*callbacks):
        module = seeded(lambda: PatchesItsNet(method, patch))
        before = vars(module.net)[method]
        trainer(*callbacks, limit_val_batches=0).fit(module, loader())
        assert vars(module.net)[method] is before
        return module

    callback = InductorCompile(targets=f"net.{method}", baseline_steps=0, on_error="raise")
    compiled, eager = run(callback), run()
    torch.testing.assert_close(torch.tensor(compiled.losses), torch.tensor(eager.losses))
    assert callback.report.train.graphs == 1


def test_a_method_of_the_instance_alone_is_a_target():
    module = mlp()
    module.encode = lambda x: module(x) * 2
    expected = module.encode(X)
    compile_phases(module, targets="encode")
    torch.testing.assert_close(module.encode(X), expected)
    assert report_of(module).train.graphs == 1
    restore(module)


def test_repeated_blocks_of_which_one_is_patched_compute_what_they_compute_eagerly():
    def block():
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU())

    module = nn.Sequential(block(), block(), block())
    module[1].forward = doubled(module[1], "forward")
    expected = module(X)
    compile_phases(module, targets="repeated")
    torch.testing.assert_close(module(X), expected)
    restore(module)


class PatchesInMidRun(PatchesItsNet):
    def __init__(self) -> None:
        super().__init__("encode", lambda module, method: None)
        del self.net.encode

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.net.encode = self.patched = doubled(self.net, "encode")
        return super().training_step(batch, batch_idx)


def test_a_method_that_the_user_sets_in_mid_run_stays():
    def run(*callbacks):
        module = seeded(PatchesInMidRun)
        trainer(*callbacks, limit_val_batches=0).fit(module, loader())
        assert module.net.encode is module.patched
        return module

    callback = InductorCompile(targets="net.encode", baseline_steps=0)
    compiled, eager = run(callback), run()
    torch.testing.assert_close(torch.tensor(compiled.losses), torch.tensor(eager.losses))
    graphs = callback.report.train.graphs
    torch.testing.assert_close(compiled.net.encode(X), eager.net.encode(X))
    assert callback.report.train.graphs == graphs == 1


# ------------------------------------------------------------------------------------------ pickles

USER_MODULE = """
import lightning.pytorch as pl
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def encode(self, x):
        return self.linear(x)

    def forward(self, x):
        return self.linear(x)

def patched(x):
    return x[:, :3]

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.pickled = None
        self.keep = None

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.keep(self)
        return nn.functional.cross_entropy(self.net.encode(batch[0]) + self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return None
"""
LOAD = """
import pickle
import sys

sys.modules["compile_callbacks"] = None  # importing it fails
sys.path.insert(0, sys.argv[1])
import torch

with open(sys.argv[2], "rb") as file:
    model = pickle.load(file)
with torch.no_grad():
    model.net.linear.weight.zero_()
    model.net.linear.bias.zero_()
model.load_state_dict(model.state_dict())
print(model.net.encode(torch.ones(2, 8)).tolist() == [[float(sys.argv[3])] * 3] * 2)
"""


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize(("patches", "value"), [(False, 0), (True, 1)])
def test_a_pickle_of_mid_run_loads_without_this_library(patches, value, tmp_path, monkeypatch):
    (tmp_path / "user_model.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "user_model", raising=False)
    import user_model

    def keep(model):
        assert "encode" in vars(model.net)
        model.keep = None
        (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))

    model = user_model.Model()
    model.keep = keep
    if patches:
        model.net.encode = user_model.patched
    trainer(InductorCompile(targets=["net.encode", "net.linear"], baseline_steps=0), limit_val_batches=0).fit(
        model, loader()
    )
    printed = run_in_new_process(LOAD, tmp_path, tmp_path / "model.pickle", value)
    assert printed.split() == ["True"]


def test_a_copy_of_mid_run_calls_its_own_method():
    module = Encoder()
    compile_phases(module, targets="encode")
    module.encode(X)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    assert twin.encode(X).tolist() == torch.zeros(4, CLASSES).tolist()
    restore(module)
