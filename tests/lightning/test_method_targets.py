"""Method targets: methods that the user has replaced, and pickles and copies of the module during a run."""

from __future__ import annotations

import pickle
import sys
import types

import pytest
import torch
from torch import nn

from compile_callbacks import InductorCompile
from tests.support.against_eager import assert_same_values
from tests.support.models import FEATURES, Classifier, fit, loader, mlp, trainer
from tests.support.processes import run_in_new_process

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def encode(self, x):
        return self.net(x)

    def forward(self, x):
        return self.net(x)


def as_closure(module, method):
    original = getattr(module, method)
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


def as_method(module, method):
    return types.MethodType(lambda self, x: 2 * self.net(x), module)


class Patched(Classifier):
    """Replaces a method of its net, before the run or at one batch."""

    def __init__(self, method, patch, at_batch=None):
        super().__init__(Encoder())
        self.method, self.patch, self.at_batch = method, patch, at_batch
        if at_batch is None:
            self.replace_method()

    def replace_method(self):
        self.patched = self.patch(self.net, self.method)
        setattr(self.net, self.method, self.patched)

    def training_step(self, batch, batch_idx):
        if batch_idx == self.at_batch:
            self.replace_method()
        return super().training_step(batch, batch_idx)

    def logits(self, x):
        return self.net(x) if self.method == "forward" else self.net.encode(x)


@pytest.mark.parametrize(
    ("method", "patch", "at_batch"),
    [
        ("forward", as_closure, None),
        ("encode", as_method, None),
        ("encode", as_closure, 3),
    ],
)
def test_a_replaced_method_runs_as_in_eager_and_stays(method, patch, at_batch):
    arguments = {"make": lambda: Patched(method, patch, at_batch), "validation": None}
    callback = InductorCompile(targets=f"net.{method}", baseline_steps=0, on_error="raise")
    compiled, eager = fit(callback, **arguments), fit(**arguments)
    assert vars(compiled.net)[method] is compiled.patched
    assert_same_values(compiled, eager)
    torch.testing.assert_close(getattr(compiled.net, method)(X), getattr(eager.net, method)(X))
    assert callback.report.train.graphs == 1


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

for path in sys.argv[2:]:
    with open(path, "rb") as file:
        model = pickle.load(file)
    with torch.no_grad():
        model.net.linear.weight.zero_()
        model.net.linear.bias.zero_()
    model.load_state_dict(model.state_dict())
    print(model.net.encode(torch.ones(2, 8)).unique().item())
"""


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_pickle_of_a_run_loads_without_this_library(tmp_path, monkeypatch):
    (tmp_path / "user_model.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_model", raising=False)
    import user_model

    def keep(model):
        assert "encode" in vars(model.net)
        model.keep = None
        (tmp_path / model.pickle_name).write_bytes(pickle.dumps(model))

    for name in ("original", "patched"):
        model = user_model.Model()
        model.keep, model.pickle_name = keep, name
        if name == "patched":
            model.net.encode = user_model.patched
        callback = InductorCompile(targets=["net.encode", "net.linear"], baseline_steps=0)
        trainer(callback, limit_val_batches=0).fit(model, loader(4))
    assert run_in_new_process(LOAD, tmp_path, tmp_path / "original", tmp_path / "patched").split() == ["0.0", "1.0"]
