"""Templates: what they set, where they fall back, and who wins; settings as data."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torchvision
from against_eager import assert_same_values
from models import CLASSES, FEATURES, Classifier, loader, seeded, trainer
from processes import run_in_new_process
from torch import nn

from compile_callbacks import (
    CompileWarning,
    InductorCompile,
    InductorConfig,
    Tune,
    _torch,
    compile_phases,
    graph_pass,
    templates,
)

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


@pytest.fixture
def another_torch(monkeypatch):
    """Have the library's own templates meet a torch whose Inductor has other options."""

    def meet(*, lacks):
        names = torch._inductor.list_options()
        monkeypatch.setattr(_torch, "option_names", lambda: {*names} - lacks)
        templates._own.cache_clear()

    yield meet
    monkeypatch.undo()
    templates._own.cache_clear()


def test_an_option_that_torch_dropped_is_left_out_and_told_by_name(another_torch):
    another_torch(lacks={"freezing", "max_autotune_conv_backends"})
    assert templates.names() == NAMES
    cpu = torch.device("cpu")
    assert dict(templates.get("aten").options) == {"max_autotune_gemm_backends": "ATEN"}
    said = templates.get("aten").falls_back(cpu)
    assert "needs Inductor's max_autotune_conv_backends='ATEN', which torch" in said
    assert said.endswith("does not take; it falls back to its other options")
    assert templates.get("freezing").falls_back(cpu).endswith("it falls back to mode 'default' as it is")
    assert templates.get("cpp_wrapper").falls_back(cpu) is None
    with pytest.raises(ValueError, match="options key='freezing' is unknown"):
        templates.Template(name="mine", description="", options={"freezing": True})


def test_an_option_that_torch_renamed_goes_by_the_name_that_it_knows(another_torch, monkeypatch):
    monkeypatch.setattr(templates, "_FORMER_NAMES", {"cpp_wrapper": ("freezing",)})
    another_torch(lacks={"cpp_wrapper"})
    assert dict(templates.get("cpp_wrapper").options) == {"freezing": True}
    assert templates.get("cpp_wrapper").falls_back(torch.device("cpu")) is None


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
        reasons = [event["reason"] for event in phase.events if event["kind"] == "template"]
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
        if phase.mode != "eager":
            # In training gradients are compared too; where CUDA graphs forbid that, the report says left out.
            graphed = phase is report.train and templates.get(name).resolved_options().get("triton.cudagraphs")
            assert phase.verified == ("left out" if graphed else "equal")
            assert phase.fallbacks == 0
            assert phase.graphs > 0
    reasons = {event["reason"] for event in report.infer.events if event["kind"] == "template"}
    assert bool(reasons) == (templates.get(name).missing(torch.device("cuda")) is not None)
    assert all(any(reason in str(warning.message) for warning in caught) for reason in reasons)


# ------------------------------------------------------------------------------------------ who wins


def test_options_win_over_freezing_and_that_over_the_template_and_that_over_the_mode():
    config = InductorConfig(mode="reduce-overhead", template="freezing")
    assert config.resolved_options()["triton.cudagraphs"] is True
    assert config.resolved_options()["freezing"] is True
    assert InductorConfig(template="freezing", freezing=False).resolved_options()["freezing"] is False
    assert InductorConfig(freezing=False, options={"freezing": True}).resolved_options()["freezing"] is True
    own = InductorConfig(template="aten", options={"max_autotune_gemm_backends": "ATEN,TRITON"})
    assert own.resolved_options()["max_autotune_gemm_backends"] == "ATEN,TRITON"
    assert own.resolved_options()["max_autotune_conv_backends"] == "ATEN"


def test_freezing_is_asked_for_by_flag_option_or_template():
    for config in ({"freezing": True}, {"options": {"freezing": True}}, {"template": "freezing"}):
        assert InductorConfig(**config).freezes
    assert not InductorConfig(template="freezing", freezing=False).freezes


def test_describe_and_key_know_the_template():
    assert InductorConfig(template="aten", freezing=True).describe() == "aten, freezing=True"
    assert InductorConfig(mode="lite", template="aten").describe() == "lite, template=aten"
    keys = {InductorConfig(**c).key() for c in ({}, {"template": "aten"}, {"template": "tma"}, {"freezing": True})}
    assert len(keys) == 4


@pytest.mark.parametrize(("name", "nearest"), [("cutlas", "cutlass"), ("max-autotun", "max-autotune")])
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'"):
        InductorCompile(name)


def test_an_unknown_template_is_refused():
    with pytest.raises(ValueError, match=r"template='cutlas'.*'cutlass'"):
        InductorConfig(template="cutlas")
    with pytest.raises(TypeError, match="template=3"):
        InductorConfig(template=3)
    with pytest.raises(TypeError, match="freezing=1"):
        InductorConfig(freezing=1)


# ------------------------------------------------------------------------------------------ the user's own


