"""The arguments and the candidates of a `Tune`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from compile_callbacks import InductorCompile, InductorConfig, Tune
from compile_callbacks.tuning.candidates import auto_candidates
from compile_callbacks.tuning.tune import as_phase_config


def test_auto_has_dynamic_candidates_if_shapes_vary():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    fixed = [config.describe() for config in auto_candidates(cuda, "train")]
    assert fixed == ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
    varying = [config.describe() for config in auto_candidates(cuda, "train", shapes_vary=True)]
    assert set(varying) - set(fixed) == {"dynamic=True", "max-autotune-no-cudagraphs, dynamic=True"}
    assert [config.describe() for config in auto_candidates(cpu, "infer")] == ["freezing=True"]
    assert len(auto_candidates(cpu, "train", shapes_vary=True)) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"candidates": "default"}, TypeError, "candidates='default' must be a list"),
        ({"candidates": ["eager", None]}, ValueError, "has no candidate except eager"),
        ({"candidates": ["defualt"]}, ValueError, r"candidates\[0\]='defualt' is unknown; did you mean 'default'"),
        ({"candidates": ["default", 3]}, TypeError, r"candidates\[1\]=3"),
        ({"steps": 4}, ValueError, "steps=4 must be 5 or more"),
        ({"step": 7}, TypeError, "Tune has no argument 'step'. Did you mean 'steps'"),
        ({"mode": "default"}, TypeError, "Tune has no argument 'mode'. Arguments: candidates, steps"),
        ({"budget_seconds": 60}, TypeError, "Tune has no argument 'budget_seconds'. It has no replacement"),
        ({"min_speedup": 1.2}, TypeError, "Tune has no argument 'min_speedup'. It has no replacement"),
    ],
)
def test_tune_refuses_wrong_arguments_by_name(arguments, error, said):
    with pytest.raises(error, match=said):
        Tune(**({"candidates": ["default"]} | arguments))


def test_tune_counts_equal_candidates_once_and_needs_no_eager():
    tune = Tune(["eager", "default", None, {"mode": "default"}, InductorConfig(), "aten"])
    assert [config.describe() for config in tune.configs] == ["default", "aten"]
    assert tune == Tune(["default", "aten"])
    assert hash(tune) == hash(Tune(["default", "aten"]))
    assert tune != Tune(["aten", "default"])


@pytest.mark.parametrize("tune", [Tune("auto"), Tune(["default", "aten"], steps=5)])
def test_tune_survives_copies_and_pickles(tune):
    for twin in (copy.deepcopy(tune), pickle.loads(pickle.dumps(tune))):
        assert twin == tune
        assert (twin.key(), twin.describe()) == (tune.key(), tune.describe())
    assert tune.key() != Tune(["default"]).key()


def test_mode_may_be_auto_a_tune_or_a_mapping_with_candidates():
    callback = InductorCompile("auto", {"candidates": ["default", {"mode": "lite"}], "steps": 7})
    assert callback.report.train.mode == "auto"
    assert callback.report.infer.mode == "tune(default | lite, steps=7)"
    assert as_phase_config("eager", "train_mode") is None
    with pytest.raises(ValueError, match="train_mode='autoo' is unknown; did you mean 'auto'"):
        InductorCompile("autoo")
    with pytest.raises(ValueError, match="train_mode: field='step' is unknown; did you mean 'steps'"):
        InductorCompile({"candidates": ["default"], "step": 7})
