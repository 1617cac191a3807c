"""``compile-callbacks check``: regressions of real runs are found, each with its reason, and equal runs pass."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch
import torch._dynamo
import torch._inductor.graph
from torch import nn

from compile_callbacks import InductorCompile
from compile_callbacks.cli import main
from compile_callbacks.report import contract
from compile_callbacks.report.data import FILE_NAME
from tests.support.models import CLASSES, FEATURES, Classifier, LoggerIn, batches_of, fit
from tests.support.step_times import Times
from tests.support.uncached import Slow, Uncached
from tests.support.wrong_passes import WrongForward

pytestmark = [
    pytest.mark.usefixtures("no_codegen"),
    pytest.mark.filterwarnings("ignore::compile_callbacks.CompileWarning"),
]

PHASES = {"eager": 12.0, None: 6.0}  # milliseconds of a step, by the fixture's names; `None` is compiled


class Net(nn.Module):
    """A body and a head, and a function between them."""

    def __init__(self, between=lambda net, x: x) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)
        self.between = between
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self, self.body(x)))


class Two(Classifier):
    """Calls two children in training, and the same two in validation."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or Net())
        self.side = nn.Linear(FEATURES, CLASSES)

    def logits(self, x):
        return self.net(x) + self.side(x)

    def forward(self, x):
        return self.logits(x)


def run(folder, *, make=Two, mode="default", infer_mode="default", train=12, accelerator="cpu", **arguments):
    """Train for two epochs, and return the path of the report."""
    torch._dynamo.reset()
    callback = InductorCompile(mode, infer_mode, baseline_steps=5, **{"targets": ["net", "side"], **arguments})
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0, "logger": LoggerIn(folder), "accelerator": accelerator}
    fit(callback, make=make, train=train, validation=10, **settings)
    return folder / FILE_NAME


@pytest.fixture
def check(capsys):
    """Runs the command, and returns the lines of stdout."""

    def check(path, against, *options, status=0):
        capsys.readouterr()
        assert main(["check", str(path), "--against", str(against), *options]) == status
        printed, check.stderr = capsys.readouterr()
        return printed.splitlines()

    return check


@pytest.fixture
def check_data(check, tmp_path):
    """Runs the command with a record and a contract that a test has changed."""

    def check_data(record, contract, *options, status=0):
        (tmp_path / FILE_NAME).write_text(json.dumps([record]))
        (tmp_path / "contract.json").write_text(json.dumps(contract))
        return check(tmp_path, tmp_path / "contract.json", *options, status=status)

    return check_data


# ------------------------------------------------------------------------------------------ regressions


def with_between(between):
    return {"make": lambda: Two(Net(between))}


def count_calls(net, x):
    net.calls += 1
    return x * net.calls


class CallsOneChild(Two):
    def logits(self, x):
        return self.net(x)


def fail_in_inductor(*args):
    raise RuntimeError("a bug of Inductor")


