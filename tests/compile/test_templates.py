"""Templates: their options, and their fallbacks. Settings that are saved as data."""

from __future__ import annotations

import warnings

import pytest
import torch
import torchvision
from torch import nn

from compile_callbacks import (
    CompileWarning,
    InductorCompile,
    InductorConfig,
    Tune,
    compile_phases,
    graph_pass,
    templates,
)
from tests.support.against_eager import assert_same_values
from tests.support.models import CLASSES, FEATURES, Classifier, loader, seeded, trainer

pytestmark = pytest.mark.all_versions

NAMES = ["triton", "cpp_wrapper", "cutlass", "aten", "cudagraphs", "max_autotune", "freezing", "tma"]
NEED_A_GPU = {"triton", "cutlass", "tma"}
WARNED_OF = {"cudagraphs": "CUDA graphs", "max_autotune": "CUDA graphs", "freezing": "'freezing' has no effect"}


@graph_pass
def changes_nothing(graph, is_inference):
    pass


def test_the_installed_torch_knows_the_options_of_the_eight_templates():
    assert templates.names() == NAMES
    for name in NAMES:
        template = templates.get(name)
        assert template.description
        assert set(template.options) <= set(torch._inductor.list_options())


def fit(*callbacks, make=Classifier, batch_size=4, **settings):
    module = seeded(make)
    loaders = loader(3, batch_size=batch_size), loader(1, batch_size=batch_size)
    trainer(*callbacks, num_sanity_val_steps=0, **settings).fit(module, *loaders)
    return module


def template_reasons(phase):
    return [event["reason"] for event in phase.diagnostics.events if event["kind"] == "template"]


@pytest.mark.parametrize("name", NAMES)
def test_a_template_runs_on_a_cpu_or_names_its_fallback(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CompileWarning)
        callback = InductorCompile(name, name, targets=["net"], baseline_steps=0)
        compiled = fit(callback)
    assert_same_values(compiled, fit())
    messages = [str(w.message) for w in caught if issubclass(w.category, CompileWarning)]
    for phase_name in ("train", "infer"):
        phase = callback.report.phase(phase_name)
        assert (phase.mode, phase.fallbacks, phase.graphs) == (name, 0, 1)
        reasons = template_reasons(phase)
        assert len(reasons) == (name in NEED_A_GPU)
        for reason in reasons:
            assert reason.startswith(f"template {name!r} needs ")
            assert "falls back to max-autotune-no-cudagraphs" in reason
            assert sum(f"{phase_name}_mode: {reason}" in message for message in messages) == 1
    if name in WARNED_OF:
        assert any(WARNED_OF[name] in message for message in messages)
    elif name not in NEED_A_GPU:
        assert not [message for message in messages if "slower than eager" not in message]


def on_images(net):
    """A network on images of 3 x 64 x 64, which a linear layer makes of the batch."""
    return Classifier(nn.Sequential(nn.Linear(FEATURES, 3 * 64 * 64), nn.Unflatten(1, (3, 64, 64)), net))


def one_dimensional():  # a convolution that Triton has no choice for
    return Classifier(nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(6, 3)))


def resnet18():
    return on_images(torchvision.models.resnet18(num_classes=CLASSES))


def transformer():
    sizes = {"image_size": 64, "patch_size": 16, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    return on_images(torchvision.models.VisionTransformer(**sizes, num_classes=CLASSES))


@pytest.mark.gpu
@pytest.mark.timeout(600)  # Triton's choices for the convolutions of a ResNet-18 and their gradients
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [one_dimensional, resnet18, transformer])
def test_a_template_runs_on_a_gpu_or_names_its_fallback(make, name):
    callback = InductorCompile(
        None if name == "freezing" else name, name, targets=["net"], baseline_steps=0, verify="raise"
    )
    # Triton measures two configs for each product and convolution, because the test is about the measuring.
    few_choices = torch._inductor.config.patch("test_configs.max_mm_configs", 2)
    with few_choices, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CompileWarning)
        module = fit(callback, make=make, batch_size=16, accelerator="cuda")
        trainer(callback, accelerator="cuda").validate(module, loader(1, batch_size=16), verbose=False)
    assert torch.tensor(module.losses).isfinite().all()
    report = callback.report
    for phase in (report.infer, report.train):
        if phase.mode != "eager":
            # Gradients are not compared if the template uses CUDA graphs. Inference has a graph for `no_grad`, in fit,
            # and one batch of `validate` is not enough for another one for `inference_mode`.
            graphed = templates.get(name).resolved_options().get("triton.cudagraphs")
            of_training = "outputs only 1" if graphed else "equal 1"
            assert phase.verified == (of_training if phase is report.train else "equal 1")
            assert phase.fallbacks == 0
            assert phase.graphs > 0
    reasons = set(template_reasons(report.infer))
    assert bool(reasons) == (templates.get(name).falls_back(torch.device("cuda")) is not None)
    assert all(any(reason in str(warning.message) for warning in caught) for reason in reasons)


@pytest.mark.parametrize(
    "use",
    [
        lambda config: InductorConfig(options=config.options, passes=[changes_nothing]),
        lambda config: InductorCompile(config, passes=[changes_nothing]),
        lambda config: InductorCompile(None, Tune([config, "default"]), passes=[changes_nothing]),
        lambda config: compile_phases(nn.Linear(2, 2), infer_mode=config, passes=[changes_nothing]),
    ],
    ids=["InductorConfig", "InductorCompile", "Tune", "compile_phases"],
)
def test_a_pass_of_the_options_and_passes_at_its_hook_point_are_refused(use):
    config = InductorConfig(options={"post-grad-custom-post-pass": changes_nothing})
    with pytest.raises(ValueError, match=r"options\['post_grad_custom_post_pass'\] and passes=.* use the same hook"):
        use(config)
