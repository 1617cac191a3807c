"""`InductorConfig` and `Tune`: refused arguments, keys, and saving and loading as data that cannot run code."""

from __future__ import annotations

import copy
import functools
import json
import pickle

import pytest
import torch
from torch import nn

import compile_callbacks
from compile_callbacks import InductorBackend, InductorCompile, InductorConfig, Tune, compile_phases, export

pytestmark = pytest.mark.all_versions


class Scale(compile_callbacks.GraphPass):
    def __init__(self, factor=2):
        self.factor = factor

    def __call__(self, graph, is_inference):
        pass


@compile_callbacks.graph_pass
def changes_nothing(graph: torch.fx.Graph, is_inference: bool) -> None:
    pass


of_module = functools.partial(compile_phases, nn.ReLU())
tune = functools.partial(Tune, candidates=["default"])
exports = functools.partial(export, module=nn.ReLU(), args=(torch.ones(2),), path="net.pt2")
VALUES = [
    (InductorConfig, {"mode": "max-autotun"}, "mode='max-autotun' is unknown; did you mean 'max-autotune'.*'default'"),
    (InductorConfig, {"template": "cutlas"}, "template='cutlas' is unknown; did you mean 'cutlass'"),
    (InductorConfig, {"options": {"max_autotun": True}}, "'max_autotun' is unknown.*did you mean 'max_autotune'"),
    (InductorConfig, {"options": {"zzz": True}}, r"'zzz' is unknown.*list_options\(\)"),
    (InductorConfig, {"activation_memory_budget": 1.5}, r"activation_memory_budget=1\.5"),
    (InductorConfig, {"dynamo": {"capture_scalar_output": True}}, "did you mean 'capture_scalar_outputs'"),
    (of_module, {"targets": ["no.such"]}, "targets='no.such'"),
    (of_module, {"train_mode": "auto"}, "train_mode='auto' is unknown. Choices: 'default'"),
    (of_module, {"train_mode": "fast"}, "train_mode='fast' is unknown. Choices: 'default'"),
    (InductorConfig, {"mode": "fast"}, "mode='fast' is unknown. Choices: 'default'"),
    (functools.partial(export, nn.ReLU(), (torch.ones(1),), "x.pt2"), {"mode": "fast"}, "mode='fast' is unknown"),
    (Tune, {"candidates": ["fast"]}, r"candidates\[0\]='fast' is unknown. Choices: 'default'"),
    (of_module, {"infer_mode": {"candidates": ["default"]}}, "field='candidates' is unknown"),
    (InductorBackend, {"mode": None}, "mode=None compiles nothing"),
    (InductorBackend, {"mode": {"optoins": {}}}, "mode: field='optoins'"),
    (InductorBackend, {"verify": "no"}, "verify='no'"),
    (InductorCompile, {"train_mode": "autoo"}, "train_mode='autoo' is unknown; did you mean 'auto'"),
    (InductorCompile, {"train_mode": {"candidates": ["default"], "step": 7}}, "field='step' .* did you mean 'steps'"),
    (InductorCompile, {"train_mode": "none"}, "'none' is unknown. Choices: 'default'.*'auto', 'eager'. `compile"),
    (InductorCompile, {"targets": []}, "targets"),
    (InductorCompile, {"baseline_steps": -1}, "baseline_steps=-1"),
    (InductorCompile, {"verify": False}, "verify=False is unknown. Choices: 'off'"),
    (Tune, {"candidates": ["eager", None]}, "has no candidate except eager"),
    (Tune, {"candidates": ["defualt"]}, r"candidates\[0\]='defualt' is unknown; did you mean 'default'"),
    (tune, {"steps": 4}, "steps=4 must be 5 or more"),
    (InductorCompile, {"cache_dir": ""}, "'.' is the current folder"),
    (exports, {"args": (torch.tensor(1.0),)}, "without a batch, set dynamic_batch=False"),
    (exports, {"path": "net.pt"}, r"path='net\.pt' must end in '\.pt2'"),
    (exports, {"mode": None}, "mode=None compiles nothing"),
    (exports, {"verify": "eager"}, "verify='eager' is unknown"),
]
TYPES = [
    (InductorConfig, {"mode": None}, "mode=None .*'default', not NoneType"),
    (InductorConfig, {"options": {"max_autotune": 1}}, r"options\['max_autotune'\]=1 must be of type bool, not int"),
    (InductorConfig, {"options": {"post_grad_custom_post_pass": 3}}, "post_grad_custom_post_pass.*3"),
    (InductorConfig, {"fullgraph": 1}, "fullgraph=1"),
    (InductorConfig, {"dynamic": "yes"}, "dynamic='yes'"),
    (InductorConfig, {"activation_memory_budget": "half"}, "activation_memory_budget='half'"),
    (InductorConfig, {"dynamo": {"allow_rnn": 1}}, r"dynamo\['allow_rnn'\]=1 must be True or False"),
    (InductorConfig, {"passes": [Scale]}, "passes.*not a graph pass"),
    (functools.partial(compile_phases, torch.relu), {}, "module=.* must be a torch.nn.Module"),  # type: ignore[type-var]
    (InductorCompile, {"train_mode": False}, "train_mode=False must be a mode"),
    (Tune, {"candidates": "default"}, "candidates='default' must be a list"),
    (Tune, {"candidates": ["default", 3]}, r"candidates\[1\]=3"),
    (InductorCompile, {"cache_dir": b"kept"}, "cache_dir=b'kept' must be the path of a folder, not bytes"),
    (exports, {"module": 3}, r"module=3 must be a torch\.nn\.Module"),
    (exports, {"args": torch.ones(2)}, r"of positional inputs, such as \(tensor,\), not Tensor"),
    (compile_callbacks.load_exported, {"path": 3}, r"path=3 must be a path, not int"),
]


