"""The arguments of a `Tune`."""

from __future__ import annotations

import copy
import pickle

import pytest

from compile_callbacks import InductorCompile, InductorConfig, Tune


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
    assert tune.describe() == "tune(default | aten)"
    assert (tune, hash(tune)) == (Tune(["default", "aten"]), hash(Tune(["default", "aten"])))
    assert tune != Tune(["aten", "default"])
    assert tune.key() != Tune(["default"]).key()
    for each in (tune, Tune("auto"), Tune(["default"], steps=5)):
        for twin in (copy.deepcopy(each), pickle.loads(pickle.dumps(each))):
            assert (twin, twin.key(), twin.describe()) == (each, each.key(), each.describe())


def test_mode_may_be_auto_a_tune_or_a_mapping_with_candidates():
    report = InductorCompile("auto", {"candidates": ["default", {"mode": "lite"}], "steps": 7}).report
    assert (report.train.mode, report.infer.mode) == ("auto", "tune(default | lite, steps=7)")
    assert InductorCompile("eager").report.train.mode == "eager"
    with pytest.raises(ValueError, match="train_mode='autoo' is unknown; did you mean 'auto'"):
        InductorCompile("autoo")
    with pytest.raises(ValueError, match="train_mode: field='step' is unknown; did you mean 'steps'"):
        InductorCompile({"candidates": ["default"], "step": 7})
