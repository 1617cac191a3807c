"""The sentences of a report: the claims of each verdict line, and the advice. Also the rows of the table."""

from __future__ import annotations

import dataclasses

import pytest

from compile_callbacks import CompileReport, PhaseReport
from compile_callbacks.report.data import PhaseDiagnostics
from compile_callbacks.report.summary import describe_verdict, next_step
from compile_callbacks.report.table import main_table

pytestmark = pytest.mark.all_versions


def report(verdict, eager_ms, compiled_ms, spreads=(1.0, 1.0), **details):
    """The report of a phase with 20 s of compiling and a net of 61 s."""
    speedup = None if verdict == "no difference" or eager_ms is None else eager_ms / compiled_ms
    return PhaseReport(
        mode="default",
        verdict=verdict,
        compile_seconds=20.0,
        recompiles=sum(event["kind"] == "recompile" for event in details.get("events", ())),
        eager_step_ms=eager_ms,
        compiled_step_ms=compiled_ms,
        speedup=speedup,
        break_even_steps=300,
        net_seconds_saved=-61.0 if verdict == "compile time not repaid" else 61.0,
        diagnostics=PhaseDiagnostics(eager_spread_ms=spreads[0], compiled_spread_ms=spreads[1], **details),
    )


def line(*arguments, **details):
    return describe_verdict("train", report(*arguments, **details))


def todo(*arguments, **details):
    return next_step(CompileReport(train=report(*arguments, **details)))


RECOMPILE = {"kind": "recompile", "target": "net", "phase": "train", "reason": "batch size 13, was 32"}
SAVED = "saved 1 min 1 s after 20 s of compiling"


@pytest.mark.parametrize("spreads", [(40.0, 269.7), (300.0, 10.0)])
@pytest.mark.parametrize(
    ("verdict", "compiled_ms"),
    [("faster", 119.6), ("compile time not repaid", 119.6), ("slower", 800.0), ("no difference", 557.0)],
)
def test_a_line_whose_step_times_vary_too_much_says_measure_again(verdict, compiled_ms, spreads):
    larger = max(spreads[0] / 558.0, spreads[1] / compiled_ms) / 2
    text = line(verdict, 558.0, compiled_ms, spreads)
    noise = f"; step times vary by ±{larger:.0%}, so other programs may use the machine: measure again"
    assert text.endswith(noise) == (larger > 0.25)
    assert ("vary" in text) == (larger > 0.25)


def test_a_line_of_steady_step_times_claims_its_figures():
    assert line("faster", 558.0, 119.6, (20.0, 59.0)) == f"4.7x faster (558 → 120 ms), {SAVED}"


@pytest.mark.parametrize(
    ("compiled_ms", "size"),
    [(112.0, "slower by 12%"), (194.0, "slower by 94%"), (199.9, "2.0x slower"), (450, "4.5x slower")],
)
def test_a_slower_phase_is_a_percentage_below_twice_the_time(compiled_ms, size):
    assert line("slower", 100.0, compiled_ms).startswith(f"{size} (100 → {compiled_ms:.0f} ms): torch reports no cause")


def test_the_cause_of_slower_steps_is_only_a_possible_cause():
    text = line("slower", 100.0, 112.0, events=(RECOMPILE,))
    assert "possible cause: 1 recompile (batch size 13, was 32); try train_mode='eager'" in text
    text = line("slower", 100.0, 112.0, events=(RECOMPILE, RECOMPILE))
    assert "possible cause: 2 recompiles (the last: batch size 13, was 32)" in text


def test_noise_is_no_reason_to_change_the_settings():
    assert todo("slower", 100.0, 112.0) == "train_mode='eager' leaves the phase eager"
    for verdict in ("slower", "no difference"):
        again = "measure train again while no other program uses the machine"
        assert todo(verdict, 100.0, 112.0, (90.0, 9.0)) == again


def test_steps_that_the_helper_process_slows_need_a_processor_more():
    advice = "the helper process slowed train steps from 54.0 to 379 ms: leave it a processor, for example with"
    assert todo("faster", 54.0, 50.0, waiting_step_ms=379.0).startswith(advice)
    assert todo("faster", 54.0, 50.0, waiting_step_ms=107.0) is None


