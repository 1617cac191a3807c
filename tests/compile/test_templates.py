"""Templates: what they set, where they fall back, and who wins; settings as data."""

from __future__ import annotations

import json
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


def test_the_eight_templates_are_there_and_their_options_known_to_the_installed_torch():
    assert templates.names() == NAMES
    for name in NAMES:
        template = templates.get(name)
        assert template.description
        assert set(template.options) <= set(torch._inductor.list_options())
        assert bool(template.fallback) == (template.missing(torch.device("cpu")) is not None)


def fit(*callbacks, make=Classifier, **settings):
    module = seeded(make)
    trainer(*callbacks, num_sanity_val_steps=0, **settings).fit(module, loader(3), loader(1))
    return module


@pytest.mark.parametrize("name", NAMES)
def test_a_template_runs_on_a_cpu_or_says_what_it_falls_back_to(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CompileWarning)
        callback = InductorCompile(name, name, targets=["net"], baseline_steps=0)
        compiled = fit(callback)
    assert_same_values(compiled, fit())
    said = [str(w.message) for w in caught if issubclass(w.category, CompileWarning)]
    for phase_name in ("train", "infer"):
        phase = callback.report.phase(phase_name)
        assert (phase.mode, phase.fallbacks, phase.graphs) == (name, 0, 1)
        reasons = [event["reason"] for event in phase.diagnostics.events if event["kind"] == "template"]
        assert len(reasons) == (name in NEED_A_GPU)
        for reason in reasons:
            assert reason.startswith(f"template {name!r} needs ")
            assert "falls back to max-autotune-no-cudagraphs" in reason
            assert sum(f"{phase_name}_mode: {reason}" in message for message in said) == 1
    if name in WARNED_OF:
        assert any(WARNED_OF[name] in message for message in said)
    if name not in {*WARNED_OF, *NEED_A_GPU}:
        assert not [message for message in said if "slower than eager" not in message]


