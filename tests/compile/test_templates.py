"""Templates: their options, and their fallbacks on CPUs and GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile, templates
from tests.cases import zoo
from tests.cases.case import Case, check, net
from tests.support.models import Classifier, fit, loader, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

NAMES = ["triton", "cpp_wrapper", "cutlass", "aten", "cudagraphs", "max_autotune", "freezing", "tma"]
NEED_A_GPU = ["triton", "cutlass", "tma"]
SAYS = {
    **{name: rf"train_mode: (template '{name}' needs .*) \[.*\ninfer_mode: \1" for name in NEED_A_GPU},
    **dict.fromkeys(("cudagraphs", "max_autotune"), "train_mode=.* CUDA graphs.*\ninfer_mode=.* CUDA graphs"),
    "freezing": "train_mode's option 'freezing' has no effect",
}
"""The warnings on a CPU, one on each line."""


@pytest.mark.all_versions
def test_the_installed_torch_knows_the_options_of_the_eight_templates():
    assert templates.names() == NAMES
    for name in NAMES:
        assert templates.get(name).description
        assert set(templates.get(name).options) <= set(torch._inductor.list_options())


def fallbacks(phase):
    return [event["reason"] for event in phase.diagnostics.events if event["kind"] == "template"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.codegen] * (name in ("cpp_wrapper", "max_autotune"))) for name in NAMES],
)
def test_a_template_runs_on_a_cpu_or_names_its_fallback(name):
    settings, expect = {"train_mode": name, "infer_mode": name, "targets": ["net"]}, {"train.mode": name}
    # Weights are frozen again for `predict`, after training changed them.
    expect |= {"infer.mode": name, "infer.graphs": 1 + (name == "freezing")}
    says = SAYS.get(name, "")
    codes = ("CC204",) * says.count("_mode")
    report = check(Case(name=name, callback=settings, expect=expect, codes=codes, says=says)).report
    for phase in (report.train, report.infer):
        reasons = fallbacks(phase)
        assert len(reasons) == (name in NEED_A_GPU)
        assert all(reason.startswith(f"template {name!r} needs ") for reason in reasons)
        assert all("falls back to max-autotune-no-cudagraphs" in reason for reason in reasons)


def one_dimensional():  # a convolution that Triton has no choice for
    return Classifier(nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(6, 3)))


@pytest.mark.gpu
@pytest.mark.timeout(600)  # Triton's choices for the convolutions and their gradients
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [one_dimensional, net(zoo.convolutional), net(zoo.transformer)])
def test_a_template_runs_on_a_gpu_or_names_its_fallback(make, name, recwarn):
    train_mode = None if name == "freezing" else name
    callback = InductorCompile(train_mode, name, targets=["net"], baseline_steps=0, verify="raise")
    data = {"train": loader(3, batch_size=16), "validation": loader(1, batch_size=16)}
    # Triton measures two configs for each product and convolution, because the test is about the measuring.
    with torch._inductor.config.patch("test_configs.max_mm_configs", 2):
        module = fit(callback, make=make, accelerator="cuda", num_sanity_val_steps=0, **data)
        trainer(callback, accelerator="cuda").validate(module, data["validation"], verbose=False)
    assert torch.tensor(module.losses).isfinite().all()
    # Inference has a graph for `no_grad`, in fit, and one batch of `validate` is not enough for another one for
    # `inference_mode`, unless it can freeze the weights.
    for phase, graphs in ((callback.report.infer, 1 + (name == "freezing")), (callback.report.train, 1)):
        if phase.mode != "eager":
            assert phase.verified == f"equal {graphs}"
            assert (phase.fallbacks, phase.graphs > 0) == (0, True)
    reasons = set(fallbacks(callback.report.infer))
    assert bool(reasons) == (not templates.get(name).works_on(torch.device("cuda")))
    warned = "".join(str(warning.message) for warning in recwarn if issubclass(warning.category, CompileWarning))
    assert all(reason in warned for reason in reasons)