def test_the_advice_about_too_few_samples_names_the_side_that_lacks_them():
    few = report("too few samples", None, 5.0, eager_samples=0, compiled_samples=50)
    assert next_step(CompileReport(train=few)) == "run more train steps, with baseline_steps=10"
    assert todo("too few samples", 10.0, 5.0, eager_samples=50, compiled_samples=3) == "run more train steps"


def test_a_graph_that_was_not_compared_is_the_last_advice():
    dropout = {"kind": "verify", "verdict": "not compared", "reason": "dropout", "fix": "this helps"}
    advice = "train has a graph that was not compared with eager (dropout): this helps"
    assert todo("faster", 100.0, 50.0, events=(dropout,)) == advice
    assert "train_mode='eager'" in todo("slower", 100.0, 112.0, events=(dropout,))


def test_medians_that_are_not_close_are_not_called_equal_and_the_table_shows_the_same_spread():
    found = report("no difference", 21.7, 20.6, (2.8, 1.0))
    expected = "no difference (21.7 vs 20.6 ms, spread ±1.40), 20 s spent compiling"
    assert describe_verdict("train", found) == expected
    assert dict(main_table([found])[0].rows)["eager step ms"] == "21.70 ± 1.40"
    assert line("no difference", 17.1, 83.1, (1.0, 99.6)) == (
        "no difference shown: step times vary too much (17.1 vs 83.1 ms, spread ±49.8), 20 s spent compiling"
    )


@pytest.mark.parametrize(
    ("details", "cell"), [({"eager_samples": 10, "compiled_samples": 241}, "10 / 241"), ({}, None)]
)
def test_the_table_shows_the_samples_of_both_sides(details, cell):
    found = PhaseReport(mode="default", diagnostics=PhaseDiagnostics(**details))
    rows = [row for group in main_table([found]) for row in group.rows]
    assert dict(rows).get("samples, eager / compiled") == cell


# ------------------------------------------------------------------------------------------ a verdict for each phase


@pytest.mark.parametrize("verdict", ["slower", "no difference", "too few samples", "not compiled"])
def test_a_line_names_the_net_loss_that_the_table_shows(verdict):
    phase = report(verdict, 17.1, 83.1, (1.0, 1.0))
    for net, loss in ((-62.3, "; lost 1 min 2 s so far"), (-0.04, ""), (61.0, ""), (None, "")):
        text = describe_verdict("train", dataclasses.replace(phase, net_seconds_saved=net))
        assert (loss in text) if loss else ("lost" not in text), text


def test_a_line_names_a_setting_without_effect():
    reason = "freezing has no effect while weights may change, as during fit"
    text = line("faster", 558.0, 291.0, events=({"kind": "freezing", "target": "net", "reason": reason},))
    assert text == f"1.92x faster (558 → 291 ms), {SAVED}; {reason}"


def tuned(*trials, mode="eager", **figures):
    """The line of a phase with a `Tune`, from the candidate, the verdict and the reason of each trial."""
    names = ("candidate", "verdict", "reason")
    trials = tuple({**dict(zip(names, trial, strict=True)), "median_ms": None} for trial in trials)
    return describe_verdict("train", PhaseReport(mode=mode, diagnostics=PhaseDiagnostics(trials=trials), **figures))


def test_a_line_says_why_a_tune_keeps_eager():
    eager, short = ("eager", "chosen", None), "the 3 steps that remain could save 0.1 s at best"
    one = tuned(eager, ("default", "not tried", short))
    assert one == f"eager kept: default not tried ({short})"
    two = tuned(eager, ("default", "not faster", "1.01x"), ("m", "not tried", short), net_seconds_saved=-20.0)
    assert two == "eager kept: default not faster, m not tried; lost 20 s so far"
    earlier = tuned(("eager", "chosen", "won in an earlier run"), ("default", "beaten", None), ("m", "not tried", "x"))
    assert earlier == "eager kept: default beaten, m not tried (won in an earlier run)"
    undecided = tuned(("eager", "undecided", None), ("default", "undecided", None), mode="tune(default)")
    assert undecided == "no candidate is chosen yet: the phase ran too few steps"


def test_a_phase_with_only_baseline_steps_says_so():
    phase = PhaseReport(mode="default", eager_step_ms=3.0)
    assert describe_verdict("infer", phase) == "not compiled yet: only eager baseline steps have run"
    assert describe_verdict("infer", PhaseReport(mode="default")) == ""
    assert describe_verdict("infer", dataclasses.replace(phase, mode="eager")) == ""
