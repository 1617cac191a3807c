"""Graph breaks, Python state in ``forward``, and code of the user that must run once for each call."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch._dynamo.symbolic_convert import InstructionTranslator

from compile_callbacks import CompileError, InductorCompile
from tests.cases import zoo
from tests.cases.case import Case, check, net
from tests.cases.zoo import OLDEST, PYTHON_STATE, Calls, Counting
from tests.support.models import FEATURES, Classifier, Wrapper, fit, mlp
from tests.support.passes import Uncached
from tests.support.step_times import Times

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

HEALING = {"capture_scalar_outputs": True}


def case(name, make, steps=12, callback=None, **fields):
    """A case that trains only. In row 3, the report is not checked."""
    callback = {"infer_mode": None, "targets": "net", "baseline_steps": 0} | (callback or {})
    fields = {"validation": None, "predict": None, **fields}
    return Case(name=name, make=make, train=(4,) * steps, callback=callback, **fields)


def dynamo_fails(on, **settings):
    """Let Dynamo fail, with settings of torch, on each frame whose code has a name with this part."""
    real = InstructionTranslator.run

    def run(self):
        if on in self.f_code.co_name:
            raise MemoryError("no memory")
        return real(self)

    @contextlib.contextmanager
    def failing():
        with mock.patch.object(InstructionTranslator, "run", run), torch._dynamo.config.patch(**settings):
            yield

    return failing


def few_recompiles():
    return torch._dynamo.config.patch(recompile_limit=2)


COUNTS_AND_BREAKS = net(Counting, zoo.breaks_before_blocks)
ITEM, SEVERAL_BREAKS = (lambda run=run: Classifier(Calls(mlp(), run)) for run in (zoo.item, zoo.several_breaks))
FAILED = {"train.graphs": 0, "train.fallbacks": 1, "train.diagnostics.eager_calls": {"net": 12}}
CASES = [
    case("Dynamo fails behind a break", COUNTS_AND_BREAKS, codes=("CC301",), inside=dynamo_fails("torch_dynamo_resume"),
         expect=FAILED | {"train.graphs": 3, "train.graph_breaks": 1, "train.recompiles": 1}),
    case("Dynamo fails", COUNTS_AND_BREAKS, 12, {"infer_mode": "default"}, codes=("CC301",), validation=(4, 4),
         expect=FAILED | {"infer.graphs": 3, "infer.graph_breaks": 1, "infer.diagnostics.eager_calls": ...},
         inside=dynamo_fails("net_train")),  # no block is compiled alone
    case("Dynamo fails, and torch suppresses errors", COUNTS_AND_BREAKS, codes=("CC301",), expect=FAILED,
         inside=dynamo_fails("net_train", suppress_errors=True)),
    case("forbidden break", COUNTS_AND_BREAKS, callback={"train_mode": {"fullgraph": True}}, expect=FAILED,
         codes=("CC301",)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_graph_breaks_and_exceptions(case):
    assert check(case).report.train.fallbacks == case.expect.get("train.fallbacks", 0)


def test_code_that_raises_where_dynamo_fails_behind_a_break_runs_once(compiled):
    def raises(net, x):
        torch._dynamo.graph_break()
        raise ZeroDivisionError

    counting = compiled(Counting(raises), "default", None)
    with dynamo_fails("torch_dynamo_resume")(), pytest.raises(ZeroDivisionError):
        counting(torch.ones(4, FEATURES))
    assert counting.calls == 1


# By kind and number of eager steps. torch draws only while it traces; torch 2.11 mostly outside of the graph.
DRAWN_ONCE = {("global Random", 3)} if OLDEST else {
    ("random.sample", 0), ("random.sample", 3), ("sample of Random", 3), ("seeds", 0), ("seeds", 3), ("draws once", 0),
}  # fmt: skip


def state_case(kind, **callback):
    """Kinds break the graph and recompile in their own ways."""
    return case(kind, functools.partial(zoo.DrawsBetween, kind), 14, callback, inside=few_recompiles, row=3)


KINDS = [(kind, 3) for kind in [*PYTHON_STATE][1:]] + [(kind, 0) for kind in ("random.sample", "seeds", "draws once")]


@pytest.mark.parametrize(("kind", "baseline_steps"), KINDS)
def test_python_state_is_as_in_eager(kind, baseline_steps):
    kind_case = state_case(kind, baseline_steps=baseline_steps, verify="warn")
    events = check(kind_case).report.train.diagnostics.events
    codes = [event["code"] for event in events if event["kind"] == "fallback"]
    assert codes == ["CC306"] * ((kind, baseline_steps) in DRAWN_ONCE)


def test_verify_decides_what_a_constant_draw_does():
    kind = "global Random" if OLDEST else "random.sample"
    with pytest.raises(CompileError, match="CC306"):
        check(state_case(kind, baseline_steps=3, verify="raise"))
    with pytest.raises(AssertionError, match="not close"):
        check(state_case(kind, baseline_steps=3, verify="off"))


def test_a_forbidden_graph_break_is_an_error_if_the_user_wants_errors():
    callback = InductorCompile({"fullgraph": True}, None, targets="net", baseline_steps=0, on_error="raise")
    with pytest.raises(RuntimeError, match=r"compiling target 'net' for the train phase failed.*graph_break"):
        fit(callback, make=COUNTS_AND_BREAKS, validation=None)


def test_an_eager_call_at_the_recompile_limit_is_no_sample():
    make = net(Counting, Wrapper.forward)
    expect = FAILED | {"train.graphs": 2, "train.recompiles": 1, "train.diagnostics.eager_calls": {"net": 38}}
    limit = case("limit", make, 40, {"verify": "off"}, inside=few_recompiles, codes=("CC103",), expect=expect)
    train = check(limit).report.train
    steps = train.diagnostics.steps
    assert steps == {"compiled": 2, "eager": 38}
    assert train.verdict == "not compiled"
    compiled_series = [part for part in train.diagnostics.series if part["kind"] == "compiled"]
    assert sum(len(part["ms"]) for part in compiled_series) <= steps["compiled"]
    assert (train.samples or 0) <= steps["compiled"]


class Symbols(Uncached):
    """Counts the symbolic inputs of each graph of the forward pass."""

    hook, found = "pre_grad", []

    def __call__(self, graph, is_inference):
        values = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
        self.found.append(sum(isinstance(value, torch.SymInt) for value in values))


def test_an_integer_that_changes_becomes_an_input_at_the_recompile():
    symbols = Symbols()
    expect = {"train.graphs": 3, "train.recompiles": 2, "train.diagnostics.eager_calls": {"net": 14}}
    check(case("scaled", net(zoo.Scaled), 40, {"baseline_steps": 3, "passes": [symbols]}, expect=expect))
    assert symbols.found == [0, 1, 1]  # two recompiles, of which one is for the branch


def test_a_setting_removes_graph_breaks():
    for name, settings, breaks in (("breaks", {}, 2), ("healed", {"train_mode": {"dynamo": HEALING}}, 1)):
        assert check(case(name, SEVERAL_BREAKS, 8, settings, row=3)).report.train.graph_breaks == breaks


HEALED = f"dynamo={HEALING}"
MS = {"eager": 10_000, "default": 9_000, HEALED: 5_000}  # so slow that each candidate is worth its compile time


def auto(steps=150, make=ITEM, **settings):
    """The report of the train phase, and its trials."""
    callback = InductorCompile("auto", None, **settings)
    fit(callback, make=make, train=steps, validation=None)
    train = callback.report.train
    return train, {trial["candidate"]: trial for trial in train.diagnostics.trials}


def test_auto_sets_nothing_that_lets_torch_guess_a_size(monkeypatch):
    """The result depends on whether one row is selected."""
    Times(monkeypatch, train=MS)
    run = Calls(mlp(), lambda net, x: (h := net(x)) * (1 + h[: int(h.argmax()) % 2 + 1, 0].squeeze().dim()))
    _, trials = auto(make=lambda: Classifier(run))
    assert trials[HEALED]["verdict"] == "failed"
    assert trials[HEALED]["reason"] == "torch would guess that a size which it computes is not 1"


def test_auto_keeps_a_faster_setting_for_later_runs(monkeypatch, tmp_path):
    Times(monkeypatch, train=MS)
    train, trials = auto(cache_dir=tmp_path)
    assert (train.mode, trials[HEALED]["verdict"]) == (HEALED, "chosen")
    train, trials = auto(20, cache_dir=tmp_path)
    assert (train.mode, train.graph_breaks) == (HEALED, 0)
    assert trials[HEALED]["reason"].startswith("won in an earlier run;")