PRINTS = with_between(lambda net, x: print("between") or x)
FULLGRAPH = PRINTS | {"mode": {"fullgraph": True}}
BRANCHES = with_between(lambda net, x: x if x.sum() > 0 else -x)
DROPS = with_between(lambda net, x: nn.functional.dropout(x, 0.5, net.training))
RAGGED = {"train": batches_of(*[4] * 11, *[3] * 9), "mode": {"dynamic": False}}
REGRESSIONS = {
    "print": (PRINTS, "train.graph_breaks: ", "print"),
    "branch": (BRANCHES, "train.graph_breaks: ", "(test_check_command.py:"),
    "counter": (with_between(count_calls), "train.recompiles: ", "'calls': no longer"),
    "ragged_batch": (RAGGED, "train.recompiles: 2, allowed 0: ", "batch size 3, was 4"),
    "dropped_target": ({"targets": ["net"]}, "train.targets: side not compiled, allowed none: ", "compiled net"),
    "uncalled_target": ({"make": CallsOneChild}, "train.targets: side not compiled, ", "compiled net"),
    "eager_mode": ({"mode": "eager"}, "train.targets: net not compiled, ", "the mode is 'eager'"),
    "fullgraph": (FULLGRAPH, "train.targets: net not compiled, allowed none: net", "print"),
    "inductor_fails": ({"passes": [Uncached()]}, "train.fallbacks: 2, allowed 0: net", "a bug of Inductor"),
    "wrong_pass": ({"passes": [WrongForward("train")]}, "train.differing_graphs: 1, allowed 0: net", "output 0"),
    "wrong_infer_pass": ({"passes": [WrongForward("infer")]}, "infer.differing_graphs: 1, allowed 0: net", "output 0"),
    "no_verification": ({"verify": "off"}, "train.uncompared_graphs: 2, allowed 0: ", "did not verify"),
    "dropout": (DROPS, "train.uncompared_graphs: 1, allowed 0: net", "dropout"),
    "cudagraphs": ({"mode": "reduce-overhead"}, "train.skipped_cudagraphs: 2, allowed 0: ", "no effect on a CPU"),
    "slow_kernels": ({}, "train.speedup: 1.538, allowed 1.667: ", "eager 12 ms, compiled 7.8 ms"),
    "slow_compile": ({}, "train.compile_seconds: ", "net "),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The report of the run before the regressions, and its contract."""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(fallback_by_default=True):
        Times(patch, train=PHASES, infer=PHASES)
        path = run(folder)
    assert main(["check", str(path), "--against", str(folder / "contract.json"), "--write"]) == 0
    return path, folder / "contract.json"


@pytest.mark.slow
@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_regression_breaks_the_contract_and_the_line_names_the_reason(name, base, tmp_path, monkeypatch, check):
    arguments, begins, reason = REGRESSIONS[name]
    Times(monkeypatch, train={**PHASES, None: 7.8} if name == "slow_kernels" else PHASES, infer=PHASES)
    if name == "inductor_fails":
        monkeypatch.setattr(torch._inductor.graph.GraphLowering, "run", fail_in_inductor)
    if name == "slow_compile":
        seconds = json.loads(base[1].read_text())["train"]["compile_seconds"]
        arguments = {"passes": [Slow(3 * seconds / 2)]}  # for each forward and backward graph of two targets
    lines = check(run(tmp_path, **arguments), base[1], status=1)
    assert any(line.startswith(begins) and reason in line for line in lines), lines


@pytest.fixture
def data(base):
    """The record of the base, and its contract."""
    (record,), contract = (json.loads(path.read_text()) for path in base)
    return record, contract


def test_equal_runs_fulfill_the_contract_and_a_worse_contract_is_broken(base, data, tmp_path, monkeypatch, check):
    Times(monkeypatch, train=PHASES, infer=PHASES)
    again = run(tmp_path)
    assert check(again, base[1]) == []
    strict = data[1] | {"torch": "1.0", "margin": 0.1}
    strict["train"] |= {"graphs": 1, "graph_breaks": {"anything": 3}, "speedup": 3}
    strict["infer"]["graphs"] = 0
    for phase in ("train", "infer"):
        strict[phase]["compile_seconds"] = 600  # another program may use the machine in one of the runs
    (tmp_path / "strict.json").write_text(json.dumps(strict))
    assert check(again, tmp_path / "strict.json", status=1) == [
        "train.graphs: 2, allowed 1: net 1, side 1",
        "train.speedup: 2, allowed 2.727: eager 12 ms, compiled 6 ms",
        "infer.graphs: 2, allowed 0: net 1, side 1",
    ]
    note = f"the contract is for torch 1.0, and the report is of torch {importlib.metadata.version('torch')}"
    assert note in check.stderr
    found = json.loads("\n".join(check(again, tmp_path / "strict.json", "--json", status=1)))
    of_infer = {"phase": "infer", "figure": "graphs", "value": 2, "allowed": 0, "reason": "net 1, side 1"}
    assert (len(found["breaches"]), found["breaches"][-1], found["notes"]) == (3, of_infer, [note])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, r: c.update(grahps=1), "field='grahps' is unknown"),
        (lambda c, r: c["train"].update(graph=1), "did you mean 'train.graphs'?"),
        (lambda c, r: c["train"].update(graphs="1"), "train.graphs='1' has the wrong type"),
        (lambda c, r: c["train"]["graph_breaks"].update(x=True), "train.graph_breaks.x=True has the wrong type"),
        (lambda c, r: c.update(margin=-1), "margin=-1 must be a number from 0 on"),
        (lambda c, r: c.update(margin=float("nan")), "margin=nan must be a number from 0 on"),
        (lambda c, r: c["train"].update(targets=[[1]]), "train.targets must be a list of names"),
        (lambda c, r: [c.pop(phase) for phase in ("train", "infer")], "checks nothing"),
        (lambda c, r: c.update(version=2), "version=2, but this library reads version 1"),
        (lambda c, r: c.update(call="test"), "contains no record of a call of test"),
        (lambda c, r: c["train"].update(peak_memory_mib=1.0), "no figure for train.peak_memory_mib"),
        (lambda c, r: r.update(version=2), "the record has version 2, not 1"),
        (lambda c, r: r.update(exception="ValueError"), "ValueError ended the call"),
        (lambda c, r: r["report"].pop("infer"), "the report has no infer phase"),
        (lambda c, r: r["report"]["infer"].update(compile_seconds=None, verdict=None), "no infer phase, or no step"),
        (lambda c, r: r["report"]["train"].pop("diagnostics"), "the record is damaged: KeyError: 'diagnostics'"),
    ],
)
def test_what_cannot_be_compared_is_an_error(change, message, data, check, check_data):
    record, contract = data
    change(contract, record)
    assert check_data(record, contract, status=2) == []
    assert message in check.stderr


def test_missing_and_damaged_files_are_errors(base, tmp_path, check):
    none, damaged = tmp_path / "none.json", tmp_path / "damaged.json"
    damaged.write_text("[")
    for path, against in ((none, base[1]), (damaged, base[1]), (base[0], none)):
        check(path, against, status=2)
        assert "cannot be read" in check.stderr


def test_figures_without_certainty_are_no_breach(data, tmp_path, check, check_data):
    """Steps that vary as on a busy machine, and a compile that took twice as long."""
    record, allowed = data
    train = record["report"]["train"]
    train["compiled_step_ms"], train["compile_seconds"] = 20.0, 2 * train["compile_seconds"]
    train["diagnostics"]["speedup_interval"] = [0.48, 1.8]
    assert check_data(record, allowed) == []
    check_data(record, {}, "--write")
    assert "left out train.speedup, because step times vary by more than the margin" in check.stderr
    assert "speedup" not in json.loads((tmp_path / "contract.json").read_text())["train"]


def test_memory_above_the_margin_is_a_breach(data, check_data):
    record, allowed = data
    allowed["train"]["peak_memory_mib"] = 100.0
    for name in ("peak_memory_mib", "peak_memory_at_most_mib"):
        for mib, status in ((119.0, 0), (121.0, 1)):
            record["report"]["train"]["diagnostics"] |= {"peak_memory_mib": None, name: mib}
            lines = check_data(record, allowed, status=status)
            assert [line[:43] for line in lines] == ["train.peak_memory_mib: 121, allowed 120: th"] * status


def test_a_figure_with_a_limit_is_compared_without_other_code(data, monkeypatch):
    record, _ = data
    saved = record["report"]["train"]["net_seconds_saved"] = 10.0
    monkeypatch.setitem(contract._MEASURED, "net_seconds_saved", "least")
    for allowed, breaches in ((1.1 * saved, []), (1.3 * saved, ["train.net_seconds_saved: 10, allowed 10.83"])):
        found, missing = contract.compare(record, {"margin": 0.2, "train": {"net_seconds_saved": allowed}})
        assert ([str(breach).rpartition(": ")[0] for breach in found], missing) == (breaches, [])


@pytest.mark.gpu
def test_more_memory_breaks_the_contract(tmp_path, check):
    """A buffer of 1 GiB, because cuBLAS has workspaces of 64 MiB."""

    def run_with_ballast(folder, elements):
        def make():
            module = Two()
            module.register_buffer("ballast", torch.zeros(elements))
            return module

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # because a report has only peaks above those of earlier work
        return run(folder, make=make, accelerator="gpu", mode="reduce-overhead")

    check(run_with_ballast(tmp_path / "before", 1), tmp_path / "contract.json", "--write")
    lines = check(run_with_ballast(tmp_path / "after", 2**28), tmp_path / "contract.json", status=1)
    assert any(line.startswith("train.peak_memory_mib: ") for line in lines), lines


PROGRAM = """
import sys, time
started = time.perf_counter()
from compile_callbacks.cli import main
status = main(sys.argv[1:])
print(status, "torch" in sys.modules, "lightning" in sys.modules, time.perf_counter() - started)
"""


def test_check_answers_in_under_a_second_and_does_not_import_torch(base):
    command = [sys.executable, "-c", PROGRAM, "check", str(base[0]), "--against", str(base[1])]
    printed = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(3)]
    assert {tuple(words[:3]) for words in printed} == {("0", "False", "False")}
    assert min(float(words[3]) for words in printed) < 1
