"""Modules that the user compiled: uncompiled phases and other targets run them as before."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch

from compile_callbacks import InductorCompile
from tests.cases.zoo import PlainStep, TwoParts
from tests.support.models import FEATURES, Wrapper, fit, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "captured_graph")]

X = torch.ones(2, FEATURES)


@pytest.fixture
def backend():
    """A backend that counts the calls of its graphs, by grad mode."""

    def compile_graph(graph, inputs):
        count = lambda: compile_graph.calls.update(["train" if torch.is_grad_enabled() else "infer"])  # noqa: E731
        return lambda *args: (count(), graph.forward(*args))[1]

    compile_graph.calls = Counter()
    return compile_graph


def compile_child(module, name, how, backend):
    if how == "in place":
        getattr(module, name).compile(backend=backend)
    else:
        setattr(module, name, torch.compile(getattr(module, name), backend=backend))


@pytest.mark.parametrize(
    ("how", "mode"), [("in place", None), ("wrapped", "eager"), ("in place", "default"), ("module", "default")]
)
def test_an_uncompiled_phase_runs_the_users_compiled_module(how, mode, caplog, backend):
    plain, module = fit(make=PlainStep, train=6), seeded(PlainStep)
    if how == "module":
        module = torch.compile(module, backend=backend)
    else:
        compile_child(module, "net", how, backend)
    callback = InductorCompile(mode, "default", baseline_steps=0)
    with caplog.at_level(logging.INFO):
        trainer(callback, num_sanity_val_steps=0).fit(module, loader(6), loader(3))
    train, infer, compiles = callback.report.train, callback.report.infer, mode == "default"
    assert (train.mode, infer.mode, train.graphs, infer.graphs) == (mode or "eager", "default", int(compiles), 1)
    assert backend.calls == ({} if compiles else {"train": 6})
    assert caplog.text.count("replaces your torch.compile of") == (how != "in place")
    torch.testing.assert_close(list(module.parameters()), list(plain.parameters()))
    if how != "module":
        assert list(module.state_dict()) == list(plain.state_dict())
        module.net(X)
        assert backend.calls["train"] == (1 if compiles else 7)  # after the run, it is compiled as before


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_part_that_no_target_names_keeps_its_settings(how, backend):
    module, callback = seeded(TwoParts), InductorCompile(targets=["head"], baseline_steps=0)
    module.backbone = Wrapper(module.backbone)
    compile_child(module, "backbone", how, backend)
    trainer(callback, num_sanity_val_steps=0).fit(module, loader(4), loader(2))
    assert backend.calls == {"train": 4, "infer": 2}
    assert (callback.report.train.targets, callback.report.train.graphs) == (("head",), 1)
