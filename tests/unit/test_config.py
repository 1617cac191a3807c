"""`InductorConfig`: refused settings, its key, and saving and loading as data that cannot run code.

Also the refused settings of `compile_phases` and `InductorBackend`.
"""

from __future__ import annotations

import copy
import functools
import json
import pickle

import pytest
import torch
from torch import nn

from compile_callbacks import GraphPass, InductorBackend, InductorCompile, InductorConfig, compile_phases, graph_pass

pytestmark = pytest.mark.all_versions


class Scale(GraphPass):
    def __init__(self, factor=2):
        self.factor = factor

    def __call__(self, graph, is_inference):
        pass


@graph_pass
def changes_nothing(graph: torch.fx.Graph, is_inference: bool) -> None:
    pass


OVERRULED = {"mode": "reduce-overhead", "options": {"max_autotune": True}}
SPELLINGS = {"max-autotune": True, "max_autotune": True}


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
        ({"options": SPELLINGS}, ValueError, ["'max_autotune' in two spellings"]),
        ({"options": {"post_grad_custom_post_pass": 3}}, TypeError, ["post_grad_custom_post_pass", "3"]),
        (OVERRULED, ValueError, [*("mode='reduce-overhead'", "={'triton.cudagraphs': True, 'max_autotune': True}")]),
        ({"mode": "lite", "template": "aten"}, ValueError, ["mode='lite'", "template='aten'"]),
        ({"fullgraph": 1}, TypeError, ["fullgraph=1"]),
        ({"dynamic": "yes"}, TypeError, ["dynamic='yes'"]),
        ({"activation_memory_budget": 1.5}, ValueError, ["activation_memory_budget=1.5"]),
        ({"activation_memory_budget": "half"}, TypeError, ["activation_memory_budget='half'"]),
        ({"dynamo": {"capture_scalar_output": True}}, ValueError, ["did you mean 'capture_scalar_outputs'"]),
        ({"dynamo": {"allow_rnn": 1}}, TypeError, ["dynamo['allow_rnn']=1", "True or False"]),
        ({"passes": [3]}, TypeError, ["passes", "3"]),
        ({"passes": [Scale]}, TypeError, ["passes", "Scale(...)"]),
        ({"passes": [lambda graph, is_inference: None]}, TypeError, ["passes", "graph_pass"]),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, error, texts):
    with pytest.raises(error) as caught:
        InductorConfig(**settings)
    assert [text for text in texts if text not in str(caught.value)] == []


TWICE = InductorConfig(options={"post-grad-custom-post-pass": changes_nothing})
SAME_HOOK = r"options\['post_grad_custom_post_pass'\] and passes=.* use the same hook"
CANDIDATES = {"candidates": ["default"]}
of_function, of_module = (functools.partial(compile_phases, callee) for callee in (torch.relu, nn.ReLU()))


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (of_function, {"targets": ["net"]}, "targets="),
        (of_function, {"train_mode": "auto"}, "train_mode='auto' needs the step times of a Trainer"),
        (of_function, {"infer_mode": CANDIDATES}, r"infer_mode='tune\(default\)'"),
        (of_module, {"targets": ["no.such"]}, "targets='no.such'"),
        (InductorBackend, {"mode": "defualt"}, "did you mean 'default'"),
        (InductorBackend, {"mode": None}, "mode=None compiles nothing"),
        (InductorBackend, {"mode": {"optoins": {}}}, "mode: field='optoins'"),
        (InductorBackend, {"verify": "no"}, "verify='no'"),
        (InductorBackend, {"name": "a\nb"}, "name="),
        (InductorConfig, {"options": TWICE.options, "passes": [Scale()]}, SAME_HOOK),
        (InductorCompile, {"train_mode": TWICE, "passes": [Scale()]}, SAME_HOOK),
        (InductorCompile, {"infer_mode": {"candidates": [TWICE, "default"]}, "passes": [Scale()]}, SAME_HOOK),
        (of_module, {"infer_mode": TWICE, "passes": [Scale()]}, SAME_HOOK),
    ],
)
def test_wrong_arguments_are_refused_by_name(function, arguments, text):
    with pytest.raises(ValueError, match=text):
        function(**arguments)


