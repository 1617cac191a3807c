"""`Tune` with a real Trainer and real Inductor: the run is eager's, whatever is tried; what is kept and said."""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import json
import math
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from against_eager import FLOAT32, assert_same_module, assert_same_values
from models import CLASSES, FEATURES, Classifier, loader, mlp, seeded, trainer
from step_times import Times
from torch import nn
from torch._inductor.output_code import OutputCode
from torch.utils.data import DataLoader
from uncached import Uncached

from compile_callbacks import CompileReport, CompileWarning, GraphPass, InductorCompile, InductorConfig, Tune
from compile_callbacks.compiling.switch import PhaseSwitch
from compile_callbacks.devices import device_description
from compile_callbacks.measuring.events import CompileRecorder
from compile_callbacks.measuring.timing import StepTimer
from compile_callbacks.measuring.work import Work
from compile_callbacks.reporting.markdown import to_markdown
from compile_callbacks.settings.tune import as_settings, named
from compile_callbacks.tuning.choices_store import Choice, ChoicesStore, circumstances, fingerprint
from compile_callbacks.tuning.tuning import Observed, PhaseTuning

pytestmark = pytest.mark.newest

# Two settings that compute the same in other code.
PLAIN, UNFUSED = InductorConfig(), InductorConfig(options={"epilogue_fusion": False})


class Idle(GraphPass):
    def __call__(self, graph, is_inference):
        pass


class Raising(Uncached):
    def __call__(self, graph, is_inference):
        raise ZeroDivisionError("by design")


class RaisingLater(Uncached):
    broken = False

    def __call__(self, graph, is_inference):
        if type(self).broken:
            raise ZeroDivisionError("by design")


class Doubling(Uncached):
    """Computes something else: each product is taken for a sum."""

    def __call__(self, graph, is_inference):
        for node in graph.nodes:
            if node.target is torch.ops.aten.relu.default or node.target is torch.ops.aten.addmm.default:
                node.replace_all_uses_with(
                    doubled := _after(graph, node), delete_user_cb=lambda user, new=None: user is not doubled
                )


def _after(graph, node):
    with graph.inserting_after(node):
        return graph.call_function(torch.ops.aten.mul.Tensor, (node, 2))


def fit(callback=None, *, batches=40, epochs=1, val_batches=0, make=Classifier, **settings):
    module = seeded(make)
    callbacks = [callback] if callback is not None else []
    run = trainer(*callbacks, max_epochs=epochs, num_sanity_val_steps=0, **settings)
    run.fit(module, loader(batches), loader(val_batches) if val_batches else None)
    return module


def trials(report):
    return {trial["candidate"]: trial for trial in report.trials}


def verdicts(report):
    return {name: trial["verdict"] for name, trial in trials(report).items()}


# ------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"candidates": "default"}, TypeError, "candidates='default' must be a list"),
        ({"candidates": 3}, TypeError, "candidates=3"),
        ({"candidates": []}, ValueError, r"candidates=\[\] has nothing to try"),
        ({"candidates": ["eager", None]}, ValueError, "has nothing to try beside eager"),
        ({"candidates": ["defualt"]}, ValueError, r"candidates\[0\]='defualt' is unknown; did you mean 'default'"),
        ({"candidates": ["default", 3]}, TypeError, r"candidates\[1\]=3"),
        ({"rule": "fastest"}, ValueError, "rule='fastest' is unknown"),
        ({"rule": "latency_budgets", "latency_budget_ms": 1}, ValueError, "did you mean 'latency_budget'"),
        ({"rule": None}, ValueError, "rule=None"),
        ({"steps": 0}, ValueError, "steps=0 must be 1 or more"),
        ({"steps": 2.5}, TypeError, "steps=2.5"),
        ({"steps": True}, TypeError, "steps=True"),
        ({"budget_seconds": 0}, ValueError, "budget_seconds=0 must be above 0"),
        ({"budget_seconds": math.nan}, ValueError, "budget_seconds=nan"),
        ({"budget_seconds": "60"}, TypeError, "budget_seconds='60'"),
        ({"min_speedup": 0.99}, ValueError, "min_speedup=0.99 must be finite and 1 or more"),
        ({"min_speedup": math.inf}, ValueError, "min_speedup=inf"),
        ({"min_speedup": math.nan}, ValueError, "min_speedup=nan"),
        ({"min_speedup": "1.1"}, TypeError, "min_speedup='1.1'"),
        ({"min_speedup": 10**400}, ValueError, "min_speedup=an integer beyond all floats"),
        ({"budget_seconds": 10**400}, ValueError, "budget_seconds=an integer beyond all floats must be above 0 and"),
        ({"steps": 10**5000}, ValueError, "steps=an integer beyond all floats must be 1 or more, and finite"),
        ({"latency_budget_ms": 5}, ValueError, "rule='latency_budget' needs latency_budget_ms"),
        ({"rule": "latency_budget"}, ValueError, "rule='latency_budget' needs latency_budget_ms"),
        ({"rule": "latency_budget", "latency_budget_ms": -1}, ValueError, "latency_budget_ms=-1"),
        ({"rule": "latency_budget", "latency_budget_ms": True}, TypeError, "latency_budget_ms=True"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, error, said):
    with pytest.raises(error, match=said):
        Tune(**({"candidates": ["default"]} | arguments))