class OneDimensional(Classifier):
    """A convolution that Triton has no choice for."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(6, 3)))


class Images(Classifier):
    """A network on images of 3 x 64 x 64, made of the batch by a linear layer."""

    def __init__(self, net):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 3 * 64 * 64), nn.Unflatten(1, (3, 64, 64)), net))


def resnet18():
    return Images(torchvision.models.resnet18(num_classes=CLASSES))


def transformer():
    return Images(
        torchvision.models.VisionTransformer(
            image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=CLASSES
        )
    )


@pytest.mark.gpu
@pytest.mark.timeout(600)  # Triton's choices for the convolutions of a ResNet-18 and their gradients
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [OneDimensional, resnet18, transformer])
def test_a_template_runs_on_a_gpu_or_says_what_it_falls_back_to(make, name):
    train_mode = None if name == "freezing" else name
    callback = InductorCompile(train_mode, name, targets=["net"], baseline_steps=0, verify="raise")
    module = seeded(make)
    # Two of Triton's configurations for each product and convolution: that they are measured is what is looked at.
    few_choices = torch._inductor.config.patch("test_configs.max_mm_configs", 2)
    with few_choices, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CompileWarning)
        settings = {"accelerator": "cuda", "num_sanity_val_steps": 0}
        trainer(callback, **settings).fit(module, loader(3, batch_size=16), loader(1, batch_size=16))
        trainer(callback, **settings).validate(module, loader(1, batch_size=16), verbose=False)
    assert torch.tensor(module.losses).isfinite().all()
    report = callback.report
    for phase in (report.infer, report.train):
        if phase.mode not in ("eager", "user"):
            # In training gradients are compared too; where CUDA graphs forbid that, the report says so.
            graphed = phase is report.train and templates.get(name).resolved_options().get("triton.cudagraphs")
            assert phase.verified == ("outputs only 1" if graphed else "equal 1")
            assert phase.fallbacks == 0
            assert phase.graphs > 0
    reasons = {event["reason"] for event in report.infer.diagnostics.events if event["kind"] == "template"}
    assert bool(reasons) == (templates.get(name).missing(torch.device("cuda")) is not None)
    assert all(any(reason in str(warning.message) for warning in caught) for reason in reasons)


# ------------------------------------------------------------------------------------------ who wins


def test_options_override_freezing_which_overrides_the_template():
    assert InductorConfig(template="freezing", freezing=False).resolved_options()["freezing"] is False
    assert InductorConfig(freezing=False, options={"freezing": True}).resolved_options()["freezing"] is True
    own = InductorConfig(template="aten", options={"max_autotune_gemm_backends": "ATEN,TRITON"})
    assert own.resolved_options()["max_autotune_gemm_backends"] == "ATEN,TRITON"
    assert own.resolved_options()["max_autotune_conv_backends"] == "ATEN"


def test_an_option_that_torch_lacks_is_left_out_and_named():
    template = templates.Template(name="mine", description="", options={"epilogue_fussion": True, "freezing": True})
    assert template.resolved_options() == {"freezing": True}
    assert "needs Inductor's epilogue_fussion=True, which torch" in template.falls_back(torch.device("cpu"))
    assert "falls back to its other options" in template.falls_back(torch.device("cpu"))


def test_a_pass_of_the_options_and_passes_at_its_hook_point_are_refused():
    config = InductorConfig(options={"post-grad-custom-post-pass": changes_nothing})
    refused = r"options\['post_grad_custom_post_pass'\] and passes=.* use the same hook point"
    with pytest.raises(ValueError, match=refused):
        InductorConfig(options=config.options, passes=[changes_nothing])
    with pytest.raises(ValueError, match=refused):
        InductorCompile(config, passes=[changes_nothing])
    with pytest.raises(ValueError, match=refused):
        InductorCompile(None, Tune([config, "default"]), passes=[changes_nothing])
    with pytest.raises(ValueError, match=refused):
        compile_phases(nn.Linear(2, 2), infer_mode=config, passes=[changes_nothing])


# ------------------------------------------------------------------------------------------ settings as data

CONFIGS = [
    InductorConfig(),
    InductorConfig(mode="reduce-overhead", dynamic=False, fullgraph=True),
    InductorConfig(template="aten", freezing=True, options={"epilogue_fusion": False}),
    InductorConfig(passes=[changes_nothing], fold_weights=False, fold_limit_mib=3),
]


PASSES = [f"tests.compile.test_templates:{name}" for name in ("changes_nothing", "no_such")]


@pytest.mark.parametrize("config", CONFIGS, ids=range(4))
def test_settings_come_back_from_data(config):
    assert InductorConfig.from_dict(json.loads(json.dumps(config.to_dict())), allow_passes=PASSES) == config


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("[1]", TypeError, "must be a mapping"),
        ('{"mod": "default"}', ValueError, "field='mod'.*'mode'"),
        ('{"passes": "tests.compile.test_templates:changes_nothing"}', TypeError, "passes="),
        ('{"passes": ["changes_nothing"]}', ValueError, "'module:name'"),
        ('{"passes": ["tests.compile.test_templates:no_such"]}', ValueError, "cannot be imported"),
        ('{"passes": ["no_such_module:it"]}', ValueError, "cannot be imported"),
        ('{"passes": ["json:dumps"]}', TypeError, "passes holds"),
    ],
)
def test_wrong_data_is_refused_by_name(text, error, said):
    allow_passes = [*PASSES, "changes_nothing", "no_such_module:it", "json:dumps"]
    with pytest.raises(error, match=said):
        InductorConfig.from_dict(json.loads(text), allow_passes=allow_passes)


def test_a_pass_that_is_not_a_global_cannot_be_saved():
    @graph_pass
    def local(graph, is_inference):
        pass

    with pytest.raises(ValueError, match="cannot be saved"):
        InductorConfig(passes=[local]).to_dict()
