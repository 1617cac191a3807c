"""`InductorConfig`: refused settings, its key, and saving and loading as data that cannot run code."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from torch import nn

from compile_callbacks import GraphPass, InductorBackend, InductorCompile, InductorConfig, Tune, graph_pass

pytestmark = pytest.mark.all_versions


class Scale(GraphPass):
    def __init__(self, factor=2):
        self.factor = factor

    def __call__(self, graph, is_inference):
        pass


@graph_pass
def changes_nothing(graph: torch.fx.Graph, is_inference: bool) -> None:
    pass


@pytest.mark.parametrize(
    ("settings", "error", "texts"),
    [
        ({"mode": "max-autotun"}, ValueError, ["mode='max-autotun'", "did you mean 'max-autotune'", "'default'"]),
        ({"mode": None}, TypeError, ["mode=None", "'default'"]),
        ({"template": "cutlas"}, ValueError, ["template='cutlas'", "did you mean 'cutlass'"]),
        ({"options": {"max_autotun": True}}, ValueError, ["'max_autotun' is unknown", "did you mean 'max_autotune'"]),
        ({"options": {"zzz": True}}, ValueError, ["'zzz' is unknown", "list_options()"]),
        ({"options": {"max_autotune": 1}}, TypeError, ["options['max_autotune']=1", "bool", "int"]),
        ({"options": {"max_fusion_size": "64"}}, TypeError, ["options['max_fusion_size']='64'", "int", "str"]),
        ({"options": {"max-autotune": True, "max_autotune": True}}, ValueError, ["'max_autotune' in two spellings"]),
        ({"options": {"post_grad_custom_post_pass": 3}}, TypeError, ["post_grad_custom_post_pass", "3"]),
        (
            {"mode": "reduce-overhead", "options": {"max_autotune": True}},
            ValueError,
            ["mode='reduce-overhead'", "options={'triton.cudagraphs': True, 'max_autotune': True}"],
        ),
        ({"mode": "lite", "template": "aten"}, ValueError, ["mode='lite'", "template='aten'"]),
        ({"fullgraph": 1}, TypeError, ["fullgraph=1"]),
        ({"dynamic": "yes"}, TypeError, ["dynamic='yes'"]),
        ({"activation_memory_budget": 1.5}, ValueError, ["activation_memory_budget=1.5"]),
        ({"activation_memory_budget": "half"}, TypeError, ["activation_memory_budget='half'"]),
        (
            {"dynamo": {"capture_scalar_output": True}},
            ValueError,
            ["did you mean 'capture_scalar_outputs'"],
        ),
        ({"dynamo": {"allow_rnn": 1}}, TypeError, ["dynamo['allow_rnn']=1", "True or False"]),
        ({"passes": [3]}, TypeError, ["passes", "3"]),
        ({"passes": [Scale]}, TypeError, ["passes", "Scale(...)"]),
        ({"passes": [lambda graph, is_inference: None]}, TypeError, ["passes", "graph_pass"]),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, error, texts):
    with pytest.raises(error) as caught:
        InductorConfig(**settings)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize("mode", list(torch._inductor.list_mode_options()))
def test_every_mode_of_the_installed_torch_is_accepted(mode):
    assert InductorConfig(mode=mode).resolved_options() == torch._inductor.list_mode_options(mode)


def test_a_config_is_immutable():
    options = {"max-autotune": True}
    config = InductorConfig(options=options)
    options["max-autotune"] = "wrong"
    assert config.resolved_options() == {"max_autotune": True}
    assert config.to_dict() == {"options": {"max_autotune": True}}
    with pytest.raises(AttributeError):
        config.mode = "default"
    with pytest.raises(TypeError):
        config.options["max_autotune"] = False


def test_keys_of_different_settings_differ():
    settings = [
        {},
        {"mode": "lite"},
        {"template": "aten"},
        {"dynamic": True},
        {"fullgraph": True},
        {"activation_memory_budget": 0.5},
        {"options": {"max_autotune": True}},
        {"dynamo": {"capture_scalar_outputs": True}},
        {"dynamo": {"allow_rnn": True}},
        {"passes": [Scale(2)]},
        {"passes": [Scale(3)]},
    ]
    keys = [InductorConfig(**each).key() for each in settings]
    assert len(set(keys)) == len(settings)
    assert [InductorConfig(**each).key() for each in settings] == keys


# ------------------------------------------------------------------------------------------ loaded data

REFUSED = {
    "cpp.cxx": "/tmp/planted",
    "cuda.arch": "90 -wrapper /tmp/planted",
    "cuda.cuda_cxx": "/tmp/planted",
    "cuda.cutlass_dir": "/tmp/planted",
    "rocm.rocm_home": "/tmp/planted",
    "global_cache_dir": "/tmp/planted",
    "trace.debug_dir": "/tmp/planted",
    "aot_inductor.output_path": "/tmp/planted",
    "aot_inductor.custom_op_libs": ["/tmp/planted.so"],
    "aot_inductor.metadata": {"a": "b"},
    "post_grad_custom_post_pass": "planted:run",
    "pre-grad-custom-pass": "planted:run",
    "max_autotune_gemm_backends": "ATEN,/tmp/planted",
    "cpp.descriptive_names": "other",
}
ACCEPTED = {
    "max_autotune": True,
    "trace.debug_dir": None,
    "epilogue_fusion": False,
    "max-autotune-gemm-backends": "ATEN,CPP",
    "max_autotune_conv_backends": "ATEN",
    "max_autotune_gemm_search_space": "EXHAUSTIVE",
    "cpp.descriptive_names": "torch",
    "triton.multi_kernel": 1,
    "cpp.min_chunk_size": 512,
}


@pytest.fixture(scope="module")
def backend_state():
    backend = InductorBackend().build(nn.ReLU(), torch.ones(2))
    state = backend.to_dict()
    backend.deactivate()
    return state


@pytest.fixture(params=["InductorConfig", "InductorBackend"])
def load(request, backend_state):
    """Load settings by the class that the parameter names."""
    if request.param == "InductorConfig":
        return InductorConfig.from_dict
    return lambda data, **kwargs: (
        InductorBackend.from_dict(nn.ReLU(), {**backend_state, "config": data}, torch.ones(2), **kwargs).config
    )


def test_loaded_options_are_booleans_numbers_and_enumerated_strings(load):
    for option, value in REFUSED.items():
        with pytest.raises(ValueError, match=rf"options\['{option}'\]=.* is refused in loaded settings"):
            load({"options": {option: value}})
    assert load({"options": ACCEPTED}) == InductorConfig(options=ACCEPTED)
    with pytest.raises(ValueError, match="options key 'max_autotun' is unknown"):
        load({"options": {"max_autotun": "/tmp/planted"}})


def test_passes_are_saved_by_name_and_loaded_from_objects(load):
    saved = json.loads(json.dumps(InductorConfig(passes=[changes_nothing]).to_dict()))
    assert saved == {"passes": ["changes_nothing"]}
    assert load(saved, passes=[changes_nothing]).passes == (changes_nothing,)
    with pytest.raises(ValueError, match=r"with the graph passes \['changes_nothing'\], and passes contains \[\]"):
        load(saved)
    with pytest.raises(ValueError, match=r"saved with the graph passes .*planted_pass"):
        load({"passes": ["planted_pass:run"]})  # nothing is imported
    with pytest.raises(ValueError, match=r"with the graph passes \[\], and passes contains \['changes_nothing'\]"):
        load({}, passes=[changes_nothing])


def test_settings_of_the_program_may_name_commands_and_contain_passes():
    given = {"options": {"cuda.arch": "90"}, "passes": [changes_nothing]}
    config = InductorConfig(**given)
    assert InductorCompile(given, {"candidates": [given]}).arguments.configs == {
        "train": config,
        "infer": Tune([config]),
    }


@pytest.mark.parametrize(
    "config",
    [
        InductorConfig(),
        InductorConfig(mode="reduce-overhead", dynamic=False, fullgraph=True),
        InductorConfig(template="aten", freezing=True, options={"epilogue_fusion": False}),
        InductorConfig(passes=[changes_nothing], activation_memory_budget=0.5),
        InductorConfig(dynamo={"capture_scalar_outputs": True, "allow_rnn": False}),
    ],
    ids=InductorConfig.describe,
)
def test_settings_are_loaded_and_copied_as_they_were(config):
    assert InductorConfig.from_dict(json.loads(json.dumps(config.to_dict())), passes=config.passes) == config
    assert copy.deepcopy(config) == config
    if not config.passes:  # a decorated function cannot be pickled
        assert pickle.loads(pickle.dumps(config)) == config