@pytest.mark.parametrize("row", [(ValueError, *row) for row in VALUES] + [(TypeError, *row) for row in TYPES])
def test_wrong_arguments_are_refused_by_name(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error, call, arguments, text = row
    with pytest.raises(error, match=rf"{text}.*\[CC\d\d\d: "):
        call(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_every_mode_and_default_of_the_installed_torch_is_accepted():
    for mode in torch._inductor.list_mode_options():
        assert InductorConfig(mode=mode).resolved_options() == torch._inductor.list_mode_options(mode)
    for option, value in torch._inductor.config.get_config_copy().items():
        InductorConfig(options={option: value})


def test_options_override_the_mode_and_the_template():
    config = InductorConfig(mode="reduce-overhead", template="aten", options={"max_autotune_gemm_backends": "CPP"})
    conv = {"max_autotune_conv_backends": "ATEN"}
    assert config.resolved_options() == {"triton.cudagraphs": True, "max_autotune_gemm_backends": "CPP", **conv}


def test_a_config_is_immutable():
    options = {"max-autotune": True}
    config = InductorConfig(options=options)
    options["max-autotune"] = "wrong"
    assert config.resolved_options() == {"max_autotune": True}
    assert config.to_dict() == {"options": {"max_autotune": True}}
    with pytest.raises(AttributeError):
        config.mode = "default"


def test_keys_of_different_settings_differ_and_settings_are_loaded_and_copied_as_they_were():
    several = [
        *({}, {"mode": "lite"}, {"template": "aten"}, {"dynamic": True}, {"fullgraph": True}, {"freezing": True}),
        *({"activation_memory_budget": 0.5}, {"options": {"max_autotune": True}}, {"passes": [changes_nothing]}),
        *({"dynamo": {"capture_scalar_outputs": True}}, {"dynamo": {"allow_rnn": True}}),
        *({"passes": [Scale(2)]}, {"passes": [Scale(3)]}),
        {"template": "aten", "freezing": True, "options": {"epilogue_fusion": False}},
        {"mode": "reduce-overhead", "dynamic": False, "dynamo": {"capture_scalar_outputs": True, "allow_rnn": False}},
    ]
    configs = [InductorConfig(**settings) for settings in several]
    assert len({config.key() for config in configs}) == len(several)
    for config, settings in zip(configs, several, strict=True):
        assert InductorConfig(**settings).key() == config.key()
        assert InductorConfig.from_dict(json.loads(json.dumps(config.to_dict())), passes=config.passes) == config
        assert copy.deepcopy(config) == config
        if not config.passes:  # a decorated function cannot be pickled
            assert pickle.loads(pickle.dumps(config)) == config


def test_tune_counts_equal_candidates_once_needs_no_eager_and_is_copied_as_it_was():
    two = Tune(["eager", "default", None, {"mode": "default"}, InductorConfig(), "aten"])
    assert two.describe() == "tune(default | aten)"
    assert (two, hash(two)) == (Tune(["default", "aten"]), hash(Tune(["default", "aten"])))
    assert two != Tune(["aten", "default"])
    for each in (two, Tune("auto"), Tune(["default"], steps=5)):
        for twin in (copy.deepcopy(each), pickle.loads(pickle.dumps(each))):
            assert (twin, twin.describe()) == (each, each.describe())


def test_modes_and_settings_of_the_program_are_in_the_report_and_may_name_commands_and_contain_passes():
    config = {"options": {"cuda.arch": "90"}, "passes": [changes_nothing]}
    name = InductorConfig(**config).describe()
    for mode, described in (
        (config, name),
        ({"candidates": [config]}, f"tune({name})"),
        ({"candidates": ["default", {"mode": "lite"}], "steps": 7}, "tune(default | lite, steps=7)"),
        ("auto", "auto"),
        ("eager", "eager"),
    ):
        assert InductorCompile(mode).report.train.mode == described


PATHS = """
cpp.cxx cuda.arch cuda.cuda_cxx cuda.cutlass_dir rocm.rocm_home global_cache_dir trace.debug_dir cpp.descriptive_names
aot_inductor.output_path post_grad_custom_post_pass pre-grad-custom-pass max_autotune_gemm_backends
"""
REFUSED = dict.fromkeys(PATHS.split(), "ATEN,/tmp/planted") | {
    "aot_inductor.custom_op_libs": ["/tmp/planted.so"],
    "aot_inductor.metadata": {"a": "b"},
}
ACCEPTED = {"max_autotune": True, "trace.debug_dir": None, "triton.multi-kernel": 1}
STATE = {"format": "compile_callbacks.InductorBackend", "version": 1, "state_dict": {}}


def load_backend(data, **kwargs):
    return InductorBackend.from_dict(nn.ReLU(), {**STATE, "config": data}, torch.ones(2), **kwargs).config


@pytest.mark.parametrize("load", [InductorConfig.from_dict, load_backend])
def test_loaded_options_name_no_file_and_passes_are_saved_by_name_and_loaded_from_objects(load):
    for option, value in REFUSED.items():
        with pytest.raises((ValueError, TypeError), match=rf"options\['{option}'\]=.* (is refused|must be)"):
            load({"options": {option: value}})
    assert load({"options": ACCEPTED}) == InductorConfig(options=ACCEPTED)
    with pytest.raises(ValueError, match="options key='max_autotun' is unknown"):
        load({"options": {"max_autotun": "/tmp/planted"}})
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
