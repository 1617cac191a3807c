"""What the user compiled: left alone in a phase whose mode is None, replaced in any other phase."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compile_callbacks import InductorCompile, compile_phases
from tests.support.models import FEATURES, Classifier, loader, mlp, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go")]


class Backend:
    """A backend that counts the graphs and their calls, by grad mode."""

    def __init__(self) -> None:
        self.calls = {"train": 0, "infer": 0}

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls["train" if torch.is_grad_enabled() else "infer"] += 1
            return graph.forward(*args)

        return call


class Net(nn.Module):
    """A network with its own forward: torch 2.11 compiles nothing of a module of torch.nn that is compiled itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def compiled_by_user(how: str, backend: Backend) -> Classifier:
    module = seeded(lambda: Classifier(Net()))
    if how == "in place":
        module.net.compile(backend=backend)
    else:
        module.net = torch.compile(module.net, backend=backend)
    return module


def modes(callback: InductorCompile) -> tuple[str, str]:
    return callback.report.train.mode, callback.report.infer.mode


@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize(
    ("mode", "expected", "calls"),
    [
        (None, ("user", "default"), {"train": 6, "infer": 0}),
        ("eager", ("eager", "default"), {"train": 0, "infer": 0}),
        ("default", ("default", "default"), {"train": 0, "infer": 0}),
    ],
)
def test_a_phase_with_mode_none_runs_what_the_user_compiled(how, mode, expected, calls):
    backend = Backend()
    module, plain = compiled_by_user(how, backend), seeded(lambda: Classifier(Net()))
    callback = InductorCompile(mode, "default", baseline_steps=0)
    assert callback.report.train.mode == expected[0]
    trainer(callback, num_sanity_val_steps=0).fit(module, loader(6), loader(3))
    trainer(num_sanity_val_steps=0).fit(plain, loader(6), loader(3))
    assert modes(callback) == expected
    assert backend.calls == calls
    assert callback.report.infer.graphs == 1
    assert callback.report.train.graphs == (mode == "default")
    torch.testing.assert_close(module.losses, plain.losses)
    assert list(module.state_dict()) == list(plain.state_dict())
    module.net(torch.ones(2, FEATURES))
    assert backend.calls["train"] == calls["train"] + 1  # after the run, the module is compiled as before it


def test_two_modes_none_change_nothing():
    backend = Backend()
    module = compiled_by_user("wrapped", backend)
    wrapper = module.net
    callback = InductorCompile(None, None)
    trainer(callback, num_sanity_val_steps=0).fit(module, loader(4), loader(2))
    assert modes(callback) == ("user", "user")
    assert module.net is wrapper
    assert backend.calls == {"train": 4, "infer": 2}


def test_lightnings_compiled_step_stays_in_a_phase_with_mode_none():
    class Plain(Classifier):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    backend = Backend()
    module = torch.compile(Plain(), backend=backend)
    callback = InductorCompile(None, "default", baseline_steps=0)
    trainer(callback, num_sanity_val_steps=0).fit(module, loader(4), loader(2))
    assert modes(callback) == ("user", "default")
    assert backend.calls["train"] > 0
    assert backend.calls["infer"] == 0


def test_compile_phases_leaves_a_phase_with_mode_none_alone():
    backend = Backend()
    net = Net()
    net.compile(backend=backend)
    compile_phases(net, train_mode=None)
    net(torch.ones(2, FEATURES))
    with torch.no_grad():
        net(torch.ones(2, FEATURES))
    assert backend.calls == {"train": 1, "infer": 0}
    assert type(net) is Net