def test_candidates_that_are_equal_count_once_and_eager_needs_no_naming():
    tune = Tune(["eager", "default", None, {"mode": "default"}, InductorConfig(), "aten"])
    assert [config.describe() for config in tune.configs] == ["default", "aten"]
    assert Tune(["default", "aten"]) == tune
    assert hash(Tune(["default", "aten"])) == hash(tune)
    assert Tune(["aten", "default"]) != tune  # their order is part of what is asked for


@pytest.mark.parametrize(
    "tune",
    [
        Tune("auto"),
        Tune(["default", {"options": {"max_autotune": True}}], rule="first", steps=5, budget_seconds=60),
        Tune(["lite"], rule="latency_budget", latency_budget_ms=2.5, min_speedup=1.2),
    ],
)
def test_a_tune_goes_through_json_copies_and_pickles(tune):
    for twin in (
        Tune.from_dict(json.loads(json.dumps(tune.to_dict()))),
        copy.deepcopy(tune),
        pickle.loads(pickle.dumps(tune)),
    ):
        assert twin == tune
        assert (twin.key(), twin.describe()) == (tune.key(), tune.describe())
    assert tune != Tune(["default"])


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (3, TypeError, "data=3"),
        ({"rule": "first"}, ValueError, "has no candidates"),
        ({"candidates": ["default"], "step": 3}, ValueError, "did you mean 'steps'"),
    ],
)
def test_data_that_is_no_tune_is_refused(data, error, said):
    with pytest.raises(error, match=said):
        Tune.from_dict(data)


def test_a_mode_may_be_auto_a_tune_or_a_mapping_with_candidates():
    callback = InductorCompile("auto", {"candidates": ["default", {"mode": "lite"}], "rule": "latency"})
    assert callback.report.train.mode == "auto"
    assert callback.report.infer.mode == "tune(default | lite, rule=latency)"
    assert as_settings("eager", "train_mode") is None
    with pytest.raises(ValueError, match="train_mode='autoo' is unknown; did you mean 'auto'"):
        InductorCompile("autoo")


def test_two_configs_that_read_alike_have_names_of_their_own():
    class Scale(GraphPass):
        def __init__(self, by):
            self.by = by

        def __call__(self, graph, is_inference):
            pass

    configs = [InductorConfig(passes=[Scale(1)]), InductorConfig(passes=[Scale(2)])]
    assert list(named(configs)) == ["passes=[Scale]", "passes=[Scale] (2)"]


# ------------------------------------------------------------------------------------------ runs


