"""The sentences of a report, from its JSON: the verdict of each phase, and the advice."""

from __future__ import annotations

import pytest

from compile_callbacks import CompileReport

pytestmark = pytest.mark.all_versions

FASTER = "4.7x faster (558 → 120 ms), saved 1 min 1 s after 20 s of compiling"
AGAIN = "; step times vary by ±{}, so other programs may use the machine: measure again"
AGAIN_TRAIN = "measure train again while no other program uses the machine"
EAGER, TRY_EAGER = "train_mode='eager' leaves the phase eager", "; try train_mode='eager'"
RECOMPILE = {"kind": "recompile", "target": "net", "phase": "train", "reason": "batch size 13, was 32"}
BREAK = {"kind": "graph_break", "target": "net", "phase": "train", "reason": "print"}
WEIGHTS = "freezing has no effect while weights may change"
FREEZING = {"kind": "freezing", "target": "net", "reason": f"{WEIGHTS}\n  Explanation: \n  Hint: none"}
DROPOUT = {"kind": "verify", "verdict": "not compared", "reason": "dropout", "fix": "this helps"}
NOT_COMPARED = "train has a graph that was not compared with eager (dropout): this helps"
SLOWER = "slower by 12% (100 → 112 ms): torch reports no cause"
UNPAID = "1.11x faster (10.0 → 9.00 ms), but 20 s compiling are not repaid: lost 1 min 1 s so far, break-even after 300"
NO_DIFFERENCE = "no difference (21.7 vs 20.6 ms, spread ±1.40), 20 s spent compiling"
UNCLEAR = f"no difference (17.1 vs 83.1 ms, spread ±0.50), 20 s spent compiling{AGAIN}".replace("by ±{}", "too much")
FEW, MORE = "too few samples (17.1 → 83.1 ms): 3 of one kind, 5 of each are needed", "run more train steps"
NO_EAGER = "too few samples: no eager steps of the same workload, 20 s spent compiling"
UNCOMPILED = "not compiled: most steps called no compiled graph"
UNDECIDED = "no candidate is chosen yet: the phase ran too few steps"
ONE, LAST = "possible cause: 1 recompile (", "possible cause: 2 recompiles (the last: "
LOST, BASELINE = "; lost 1 min 2 s so far", " in the first call, with a larger baseline_steps"
CHOSEN, WON = ("eager", "chosen", None), ("eager", "chosen", "won in an earlier run")
SHORT = "the 3 steps that remain could save 0.1 s at best"


def compared(verdict, eager_ms, compiled_ms, spreads=(1.0, 1.0), net=61.0, **details):
    """The data of a phase with 20 s of compiling."""
    has_speedup = eager_ms is not None and verdict not in ("no difference", "too few samples")
    whole = {"mode": "default", "verdict": verdict, "compile_seconds": 20.0, "samples": 3, "break_even_steps": 300.0}
    ms = {"eager_step_ms": eager_ms, "compiled_step_ms": compiled_ms, "net_seconds_saved": net}
    diagnostics = {"eager_spread_ms": spreads[0], "compiled_spread_ms": spreads[1], **details}
    recompiles = sum(event["kind"] == "recompile" for event in details.get("events", ()))
    speedup = eager_ms / compiled_ms if has_speedup else None
    return {**whole, **ms, "recompiles": recompiles, "speedup": speedup, "diagnostics": diagnostics}


def tuned(*trials, mode="eager", **figures):
    """The data of a phase with a `Tune`, from the candidate, the verdict and the reason of each trial."""
    names = ("candidate", "verdict", "reason", "median_ms")
    trials = [dict(zip(names, (*trial, None), strict=True)) for trial in trials]
    return {"mode": mode, "diagnostics": {"trials": trials}, **figures}


def faster(compiled_ms=119.6, eager_ms=558.0, spreads=(1.0, 1.0), **details):
    return compared("faster", eager_ms, compiled_ms, spreads, **details)


def slower(compiled_ms, *events, spreads=(1.0, 1.0)):
    return compared("slower", 100.0, compiled_ms, spreads, events=events)


def equal(compiled_ms, eager_ms=100.0, spreads=(1.0, 1.0), net=61.0):
    return compared("no difference", eager_ms, compiled_ms, spreads, net)