def test_users_register_their_own():
    mine = templates.Template(name="mine", description="as I like it", options={"epilogue_fusion": False})
    assert templates.register(mine) is mine
    try:
        assert templates.names()[-1] == "mine"
        assert InductorConfig(template="mine").resolved_options() == {"epilogue_fusion": False}
        before = InductorConfig(template="mine").key()
        with pytest.raises(ValueError, match="'mine' is taken: as I like it"):
            templates.register(mine)
    finally:
        templates.unregister("mine")
    assert "mine" not in templates.names()
    templates.register(templates.Template(name="mine", description="otherwise", mode="max-autotune"))
    try:
        assert InductorConfig(template="mine").key() != before
    finally:
        templates.unregister("mine")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"name": "default"}, ValueError, "name='default'"),
        ({"name": ""}, ValueError, "name=''"),
        ({"name": 3}, TypeError, "name=3"),
        ({"mode": "fast"}, ValueError, "mode='fast'"),
        ({"options": {"epilogue_fussion": True}}, ValueError, "epilogue_fusion"),
        ({"options": {"max_autotune": "yes"}}, TypeError, r"options\['max_autotune'\]='yes' must be of type bool"),
        ({"options": {"post_grad_custom_post_pass": 3}}, TypeError, r"options\['post_grad_custom_post_pass'\]"),
        ({"options": None}, TypeError, "options=None must map"),
    ],
)
def test_templates_that_cannot_be_are_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        templates.Template(**{"name": "mine", "description": "", **arguments})


def test_a_pass_of_a_template_and_passes_at_its_hook_point_are_refused():
    options = {"post-grad-custom-post-pass": changes_nothing}
    templates.register(templates.Template(name="mine", description="with a pass", options=options))
    try:
        refused = "template='mine' with its option 'post_grad_custom_post_pass' and passes=.* use the same hook point"
        with pytest.raises(ValueError, match=refused):
            InductorConfig(template="mine", passes=[changes_nothing])
        with pytest.raises(ValueError, match=refused):
            InductorCompile("mine", passes=[changes_nothing])
        with pytest.raises(ValueError, match=refused):
            InductorCompile(None, Tune(["mine", "default"]), passes=[changes_nothing])
        with pytest.raises(ValueError, match=refused):
            compile_phases(nn.Linear(2, 2), infer_mode="mine", passes=[changes_nothing])
        without = InductorConfig(
            template="mine", options={"post_grad_custom_post_pass": None}, passes=[changes_nothing]
        )
        assert without.resolved_options()["post_grad_custom_post_pass"] is None
    finally:
        templates.unregister("mine")


def test_the_librarys_own_stay():
    with pytest.raises(ValueError, match="own templates"):
        templates.unregister("aten")
    with pytest.raises(ValueError, match="template='mine'"):
        templates.unregister("mine")
    with pytest.raises(TypeError, match="must be a Template"):
        templates.register({"name": "mine"})


# ------------------------------------------------------------------------------------------ settings as data

CONFIGS = [
    InductorConfig(),
    InductorConfig(mode="reduce-overhead", dynamic=False, fullgraph=True),
    InductorConfig(template="aten", freezing=True, options={"epilogue_fusion": False}),
    InductorConfig(passes=[changes_nothing], fold_weights=False, fold_limit_mb=3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(4))
def test_settings_come_back_from_data_and_files(config, tmp_path):
    assert InductorConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    config.to_json(tmp_path / "config.json")
    assert InductorConfig.from_json(tmp_path / "config.json") == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_data_holds_what_differs():
    assert InductorConfig().to_dict() == {}
    assert CONFIGS[3].to_dict() == {
        "passes": ["test_templates:changes_nothing"],
        "fold_weights": False,
        "fold_limit_mb": 3,
    }


@pytest.mark.newest
def test_keys_of_settings_from_a_file_are_equal_in_another_process(tmp_path):
    path = tmp_path / "config.json"
    CONFIGS[2].to_json(path)
    source = f"from compile_callbacks import InductorConfig as C; print(C.from_json({str(path)!r}).key())"
    assert run_in_new_process(source).split()[-1] == CONFIGS[2].key()


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("{", ValueError, "config.json holds no JSON: .*line 1 column 2"),
        ("[1]", TypeError, "must be a mapping"),
        ('{"mod": "default"}', ValueError, "field='mod'.*'mode'"),
        ('{"template": "atn"}', ValueError, "template='atn'.*'aten'"),
        ('{"passes": "test_templates:changes_nothing"}', TypeError, "passes="),
        ('{"passes": ["changes_nothing"]}', ValueError, "'module:name'"),
        ('{"passes": ["test_templates:no_such"]}', ValueError, "cannot be imported"),
        ('{"passes": ["no_such_module:it"]}', ValueError, "cannot be imported"),
        ('{"passes": ["json:dumps"]}', TypeError, "passes holds"),
    ],
)
def test_broken_files_are_refused_by_name(text, error, said, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=said):
        InductorConfig.from_json(tmp_path / "config.json")


def test_what_cannot_be_written_leaves_no_file(tmp_path):
    @graph_pass
    def local(graph, is_inference):
        pass

    with pytest.raises(ValueError, match="cannot be written down"):
        InductorConfig(passes=[local]).to_json(tmp_path / "config.json")
    with pytest.raises(OSError, match="no_such_folder"):
        InductorConfig().to_json(tmp_path / "no_such_folder" / "config.json")
    assert list(tmp_path.iterdir()) == []