def test_a_run_that_is_tuned_is_eagers_and_the_winner_runs_on(monkeypatch):
    Times(
        monkeypatch,
        train={"eager": 10, "default": 8, "options={epilogue_fusion: False}": 5},
        infer={"eager": 10, "default": 5, "options={epilogue_fusion: False}": 8},
    )
    ours = InductorCompile(*(Tune([PLAIN, UNFUSED], steps=5) for _ in range(2)))
    settings = {"epochs": 8, "batches": 12, "val_batches": 5}
    compiled, eager = fit(ours, **settings), fit(**settings)
    close = {"rtol": 1e-3, "atol": 1e-4}  # rounding grows over a hundred steps
    assert_same_values(compiled, eager, close)
    assert_same_module(compiled, eager)
    train, infer = ours.report.train, ours.report.infer
    assert verdicts(train) == {"eager": "beaten", "default": "beaten", "options={epilogue_fusion: False}": "chosen"}
    assert verdicts(infer) == {"eager": "beaten", "default": "chosen", "options={epilogue_fusion: False}": "beaten"}
    assert (train.mode, infer.mode) == ("options={epilogue_fusion: False}", "default")
    assert (train.speedup, infer.speedup) == (2.0, 2.0)
    assert train.graphs == 1  # the winner's; what all of them cost is in compile_seconds
    assert train.compile_seconds > sum(e["seconds"] for e in train.events if e["kind"] == "compile") * 0.99
    assert {e["settings"] for e in train.events} == {"default", "options={epilogue_fusion: False}"}
    assert (train.verified, infer.verified) == ("equal", "equal")
    assert trials(train)["default"]["compile_seconds"] > 0
    assert CompileReport.from_dict(json.loads(json.dumps(ours.report.to_dict()))) == ours.report
    assert "candidate eager" in str(ours.report)
    assert "10.00 ms, beaten" in str(ours.report)
    assert "| train | default | 8.00 | 8.00 |" in to_markdown(ours.report, {})
    assert "step/train/speedup" in ours.report.scalars()


def test_what_fails_or_computes_something_else_is_out_with_the_reason_and_no_warning(monkeypatch):
    raising, doubling = InductorConfig(passes=[Raising()]), InductorConfig(passes=[Doubling()])
    Times(monkeypatch, train={"eager": 10, "passes=[Raising]": 1, "passes=[Doubling]": 1, "default": 9})
    ours = InductorCompile(Tune([raising, doubling, "default"], steps=5), None)
    compiled, eager = fit(ours), fit()
    assert_same_values(compiled, eager, FLOAT32)
    report = ours.report.train
    assert verdicts(report) == {
        "eager": "beaten",
        "passes=[Raising]": "failed",
        "passes=[Doubling]": "wrong",
        "default": "chosen",
    }
    assert "by design" in trials(report)["passes=[Raising]"]["reason"]
    assert "is off by" in trials(report)["passes=[Doubling]"]["reason"]
    assert "train: passes=[Doubling] is wrong: output 0 is off by" in str(ours.report)
    assert (report.fallbacks, report.verified, report.skipped_passes) == (0, "equal", 0)


def test_with_verify_off_what_is_wrong_is_not_found_out(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "passes=[Doubling]": 1})
    ours = InductorCompile(Tune([InductorConfig(passes=[Doubling()])], steps=5), None, verify="off")
    fit(ours, batches=30)
    assert verdicts(ours.report.train)["passes=[Doubling]"] == "chosen"