# The data of the phase, the line, and the advice. A "…" stands for any text.
SENTENCES = [
    # Step times that vary by more than 25% ask for another run.
    (faster(spreads=(270.0, 59.0)), FASTER, None),
    (faster(spreads=(40.0, 269.7)), FASTER + AGAIN.format("113%"), None),
    (compared("compile time not repaid", 10.0, 9.0, net=-61.0), f"{UNPAID} compiled steps",
     "train longer, or set cache_dir…"),
    (slower(112.0, spreads=(10.0, 90.0)), SLOWER + AGAIN.format("40%"), AGAIN_TRAIN),
    # Slower steps are a percentage below twice the time. A cause is only possible.
    (slower(112.0), SLOWER + TRY_EAGER, EAGER),
    (slower(199.9), "2.0x slower (100 → 200 ms): torch reports no cause…", EAGER),
    (slower(112.0, RECOMPILE), f"slower by 12% …: {ONE}batch size 13, was 32){TRY_EAGER}", EAGER),
    (slower(112.0, RECOMPILE, RECOMPILE), f"slower by 12% …: {LAST}batch size 13, was 32){TRY_EAGER}", EAGER),
    # Medians that are not close are not called equal.
    (equal(20.6, 21.7, (2.8, 1.0), None), NO_DIFFERENCE, "train_mode='auto' tries other modes"),
    (equal(107.0, spreads=(90.0, 9.0)), f"no difference (100 …{AGAIN.format('45%')}", AGAIN_TRAIN),
    (equal(83.1, 17.1, (1.0, 1.0)), UNCLEAR, AGAIN_TRAIN),
    # The line names the net loss that the table shows.
    (compared("slower", 17.1, 83.1, net=-62.3), f"4.9x slower …reports no cause{LOST}{TRY_EAGER}", EAGER),
    (compared("too few samples", 17.1, 83.1, net=-62.3), FEW + LOST, MORE),
    (compared("not compiled", 17.1, 83.1, net=-0.04), UNCOMPILED, None),
    (faster(events=[FREEZING]), f"{FASTER}; {WEIGHTS}", None),
    # The side that lacks samples.
    (compared("too few samples", None, 5.0, eager_samples=0, compiled_samples=9), NO_EAGER, MORE + BASELINE),
    (compared("too few samples", 10.0, 5.0, eager_samples=50), "too few samples (10.0 →…", MORE),
    # Noise does not hide a graph break.
    (compared("not comparable", 137.0, 13.9, events=[BREAK]), "not comparable (137 → 13.9 ms): step…", "train has …"),
    # A graph that was not compared is the last advice.
    (faster(50.0, 100.0, events=[DROPOUT]), "2.0x faster…", NOT_COMPARED),
    # The reason why a Tune keeps eager.
    (tuned(CHOSEN, ("default", "not tried", SHORT)), f"eager kept: default not tried ({SHORT})", None),
    (tuned(CHOSEN, ("default", "not faster", "1.01x"), ("m", "not tried", SHORT), net_seconds_saved=-20.0),
     "eager kept: default not faster, m not tried; lost 20 s so far", None),
    (tuned(WON, ("default", "beaten", None), ("m", "not tried", "x")),
     "eager kept: default beaten, m not tried (won in an earlier run)", None),
    (tuned(("eager", "undecided", None), ("default", "undecided", None), mode="tune(default)"), UNDECIDED, None),
    (tuned(("m", "chosen", None), mode="m", verdict="no difference", eager_step_ms=10.0, compiled_step_ms=9.9),
     "no difference (10.0 vs 9.90 ms…", None),
    # A phase with only baseline steps.
    ({"mode": "default", "eager_step_ms": 3.0}, "not compiled yet: only eager baseline steps have run", None),
    ({"mode": "default"}, None, None),
    # A comparison that ended the run.
    ({"mode": "default", "verified": "differs 1", "eager_step_ms": 3.0, "graphs": 1},
     "the comparison with eager ended the run: differs 1", "find out why train differs from eager…"),
    ({"mode": "eager", "eager_step_ms": 3.0}, None, None),
]  # fmt: skip


def agrees(found, expected):
    """Whether a sentence is the expected one, in which "…" stands for any text."""
    if found is None or expected is None:
        return found == expected
    begin, dots, end = expected.partition("…")
    return found.startswith(begin) and found.endswith(end) if dots else found == expected


@pytest.mark.parametrize(("train", "line", "advice"), SENTENCES)
def test_a_phase_has_its_line_and_advice(train, line, advice):
    lines = str(CompileReport.from_dict({"train": train})).splitlines()
    for begin, expected in (("train   ", line), ("next: ", advice)):
        found = next((text.removeprefix(begin) for text in lines if text.startswith(begin)), None)
        assert agrees(found, expected), found

    if line == NO_DIFFERENCE:  # the table shows the same spread
        assert ["eager", "step", "ms", "21.70", "±", "1.40"] in [text.split() for text in lines]


def test_a_clear_result_of_one_phase_comes_before_noise_of_the_other():
    report = CompileReport.from_dict({"train": equal(107.0, spreads=(90.0, 9.0)), "infer": slower(194.0)})
    assert str(report).endswith("next: infer_mode='eager' leaves the phase eager")
