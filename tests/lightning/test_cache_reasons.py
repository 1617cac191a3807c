"""The report names why torch did not load a graph from its cache."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile
from compile_callbacks.report.table import sections
from tests.support.models import CLASSES, FEATURES, Classifier, Wrapper, fit, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


@torch.compiler.allow_in_graph
def doubled(x):
    """A function that Dynamo puts into the graph as it is, so that torch cannot hash it."""
    return x * 2


class CallsFunction(Wrapper):
    def forward(self, x):
        return doubled(self.net(x))


class Branches(Wrapper):
    """Computes the same in both branches, but Dynamo guards the size."""

    def forward(self, x):
        if len(x) <= 8:
            pass
        return self.net(x)


def reasons(callback: InductorCompile) -> list[str]:
    """The reasons in the table of the report."""
    (rows,) = [s.rows for s in sections(callback.report) if s.title == "Not loaded from torch's cache"] or [[]]
    return [row[-1] for row in rows]


def fit_twice(net, folder, *sizes):
    """The callbacks of two runs that share a cache, the second in a compiler without graphs."""
    callbacks = [InductorCompile({"dynamic": True}, None, baseline_steps=0, cache_dir=folder) for _ in sizes]
    for callback, size in zip(callbacks, sizes, strict=True):
        torch._dynamo.reset()
        fit(callback, make=lambda: Classifier(net()), train=loader(4, size), validation=None)
    return callbacks


def test_a_graph_that_torch_cannot_hash_is_traced_again_at_a_warm_start_and_the_report_says_why(tmp_path):
    _, warm = fit_twice(CallsFunction, tmp_path / "cache", 6, 6)
    (reason,) = reasons(warm)
    assert "torch bypasses its cache: Unsupported call_function target <function doubled" in reason
    _, warm = fit_twice(Wrapper, tmp_path / "cache", 6, 6)
    assert (reasons(warm), warm.report.train.cache_hits) == ([], 1)


def test_a_cached_graph_whose_guards_fail_is_a_miss_with_this_reason(tmp_path):
    cold, warm = fit_twice(Branches, tmp_path / "cache", 6, 12)
    assert (reasons(cold), reasons(warm)) == ([], ["the guards of the cached graph fail"])
    assert warm.report.train.diagnostics.cache_misses > 0


def test_frozen_graphs_are_not_cached_and_the_warning_and_the_report_say_why(tmp_path):
    callback = InductorCompile(None, {"freezing": True}, baseline_steps=0, cache_dir=tmp_path / "cache")
    with pytest.warns(CompileWarning, match=r"torch did not use its cache \(torch bypasses its cache: .*freezing"):
        trainer(callback).validate(seeded(lambda: Classifier(nn.Linear(FEATURES, CLASSES))), loader(4), verbose=False)
    assert any("freezing" in reason for reason in reasons(callback))