def test_a_pass_of_the_callbacks_that_fails_is_left_out_of_all_candidates_and_warned_about(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    ours = InductorCompile(Tune(["default"], steps=5), None, passes=[Raising()])
    with pytest.warns(CompileWarning, match="by design"):
        fit(ours, batches=30)
    assert ours.report.train.mode == "default"
    assert ours.report.train.skipped_passes > 0


def compiled_code():
    gc.collect()
    return sum(issubclass(type(o), OutputCode) for o in gc.get_objects())


def test_where_eager_wins_nothing_compiled_is_left(monkeypatch):
    before = compiled_code()
    Times(monkeypatch, train={"eager": 10, "default": 12, "options={epilogue_fusion: False}": 9.99})
    ours = InductorCompile(Tune([PLAIN, UNFUSED], steps=5), None, passes=[Uncached()])
    fit(ours, batches=40)
    report = ours.report.train
    assert report.mode == "eager"
    assert verdicts(report) == {
        "eager": "chosen",
        "default": "not faster",
        "options={epilogue_fusion: False}": "not faster",
    }
    assert trials(report)["default"]["reason"] == "0.83 times as fast as eager"
    assert (report.targets, report.speedup, report.break_even_steps) == ((), None, None)
    assert report.compile_seconds > 0
    assert compiled_code() == before
    assert ours._session is not None  # which is what would keep it


def test_an_undecided_run_goes_on_in_the_next_and_does_not_call_itself_decided(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    ours = InductorCompile(Tune(["default"], steps=20), None)
    module = seeded()
    trainer(ours).fit(module, loader(10))
    assert ours.report.train.mode == "tune(default)"
    assert verdicts(ours.report.train) == {"eager": "undecided", "default": "undecided"}
    unchosen = "train: nothing is chosen yet: that takes more steps of the phase, in this run or a longer one"
    assert unchosen in ours.report.notes()
    trainer(ours).fit(module, loader(40))
    assert ours.report.train.mode == "default"


class EndsTheRun(pl.Callback):
    """Interrupts the first step that runs with a candidate, when it is done."""

    def __init__(self, ours):
        self.ours = ours

    def on_after_backward(self, trainer, pl_module):
        if self.ours.report.train.graphs:
            raise ZeroDivisionError


def test_what_was_compiled_in_a_step_that_was_cut_off_is_compiled(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    ours = InductorCompile(Tune(["default"], steps=5), None)
    module = seeded()
    with pytest.raises(ZeroDivisionError):
        trainer(ours, EndsTheRun(ours)).fit(module, loader(30))
    assert verdicts(ours.report.train)["default"] == "undecided"
    trainer(ours).fit(module, loader(40))
    assert verdicts(ours.report.train)["default"] == "chosen"


def test_a_choice_is_found_again_where_only_the_first_batches_have_other_shapes(monkeypatch, tmp_path):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    sizes = [*range(16, 4, -2), *([4] * 60)]
    batches = [next(iter(loader(1, batch_size=size))) for size in sizes]

    def run():
        ours = InductorCompile(Tune(["default"], steps=10), None, cache_dir=tmp_path)
        trainer(ours, num_sanity_val_steps=0).fit(seeded(), DataLoader(batches, batch_size=None))
        return trials(ours.report.train)["default"]["reason"] or ""

    assert run() == ""
    assert run().startswith("chosen in an earlier run")


def test_keeping_it_compiled_keeps_what_is_proven(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    ours = InductorCompile(Tune(["default", UNFUSED], steps=20), None, keep_compiled=True)
    module = fit(ours, batches=20)
    report = ours.report.train
    assert report.mode == "default"
    assert "the run ended" in trials(report)["options={epilogue_fusion: False}"]["reason"]
    graphs = report.graphs
    module.net(torch.randn(4, FEATURES)).sum().backward()
    assert ours.report.train.graphs == graphs
    ours._session.end()


def test_keeping_it_compiled_leaves_a_phase_that_did_not_run_to_a_later_run(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5}, infer={"eager": 10, "default": 5})
    ours = InductorCompile(Tune(["default"], steps=5), Tune(["default"], steps=5), keep_compiled=True)
    module = seeded()
    run = trainer(ours, num_sanity_val_steps=0)
    run.validate(module, loader(8), verbose=False)
    assert (ours.report.train.mode, ours.report.infer.mode) == ("tune(default, steps=5)", "eager")
    run.fit(module, loader(30))
    assert (ours.report.train.mode, ours.report.infer.mode) == ("default", "eager")
    run.validate(module, loader(30), verbose=False)
    assert (ours.report.train.mode, ours.report.infer.mode) == ("default", "default")
    ours._session.end()


def test_a_choice_that_is_open_again_is_on_trial_again(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "passes=[RaisingLater]": 5})
    tune = Tune([InductorConfig(passes=[RaisingLater()]), UNFUSED], steps=20)
    ours = InductorCompile(tune, None, keep_compiled=True, on_error="raise")
    module = fit(ours, batches=20)
    assert ours.report.train.mode == "passes=[RaisingLater]"
    monkeypatch.setattr(RaisingLater, "broken", True)
    trainer(ours).fit(module, loader(40, batch_size=5))  # another shape, which is compiled anew
    assert verdicts(ours.report.train)["passes=[RaisingLater]"] == "failed"
    ours._session.end()


@pytest.mark.parametrize("new_shapes", ["recompile", "eager", "raise"])
def test_a_candidate_that_meets_the_odd_batch_first_runs_the_others_compiled_too(monkeypatch, new_shapes):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    sizes = [3 if i == 7 else 4 for i in range(40)]
    batches = [(torch.randn(size, FEATURES), torch.randint(CLASSES, (size,))) for size in sizes]

    def run(*callbacks):
        module = seeded()
        trainer(*callbacks).fit(module, DataLoader(batches, batch_size=None))
        return module

    ours = InductorCompile(Tune(["default"], steps=5), None, new_shapes=new_shapes)
    compiled, eager = run(ours), run()
    torch.testing.assert_close(compiled.losses, eager.losses, **FLOAT32)
    assert ours.report.train.mode == "default"
    assert ours.report.train.recompiles == 1  # the eighth step is a candidate's first, and its shape is compiled first


def test_processes_run_the_same_candidates_and_choose_by_the_slowest():
    class Switch:
        shares_graphs, targets = False, ()

        def use(self, phase, config, name=None):
            pass

        choose = drop = use

    class Timer(StepTimer):
        def __init__(self, ms):
            super().__init__()
            self.ms = ms

        def samples(self, phase, *, compiled, settings=None):
            return {Work("w"): (self.ms[settings],) * 20}

    said, all_said = [None, None], threading.Barrier(2, timeout=60)

    def process(rank):
        def gather(what):
            said[rank] = replace(what, graphs=1) if isinstance(what, Observed) else what
            all_said.wait()
            told = list(said)
            all_said.wait()
            return told

        tuning = PhaseTuning(
            "train",
            Tune(["default", "aten"], steps=10),
            switch=Switch(),
            recorder=CompileRecorder(),
            timer=Timer([{None: 10.0, "default": 5.0, "aten": 6.0}, {None: 9.0, "default": 20.0, "aten": 1.0}][rank]),
            say=print,
            gather=gather,
        )
        tuning.begin(torch.device("cpu"))
        tuning.expect(math.inf)
        seen = []
        while tuning.winner is None:
            tuning.step_begins(measured=True)
            seen.append(tuning.in_force)
            sample = rank == 0 or len(seen) % 3 > 0
            tuning.step_ends(Work("w"), measured=True, sample=sample, made_for=lambda work: {})
        return seen, tuning.winner

    with ThreadPoolExecutor(2) as processes:
        (first, winner), second = processes.map(process, (0, 1))
    assert second == (first, winner)
    assert winner == "aten"
    assert {None, "default", "aten"} == set(first)


def test_a_step_that_not_all_processes_take_does_not_count():
    tuning = PhaseTuning(
        "infer",
        Tune(["default"]),
        switch=PhaseSwitch([], {}, recorder=(recorder := CompileRecorder())),
        recorder=recorder,
        timer=StepTimer(),
        say=print,
        gather=lambda what: (),
    )
    tuning.begin(torch.device("cpu"))
    tuning.expect(math.inf)
    for _ in range(40):
        tuning.step_begins(measured=True)
        tuning.step_ends(Work("w"), measured=True, sample=True, made_for=lambda work: {})
    assert [trial.verdict for trial in tuning.trials()] == []
    assert tuning.in_force is None


# ------------------------------------------------------------------------------------------ the infer phase


def test_validation_is_tuned_across_epochs_with_the_weights_of_the_day(monkeypatch):
    Times(monkeypatch, infer={"eager": 10, "default": 5})
    ours = InductorCompile(None, Tune(["default"], steps=6))
    settings = {"epochs": 9, "batches": 3, "val_batches": 3}
    compiled, eager = fit(ours, **settings), fit(**settings)
    assert_same_values(compiled, eager, FLOAT32)
    report = ours.report.infer
    assert report.mode == "default"
    assert all(trial["samples"] >= 5 for trial in report.trials)


def test_a_frozen_candidate_is_right_after_the_weights_changed(monkeypatch):
    Times(monkeypatch, infer={"eager": 10, "freezing": 5})
    ours = InductorCompile(None, Tune(["freezing"], steps=5))
    run = trainer(ours)
    module = seeded()
    predicted = []
    for weight in (1.0, 2.0):
        with torch.no_grad():
            module.net[0].weight.fill_(weight)
        twin = copy.deepcopy(module).eval()
        out = torch.cat(run.predict(module, loader(20)))
        expected = torch.cat([twin(x) for x, _ in loader(20)])
        torch.testing.assert_close(out, expected, **FLOAT32)
        predicted.append(out)
    assert not torch.equal(*predicted)
    assert ours.report.infer.mode == "freezing"


# ------------------------------------------------------------------------------------------ auto


def test_auto_tries_nothing_in_a_few_steps_and_says_so(capsys):
    ours = InductorCompile("auto", "auto")
    fit(ours, batches=20, epochs=1, val_batches=3)
    report = ours.report
    assert (report.train.mode, report.infer.mode) == ("eager", "eager")
    assert (report.train.compile_seconds, report.infer.compile_seconds) == (None, None)
    shown = capsys.readouterr().out
    assert "train: default was not tried: the 13 steps that remain could save" in shown
    assert "infer: freezing=True was not tried: the run has 3 steps of the phase" in shown


def test_auto_tries_what_a_long_run_repays(monkeypatch):
    Times(monkeypatch, train={"eager": 10_000, "default": 5_000})
    ours = InductorCompile("auto", None)
    fit(ours, batches=40)
    assert ours.report.train.mode == "default"


def test_cuda_graphs_are_not_tried_without_a_gpu(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    ours = InductorCompile(Tune(["reduce-overhead", "default"], steps=5), None)
    fit(ours, batches=30)
    assert verdicts(ours.report.train) == {"eager": "beaten", "reduce-overhead": "not tried", "default": "chosen"}
    assert "not on a GPU" in trials(ours.report.train)["reduce-overhead"]["reason"]


# ------------------------------------------------------------------------------------------ remembered


def test_the_next_run_begins_with_the_choice_and_checks_it(monkeypatch, tmp_path, caplog):
    times = {"eager": 10, "default": 8, "options={epilogue_fusion: False}": 5}
    Times(monkeypatch, train=times)

    def run(**settings):
        ours = InductorCompile(Tune([PLAIN, UNFUSED], steps=5), None, cache_dir=tmp_path, **settings)
        fit(ours, batches=40)
        return ours.report.train

    assert run().mode == "options={epilogue_fusion: False}"
    (kept,) = (tmp_path / "choices").iterdir()
    data = json.loads(kept.read_text())
    assert data["candidate"] == "options={epilogue_fusion: False}"
    assert {"architecture", "device", "precision", "torch", "triton", "tune", "work"} <= set(data["made_for"])

    again = run()
    assert again.mode == "options={epilogue_fusion: False}"
    assert verdicts(again)["default"] == "not tried"
    assert "chosen in an earlier run" in trials(again)["options={epilogue_fusion: False}"]["reason"]

    times["options={epilogue_fusion: False}"] = 12
    caplog.set_level("INFO", logger="lightning.pytorch")
    anew = run()
    assert anew.mode == "default"
    assert caplog.text.count("is not faster than eager in this one; all candidates are tried") == 1
    assert json.loads(kept.read_text())["candidate"] == "default"

    times["options={epilogue_fusion: False}"] = 5
    with_a_pass = run(passes=[Idle()])
    assert with_a_pass.mode == "options={epilogue_fusion: False}"
    assert "chosen in an earlier run" not in str(trials(with_a_pass))
    assert len(list((tmp_path / "choices").iterdir())) == 2


def test_a_choice_of_eager_is_believed_while_eager_steps_take_as_long(monkeypatch, tmp_path, caplog):
    times = {"eager": 10, "default": 12}
    Times(monkeypatch, train=times)

    def run():
        ours = InductorCompile(Tune(["default"], steps=5), None, cache_dir=tmp_path)
        fit(ours, batches=40)
        return ours.report.train

    assert verdicts(run()) == {"eager": "chosen", "default": "not faster"}
    (kept,) = (tmp_path / "choices").iterdir()
    as_measured = kept.read_text()
    times["eager"] = 14
    again = run()
    assert verdicts(again) == {"eager": "chosen", "default": "not tried"}
    assert trials(again)["eager"]["reason"].endswith(f"without {kept} all candidates are tried again")
    assert kept.read_text() == as_measured  # with the figures that it was chosen by
    times["eager"] = 16
    caplog.set_level("INFO", logger="lightning.pytorch")
    anew = run()
    assert anew.mode == "default"
    assert "whose eager steps took 10.00 ms; these take 16.00 ms, and all candidates are tried" in caplog.text
    assert json.loads(kept.read_text())["eager_ms"] == 16


def test_a_choice_that_left_a_candidate_out_is_for_runs_that_are_no_longer(monkeypatch, tmp_path):
    Times(monkeypatch, train={"eager": 10, "default": 5})

    def run(epochs):
        ours = InductorCompile("auto", None, cache_dir=tmp_path)
        fit(ours, batches=20, epochs=epochs)
        return ours.report.train.trials[0]["reason"] or ""

    assert "earlier run" not in run(2)  # eager: 40 steps repay no compile
    assert "chosen in an earlier run" in run(2)
    assert "earlier run" not in run(3)


def test_what_a_choice_holds_for_is_all_that_may_change_the_fastest(monkeypatch):
    def made_for(module=None, **changed):
        given = {
            "phase": "train",
            "settings_key": Tune(["default"]).key(),
            "passes": (),
            "targets": ("net",),
            "work": "(4, 8)",
            "precision": "32-true",
            "device": torch.device("cpu"),
        }
        return circumstances(module or mlp(), **(given | changed))

    before = made_for()
    assert made_for() == before  # other weights
    assert made_for(mlp().double()) != before
    assert made_for(passes=(Idle(),)) != before
    edited = [type("Net", (nn.Module,), {"forward": code})() for code in (lambda self, x: x.sin(), lambda self, x: x)]
    assert made_for(edited[0]) != made_for(edited[1])
    assert made_for(device=torch.device("meta")) != before
    for owner, name, value in (
        (torch, "get_num_threads", lambda: 99),
        (torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"),
        (device_description, "_cpuinfo", lambda *fields: "another CPU"),
        (importlib.metadata, "version", lambda package: "0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            now = made_for()
            assert now != before, name
            assert fingerprint(now) != fingerprint(before)


def test_a_choice_is_for_one_model_and_one_shape(tmp_path):
    store = ChoicesStore(tmp_path / "choices")
    made_for = {"architecture": "a", "work": "(4, 8)"}
    assert store.load(made_for) is None
    assert store.save(made_for, Choice(candidate="default", key="k"), []) is None
    assert store.load(dict(made_for)) == Choice(candidate="default", key="k")
    assert store.load(made_for | {"work": "(5, 8)"}) is None
    assert [path.suffix for path in (tmp_path / "choices").iterdir()] == [".json"]  # nothing half-written beside it


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[" * 200_000,
        '{"candidate": 3}',
        '{"candidate": "default", "key": "k", "made_for": {}}',
        f'{{"candidate": "default", "key": "k", "made_for": {{"architecture": "a"}}, "holds_for_steps": 1{"0" * 400}}}',
        '{"candidate": "default", "key": "k", "made_for": {"architecture": "a"}, "holds_for_steps": NaN}',
        '{"candidate": "eager", "key": "", "made_for": {"architecture": "a"}, "holds_for_steps": 9, "eager_ms": -1}',
    ],
    ids=["empty", "cut off", "a list", "too deep", "no name", "of another model", "too long", "nan", "below 0"],
)
def test_a_damaged_choice_is_no_choice(tmp_path, content):
    store, made_for = ChoicesStore(tmp_path), {"architecture": "a"}
    store.save(made_for, Choice(candidate="default", key="k"), [])
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert store.load(made_for) is None
    file.write_bytes(b"\xff\xfe\x00")
    assert store.load(made_for) is None
    file.unlink()
    os.mkfifo(file)  # waits for a writer if it is opened
    assert store.load(made_for) is None


@pytest.mark.filterwarnings("ignore:cache_dir has no effect")  # torch keeps no graph of such a pass
def test_eager_chosen_for_want_of_a_compiler_is_not_remembered(monkeypatch, tmp_path):
    Times(monkeypatch, train={"eager": 10, "passes=[RaisingLater]": 5})
    tune = Tune([InductorConfig(passes=[RaisingLater()])], steps=5)
    monkeypatch.setattr(RaisingLater, "broken", True)
    ours = InductorCompile(tune, None, cache_dir=tmp_path)
    fit(ours)
    assert verdicts(ours.report.train) == {"eager": "chosen", "passes=[RaisingLater]": "failed"}
    assert ours.state_dict()["choices"] == {}
    monkeypatch.setattr(RaisingLater, "broken", False)
    ours = InductorCompile(tune, None, cache_dir=tmp_path)
    fit(ours)
    assert verdicts(ours.report.train)["passes=[RaisingLater]"] == "chosen"


def test_a_folder_that_cannot_be_written_costs_the_choice_and_not_the_run(monkeypatch, tmp_path, caplog):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    (tmp_path / "choices").write_text("a file, where the folder should be")
    caplog.set_level("INFO", logger="lightning.pytorch")
    ours = InductorCompile(Tune(["default"], steps=5), None, cache_dir=str(tmp_path))
    fit(ours, batches=30)
    assert ours.report.train.mode == "default"
    assert "the choice could not be kept for later runs" in caplog.text


@pytest.mark.parametrize("cache_dir", [3, True])
def test_a_cache_dir_that_is_no_path_is_refused(cache_dir):
    with pytest.raises(TypeError, match="cache_dir="):
        InductorCompile(cache_dir=cache_dir)


@pytest.mark.parametrize("batches", [12, 40], ids=["while it was tuned", "after it was chosen"])
def test_a_run_that_resumes_equals_one_that_was_not_interrupted(monkeypatch, tmp_path, batches):
    Times(monkeypatch, train={"eager": 10, "default": 8, "options={epilogue_fusion: False}": 5})

    def run(*callbacks, until, ckpt=None):
        module = seeded()
        one = trainer(*callbacks, max_epochs=until)
        one.fit(module, loader(batches), ckpt_path=ckpt)
        return one, module

    def ours():
        return InductorCompile(Tune([PLAIN, UNFUSED], steps=5), None)

    first, _ = run(ours(), until=1)
    first.save_checkpoint(tmp_path / "run.ckpt")
    second = ours()
    _, resumed = run(second, until=4, ckpt=tmp_path / "run.ckpt")
    _, eager = run(until=4)
    torch.testing.assert_close(resumed.losses, eager.losses[batches:], **FLOAT32)
    # Rounding adds up over so many steps.
    torch.testing.assert_close(dict(resumed.state_dict()), dict(eager.state_dict()), rtol=1e-3, atol=3e-4)
    report = second.report.train
    assert report.mode == "options={epilogue_fusion: False}"
    assert (verdicts(report)["default"] == "not tried") == (batches == 40)


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_cuda_graphs_are_candidates_on_a_gpu():
    tune = Tune(["default", "reduce-overhead", InductorConfig(mode="reduce-overhead", options=None)], steps=10)
    assert len(tune.configs) == 2

    def run(*callbacks, **settings):
        module = seeded()
        trainer(*callbacks, accelerator="gpu", max_epochs=10, num_sanity_val_steps=0, **settings).fit(
            module, loader(20), loader(8)
        )
        return module

    for settings in ({}, {"accumulate_grad_batches": 2}):
        ours = InductorCompile(tune, tune)
        compiled, eager = run(ours, **settings), run(**settings)
        # Rounding adds up over 200 steps.
        assert_same_values(compiled, eager, {"rtol": 1e-2, "atol": 1e-3})
        for report in (ours.report.train, ours.report.infer):
            chosen = [name for name, verdict in verdicts(report).items() if verdict == "chosen"]
            assert chosen == [report.mode]
            of = trials(report)
            assert report.mode == "eager" or of[report.mode]["median_ms"] < of["eager"]["median_ms"]
            assert of["reduce-overhead"]["samples"] >= 5
