"""`InductorConfig`: what it refuses, how it shows itself, and its key."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from compile_callbacks import GraphPass, InductorConfig
from tests.support.processes import run_in_new_process


class Scale(GraphPass):
    def __init__(self, factor=2):
        self.factor = factor

    def __call__(self, graph, is_inference):
        pass


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (
            {"mode": "max-autotun"},
            ValueError,
            ["mode='max-autotun'", "did you mean 'max-autotune'", "'default'"],
        ),
        ({"mode": ""}, ValueError, ["mode=''"]),
        ({"mode": 3}, TypeError, ["mode=3", "int"]),
        ({"options": {"max_autotun": True}}, ValueError, ["options", "'max_autotun'", "'max_autotune'"]),
        ({"options": {"max_autotune": 1}}, TypeError, ["options['max_autotune']=1", "bool", "int"]),
        (
            {"options": {"max_fusion_size": "64"}},
            TypeError,
            ["options['max_fusion_size']='64'", "int", "str"],
        ),
        ({"options": {"max_fusion_size": True}}, TypeError, ["options['max_fusion_size']=True", "int"]),
        ({"options": {3: True}}, TypeError, ["3"]),
        ({"options": {"max-autotune": True, "max_autotune": True}}, ValueError, ["'max_autotune' in two spellings"]),
        ({"options": ["max_autotune"]}, TypeError, ["options=['max_autotune']", "list"]),
        ({"options": {"post_grad_custom_post_pass": 3}}, TypeError, ["post_grad_custom_post_pass", "3"]),
        ({"mode": "default", "options": {"max_autotune": True}}, ValueError, ["mode='default'", "options="]),
        ({"fullgraph": 1}, TypeError, ["fullgraph=1"]),
        ({"dynamic": "yes"}, TypeError, ["dynamic='yes'"]),
        ({"fold_weights": 1}, TypeError, ["fold_weights=1"]),
        ({"fold_limit_mib": 0}, ValueError, ["fold_limit_mib=0", "fold_weights=False"]),
        ({"fold_limit_mib": float("nan")}, ValueError, ["fold_limit_mib=nan"]),
        ({"fold_limit_mib": "1GB"}, TypeError, ["fold_limit_mib='1GB'"]),
        ({"passes": [3]}, TypeError, ["passes", "3"]),
        ({"passes": [Scale]}, TypeError, ["passes", "Scale(...)"]),
        ({"passes": [lambda graph, is_inference: None]}, TypeError, ["passes", "graph_pass"]),
        ({"passes": 3}, TypeError, ["passes=3"]),
        (
            {"passes": [Scale()], "options": {"post-grad-custom-post-pass": Scale()}},
            ValueError,
            ["post_grad_custom_post_pass", "passes"],
        ),
    ],
)
def test_config_refuses_bad_settings_by_name(settings, error, said):
    with pytest.raises(error) as caught:
        InductorConfig(**settings)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.all_versions
def test_two_spellings_of_an_option_are_one_setting():
    dashes, own = InductorConfig(options={"max-autotune": True}), InductorConfig(options={"max_autotune": True})
    assert dashes == own
    assert dashes.to_dict() == own.to_dict() == {"options": {"max_autotune": True}}


@pytest.mark.all_versions
@pytest.mark.parametrize("mode", list(torch._inductor.list_mode_options()))
def test_config_takes_every_mode_of_the_installed_torch(mode):
    assert InductorConfig(mode=mode).resolved_options() == torch._inductor.list_mode_options(mode)


@pytest.mark.all_versions
def test_config_is_frozen_and_its_options_too():
    config = InductorConfig(options={"max_autotune": True})
    with pytest.raises(AttributeError):
        config.mode = "default"
    with pytest.raises(TypeError):
        config.options["max_autotune"] = False


@pytest.mark.all_versions
def test_config_does_not_follow_the_mapping_it_was_given():
    options = {"max_autotune": True}
    config = InductorConfig(options=options)
    options["max_autotune"] = "wrong"
    assert config.resolved_options() == {"max_autotune": True}


@pytest.mark.all_versions
def test_copies_and_pickles_are_equal():
    config = InductorConfig(options={"max_autotune": True}, dynamic=True, passes=[Scale(3)])
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(copy.copy(config)) == hash(config)


@pytest.mark.all_versions
@pytest.mark.parametrize(
    "other",
    [
        {"mode": "lite"},
        {"dynamic": True},
        {"fullgraph": True},
        {"fold_weights": True},
        {"fold_limit_mib": 1},
        {"options": {"max_autotune": True}},
        {"passes": [Scale()]},
    ],
)
def test_key_tells_settings_apart(other):
    assert InductorConfig(**other).key() != InductorConfig().key()
    assert InductorConfig(**other).key() == InductorConfig(**other).key()


@pytest.mark.all_versions
def test_key_tells_pass_arguments_apart():
    assert InductorConfig(passes=[Scale(2)]).key() != InductorConfig(passes=[Scale(3)]).key()


def test_key_is_the_same_in_another_process():
    source = (
        "from compile_callbacks import InductorConfig;"
        "import sys; assert 'tensorboard' not in sys.modules;"  # 0.1 s of import, for those alone who log
        "print(InductorConfig(options={'max_autotune': True, 'shape_padding': False}, dynamic=False).key())"
    )
    here = InductorConfig(options={"shape_padding": False, "max_autotune": True}, dynamic=False).key()
    assert run_in_new_process(source).split()[-1] == here
