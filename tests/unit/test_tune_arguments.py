"""The arguments of `Tune`, and the forms that a tuned phase can be given in."""

from __future__ import annotations

import copy
import math
import pickle

import pytest

from compile_callbacks import InductorCompile, InductorConfig, Tune
from compile_callbacks.config.tune import as_settings


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"candidates": "default"}, TypeError, "candidates='default' must be a list"),
        ({"candidates": 3}, TypeError, "candidates=3"),
        ({"candidates": []}, ValueError, r"candidates=\[\] names nothing to try"),
        ({"candidates": ["eager", None]}, ValueError, "names nothing to try except eager"),
        ({"candidates": ["defualt"]}, ValueError, r"candidates\[0\]='defualt' is unknown; did you mean 'default'"),
        ({"candidates": ["default", 3]}, TypeError, r"candidates\[1\]=3"),
        ({"steps": 4}, ValueError, "steps=4 must be 5 or more"),
        ({"steps": 7.5}, TypeError, "steps=7.5"),
        ({"steps": True}, TypeError, "steps=True"),
        ({"budget_seconds": 0}, ValueError, "budget_seconds=0 must be positive"),
        ({"budget_seconds": math.nan}, ValueError, "budget_seconds=nan"),
        ({"budget_seconds": "60"}, TypeError, "budget_seconds='60'"),
        ({"min_speedup": 0.99}, ValueError, "min_speedup=0.99 must be finite and 1 or more"),
        ({"min_speedup": math.inf}, ValueError, "min_speedup=inf"),
        ({"min_speedup": None}, TypeError, "min_speedup=None"),
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


@pytest.mark.parametrize("tune", [Tune("auto"), Tune(["default", "aten"], steps=5, budget_seconds=60, min_speedup=1.2)])
def test_tune_survives_copies_and_pickles(tune):
    for twin in (copy.deepcopy(tune), pickle.loads(pickle.dumps(tune))):
        assert twin == tune
        assert (twin.key(), twin.describe()) == (tune.key(), tune.describe())
    assert tune.key() != Tune(["default"]).key()


def test_mode_may_be_auto_a_tune_or_a_mapping_with_candidates():
    callback = InductorCompile("auto", {"candidates": ["default", {"mode": "lite"}], "steps": 7})
    assert callback.report.train.mode == "auto"
    assert callback.report.infer.mode == "tune(default | lite, steps=7)"
    assert as_settings("eager", "train_mode") is None
    with pytest.raises(ValueError, match="train_mode='autoo' is unknown; did you mean 'auto'"):
        InductorCompile("autoo")
    with pytest.raises(ValueError, match="train_mode: field='step' is unknown; did you mean 'steps'"):
        InductorCompile({"candidates": ["default"], "step": 7})
    with pytest.raises(TypeError, match=r"train_mode: .*missing.*'candidates'"):
        InductorCompile({"class_path": "compile_callbacks.Tune", "init_args": {"steps": 7}})