def test_compile_phases_refuses_what_is_no_module():
    with pytest.raises(TypeError, match="module=3"):
        compile_phases(3)


def test_every_mode_of_the_installed_torch_is_accepted():
    for mode in torch._inductor.list_mode_options():
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


SETTINGS = [
    *({}, {"mode": "lite"}, {"template": "aten"}, {"dynamic": True}, {"fullgraph": True}, {"freezing": True}),
    *({"activation_memory_budget": 0.5}, {"options": {"max_autotune": True}}, {"passes": [changes_nothing]}),
    *({"dynamo": {"capture_scalar_outputs": True}}, {"dynamo": {"allow_rnn": True}}),
    *({"passes": [Scale(2)]}, {"passes": [Scale(3)]}),
    {"mode": "reduce-overhead", "dynamic": False, "fullgraph": True},
    {"template": "aten", "freezing": True, "options": {"epilogue_fusion": False}},
    {"passes": [changes_nothing], "activation_memory_budget": 0.5},
    {"dynamo": {"capture_scalar_outputs": True, "allow_rnn": False}},
]


def test_keys_of_different_settings_differ():
    keys = [InductorConfig(**each).key() for each in SETTINGS]
    assert len(set(keys)) == len(SETTINGS)
    assert [InductorConfig(**each).key() for each in SETTINGS] == keys


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: InductorConfig(**settings).describe())
def test_settings_are_loaded_and_copied_as_they_were(settings):
    config = InductorConfig(**settings)
    assert InductorConfig.from_dict(json.loads(json.dumps(config.to_dict())), passes=config.passes) == config
    assert copy.deepcopy(config) == config
    if not config.passes:  # a decorated function cannot be pickled
        assert pickle.loads(pickle.dumps(config)) == config


# ------------------------------------------------------------------------------------------ loaded data

PATHS = """
cpp.cxx cuda.arch cuda.cuda_cxx cuda.cutlass_dir rocm.rocm_home global_cache_dir trace.debug_dir cpp.descriptive_names
aot_inductor.output_path post_grad_custom_post_pass pre-grad-custom-pass max_autotune_gemm_backends
"""
REFUSED = dict.fromkeys(PATHS.split(), "ATEN,/tmp/planted") | {
    "aot_inductor.custom_op_libs": ["/tmp/planted.so"],
    "aot_inductor.metadata": {"a": "b"},
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
STATE = {"format": "compile_callbacks.InductorBackend", "version": 1, "state_dict": {}}


@pytest.fixture(params=["InductorConfig", "InductorBackend"])
def load(request):
    """Load settings by the class that the parameter names."""
    if request.param == "InductorConfig":
        return InductorConfig.from_dict
    return lambda data, **kwargs: (
        InductorBackend.from_dict(nn.ReLU(), {**STATE, "config": data}, torch.ones(2), **kwargs).config
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
    for data, passes, text in (
        (saved, [], r"with the graph passes \['changes_nothing'\], and passes contains \[\]"),
        ({"passes": ["planted_pass:run"]}, [], "saved with the graph passes .*planted_pass"),  # nothing is imported
        ({}, [changes_nothing], r"with the graph passes \[\], and passes contains \['changes_nothing'\]"),
    ):
        with pytest.raises(ValueError, match=text):
            load(data, passes=passes)


def test_settings_of_the_program_may_name_commands_and_contain_passes():
    given = {"options": {"cuda.arch": "90"}, "passes": [changes_nothing]}
    report, config = InductorCompile(given, {"candidates": [given]}).report, InductorConfig(**given)
    assert (report.train.mode, report.infer.mode) == (config.describe(), f"tune({config.describe()})")
