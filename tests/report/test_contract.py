"""``compile-callbacks check``: regressions of real runs are found, each with its reason, and equal runs pass."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import re

import pytest
import torch
import torch._inductor.graph
from torch import nn

from compile_callbacks import InductorCompile
from tests.cases.zoo import Calls
from tests.report.conftest import FILE, STEP_MS, Two
from tests.support.models import RecordingLogger, batches_of, fit, mlp
from tests.support.passes import Uncached, WrongForward
from tests.support.step_times import Times

pytestmark = [
    pytest.mark.usefixtures("no_codegen"),
    pytest.mark.filterwarnings("ignore::compile_callbacks.CompileWarning"),
]


@pytest.fixture
def record(golden):
    """The record of the golden fit."""
    return copy.deepcopy(golden.records[0])


@pytest.fixture
def check(command, tmp_path):
    """Runs the command with a record and a contract, and returns the lines of stdout."""

    def check(record, contract, *options, status=0):
        for name, data in ((FILE, [record]), ("contract.json", contract)):
            (tmp_path / name).write_text(json.dumps(data))
        printed = command("check", tmp_path, "--against", tmp_path / "contract.json", *options, status=status)
        check.stderr = printed.err
        return printed.out.splitlines()

    return check


@pytest.fixture
def contract(check, record, tmp_path):
    """The contract of the golden fit."""
    check(record, {}, "--write")
    return json.loads((tmp_path / "contract.json").read_text())


def breaks(net, x):
    print("between")
    return net(nn.functional.dropout(x if x.sum() > 0 else -x, 0.5, net.training))


TRAIN, BREAKS = {"infer_mode": None}, {"infer_mode": None, "make": lambda: Two(Calls(mlp(), breaks))}
# The arguments of a run, and the begin and the reason of each breach.
REGRESSIONS = {
    "graph_breaks": [BREAKS, ("train.graph_breaks: ", "print"), ("train.graph_breaks: ", "generic_jump TensorVari"),
                     ("train.uncompared_graphs: ", "dropout")],
    "ragged_batch": [{"train": batches_of(*[4] * 11, *[3] * 9), "train_mode": {"dynamic": False}, **TRAIN},
                     ("train.recompiles: 2, allowed 0: ", "batch size 3, was 4")],
    "dropped_target": [{"targets": ["net"], "train_mode": "reduce-overhead", "verify": "off", **TRAIN},
                       ("train.targets: side not compiled, allowed none: ", "compiled net"),
                       ("train.skipped_cudagraphs: 1, allowed 0: ", "so they have no effect"),
                       ("train.uncompared_graphs: 1, allowed 0: ", "did not verify")],
    "eager_mode": [{"train_mode": "eager"}, ("train.targets: net not compiled, ", "the mode is 'eager'")],
    "fullgraph": [{**BREAKS, "train_mode": {"fullgraph": True}}, ("train.targets: net not compiled, ", "print")],
    "inductor_fails": [{"passes": [Uncached()], **TRAIN}, ("train.fallbacks: 2, allowed 0: net", "by zero")],
    "wrong_pass": [{"passes": [WrongForward("train"), WrongForward("infer")]},
                   ("train.differing_graphs: 1, allowed 0: net", "output 0"),
                   ("infer.differing_graphs: 1, allowed 0: forward", "output 0")],
}  # fmt: skip


def run(folder, *, make=Two, train=20, **arguments):
    """Train, and return the record."""
    callback = InductorCompile(**{"train_mode": "default", "baseline_steps": 5, **arguments})
    settings = {"num_sanity_val_steps": 0, "logger": RecordingLogger(folder)}
    fit(callback, make=make, train=train, validation=None if "infer_mode" in arguments else 12, **settings)
    return json.loads((folder / FILE).read_text())[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_regression_breaks_the_contract_and_the_line_names_the_reason(name, contract, tmp_path, monkeypatch, check):
    arguments, *breaches = REGRESSIONS[name]
    Times(monkeypatch, train=STEP_MS, infer=STEP_MS)
    if name == "inductor_fails":
        monkeypatch.setattr(torch._inductor.graph.GraphLowering, "run", lambda *args: 1 / 0)
    contract["train"]["compile_seconds"] = 600  # other programs may use the machine
    if "infer_mode" in arguments:
        del contract["infer"]
    lines = check(run(tmp_path / "run", **arguments), contract, status=1)
    for begins, reason in breaches:
        assert any(line.startswith(begins) and reason in line for line in lines), lines


def test_equal_runs_fulfill_the_contract_and_a_worse_contract_is_broken(record, contract, check):
    assert check(record, contract) == []
    strict = contract | {"torch": "1.0", "margin": 0.1}
    strict["train"] |= {"graphs": 1, "graph_breaks": {"anything": 3}, "speedup": 3, "compile_seconds": 0.0}
    strict["infer"]["graphs"] = 0
    lines = check(record, strict, status=1)
    assert re.match(r"train\.compile_seconds: .*: (net|side) .* s, (net|side) .* s", lines.pop(1))  # the longest first
    assert lines == [
        "train.graphs: 2, allowed 1: net 1, side 1",
        "train.speedup: 2, allowed 2.727: eager 12 ms, compiled 6 ms",
        "infer.graphs: 1, allowed 0: forward 1",
    ]
    note = f"the contract is for torch 1.0, and the report is of torch {importlib.metadata.version('torch')}"
    assert note in check.stderr
    found = json.loads("\n".join(check(record, strict, "--json", status=1)))
    of_infer = {"phase": "infer", "figure": "graphs", "value": 1, "allowed": 0, "reason": "forward 1"}
    assert (len(found["breaches"]), found["breaches"][-1], found["notes"]) == (4, of_infer, [note])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, r: c.update(grahps=1), "field='grahps' is unknown"),
        (lambda c, r: c["train"].update(graph=1), "did you mean 'train.graphs'?"),
        (lambda c, r: c.update(margin=-1), "margin=-1 must be a number from 0 on"),
        (lambda c, r: c.update(margin=float("nan")), "cannot be read: NaN is no number"),
        (lambda c, r: c["train"].update(targets=[[1]]), "is damaged: TypeError"),
        (lambda c, r: c["train"].update(targets="net"), "train.targets='net' must be a list of names"),
        (lambda c, r: [c.pop(phase) for phase in ("train", "infer")], "checks nothing"),
        (lambda c, r: c.update(call="test"), "contains no record of a call of test"),
        (lambda c, r: c["train"].update(peak_memory_mib=1.0), "no figure for train.peak_memory_mib"),
        (lambda c, r: r.update(version=2), "the record has version 2, not 1"),
        (lambda c, r: r.update(exception="ValueError"), "ValueError ended the call"),
        (lambda c, r: r["report"].pop("infer"), "the report has no infer phase"),
        (lambda c, r: r["report"]["infer"].update(compile_seconds=None, verdict=None), "no infer phase, or no step"),
        (lambda c, r: r["report"]["train"].pop("diagnostics"), "is damaged: KeyError: 'diagnostics'"),
    ],
)
def test_what_cannot_be_compared_is_an_error(change, message, record, contract, check):
    change(contract, record)
    assert check(record, contract, status=2) == []
    assert message in check.stderr


def test_missing_and_damaged_files_are_errors(contract, tmp_path, command):
    (tmp_path / "damaged.json").write_text("[")
    for path, against in (("none.json", "contract.json"), ("damaged.json", "contract.json"), (FILE, "none.json")):
        printed = command("check", tmp_path / path, "--against", tmp_path / against, status=2)
        assert "cannot be read" in printed.err


def test_a_run_that_compiled_nothing_gives_no_contract(record, tmp_path, check):
    """Such a contract would check nothing."""
    for phase in ("train", "infer"):
        record["report"][phase]["diagnostics"]["events"] = []
    check(record, {}, "--write", status=2)
    assert "the run compiled nothing" in check.stderr
    assert json.loads((tmp_path / "contract.json").read_text()) == {}


def test_figures_without_certainty_are_no_breach(record, contract, tmp_path, check):
    """Steps that vary as on a busy machine, and a compile that took twice as long."""
    train = record["report"]["train"]
    train["compiled_step_ms"], train["compile_seconds"] = 20.0, 2 * train["compile_seconds"]
    train["diagnostics"]["speedup_interval"] = [0.48, 1.8]
    assert check(record, contract) == []
    check(record, {}, "--write")
    assert "speedup" not in json.loads((tmp_path / "contract.json").read_text())["train"]


def test_memory_above_the_margin_is_a_breach(record, contract, check):
    contract["train"]["peak_memory_mib"] = 100.0
    for mib, status in ((119.0, 0), (121.0, 1)):
        record["report"]["train"]["diagnostics"]["peak_memory_mib"] = mib
        lines = check(record, contract, status=status)
        assert [line[:43] for line in lines] == ["train.peak_memory_mib: 121, allowed 120: th"] * status
