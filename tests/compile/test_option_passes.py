"""Graph passes that are given as Inductor options."""

from __future__ import annotations

import pytest
import torch

from compile_callbacks import InductorCompile, InductorConfig, graph_pass
from tests.support.models import Classifier, loader, trainer

pytestmark = pytest.mark.all_versions

seen: list[bool] = []


@graph_pass
def see(graph: torch.fx.Graph, is_inference: bool) -> None:
    seen.append(is_inference)


see.uuid = lambda: None  # a graph from torch's cache would not run the pass


@pytest.mark.parametrize("separator", [":", "."])
def test_an_option_pass_by_import_path_is_resolved_and_runs(separator):
    config = InductorConfig(options={"post_grad_custom_post_pass": f"{__name__}{separator}see"})
    assert config.options["post_grad_custom_post_pass"] is see
    seen.clear()
    callback = InductorCompile(None, config, targets="net", baseline_steps=0, on_error="raise")
    trainer(callback).predict(Classifier(), loader(2))
    assert callback.report.infer.graphs == 1
    assert seen == [True]


@pytest.mark.parametrize("reference", ["module_that_is_missing:see", f"{__name__}:missing", "see"])
def test_an_option_pass_that_cannot_be_imported_is_refused(reference):
    with pytest.raises(ValueError, match=rf"options\['post_grad_custom_post_pass'\].*'{reference}'"):
        InductorConfig(options={"post_grad_custom_post_pass": reference})


def test_an_option_pass_of_another_type_is_refused():
    with pytest.raises(TypeError, match="holds 3, which is no graph pass"):
        InductorConfig(options={"post_grad_custom_post_pass": 3})
    with pytest.raises(TypeError, match="which is no graph pass"):
        InductorConfig(options={"post_grad_custom_post_pass": f"{__name__}:seen"})
