"""Tables and sentences of the docs that join several result files of a machine, such as results/h200."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import memory
import verification
from duels import WAYS as DUELISTS
from inference import WAYS as PREDICTING
from tables import (
    Row,
    compare_pairs,
    find,
    in_order,
    ms,
    origins,
    print_table,
    read,
    times,
    with_interval,
)

INFERENCE = {  # the mode, and the ways of `inference` that run it by hand and with this library
    "reduce-overhead, `predict`": ("reduce-overhead", "bare"),
    "reduce-overhead, frozen, `predict`": ("frozen by hand", "frozen"),
}
DDP = {"ddp": "default", "ddp_reduce_overhead": "reduce-overhead"}
Duel = dict[str, Row]  # the rows of a file of `duels`, by the keys of `DUELISTS`


def rows_of(pattern: str) -> list[Row]:
    """The rows of all files that match."""
    return [row for result in read(pattern) for row in result["rows"]]


def print_from(machine: str, files: Sequence[str], head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a table that joins several files, with the origins and the commands of these files."""
    results = [result for name in files for result in read(f"{machine}/{name}")]
    print(f"{origins(results)}:\n")
    print_table(head, lines)
    commands = "\n".join(result["command"] for result in results)
    print(f"```sh\n{commands}\n```")


def duels_of(machine: str) -> list[Duel]:
    """The duels of a machine."""
    return [{key: find(result["rows"], way) for key, way in DUELISTS.items()} for result in read(f"{machine}/duel_*")]


def workload(duel: Duel) -> str:
    """The workload of a duel in a sentence."""
    return f"{duel['bare']['model']} at batch {duel['bare']['batch_size']}"


def by_hand(duel: Duel) -> Row:
    """The way by hand in the mode that `InductorCompile()` chose."""
    return duel[duel["bare"]["mode"].partition(",")[0]]


def mean_of(found: Sequence[Row]) -> tuple[float, float, float]:
    """The geometric mean of independent speedups, and its 95% interval."""
    logs = [[math.log(value) for value in (row["speedup"], *row["speedup_interval"])] for row in found]
    center = statistics.fmean(log[0] for log in logs)
    margin = math.hypot(*((high - low) / 2 for _, low, high in logs)) / len(logs)
    return math.exp(center), math.exp(center - margin), math.exp(center + margin)


def joined(parts: Sequence[str]) -> str:
    """Parts of a sentence: "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def speedup(before: Row, after: Row) -> str:
    """The ratio of two step times as a cell, with its 95% interval if both rows have at least five blocks."""
    return with_interval(compare_pairs(before, after)) or times(before["step_ms"] / after["step_ms"])


def rounds(rows: list[Row], way: str, batch_size: int) -> Row:
    """The median of all rounds of a way under DDP, with the rounds as blocks; an empty row without rounds."""
    of_rounds = [row["step_ms"] for row in rows if (row["way"], row["batch_size"]) == (way, batch_size)]
    return {"step_ms": statistics.median(of_rounds), "block_ms": of_rounds} if of_rounds else {}


def comparisons(machine: str) -> Iterator[tuple[str, str, Row, Row, Row]]:
    """Workloads and modes other than those of the duels, with the rows of eager, by hand and this library."""
    rows = rows_of(f"{machine}/inference")
    for size in in_order(rows, lambda row: row["batch_size"]):
        for mode, ways in INFERENCE.items():
            found = [find(rows, PREDICTING[way], batch_size=size) for way in ("eager", *ways)]
            yield f"resnet50, inference, batch {size}", mode, *found  # type: ignore[misc]
    for file, mode in DDP.items():
        rows = [row for row in rows_of(f"{machine}/{file}") if row.get("step_ms")]  # a failed row has none
        for size in in_order(rows, lambda row: row["batch_size"]):
            name = f"resnet50, training, DDP on two GPUs, batch {size} each"
            yield name, mode, *(rounds(rows, way, size) for way in ("eager", "by hand", "ours"))  # type: ignore[misc]
    rows = rows_of(f"{machine}/fsdp2")
    if rows:
        eager = {"step_ms": statistics.mean(row["step_ms"] for row in rows if row["way"] == "eager")}
        yield "a billion parameters, training, FSDP2 on two GPUs", "default", eager, {}, find(rows, "default")


def answer(machine: str) -> None:
    """The time of a step: eager, by hand in the same mode, and with this library."""
    head = ["workload", "mode", "eager ms", "by hand ms", "this library ms", "speedup over eager (95% interval)"]
    lines = []
    for duel in duels_of(machine):
        eager, hand, ours = duel["eager"], by_hand(duel), duel["bare"]
        cells = [f"{ours['model']}, training, batch {ours['batch_size']}", ours["mode"]]
        cells += [ms(row["step_ms"]) for row in (eager, hand, ours)]
        lines.append([*cells, with_interval(compare_pairs(eager, ours))])
    lines += [
        [name, mode, *(ms(row["step_ms"]) if row else "" for row in (eager, hand, ours)), speedup(eager, ours)]
        for name, mode, eager, hand, ours in comparisons(machine)
        if eager.get("step_ms") and ours.get("step_ms")
    ]
    print_from(machine, ["duel_*", "inference", *DDP, "fsdp2"], head, lines)


def means(machine: str) -> None:
    """The geometric mean of the speedups of `InductorCompile()` over other ways, and the lowest and the highest one."""
    lines, found = [], duels_of(machine)
    for name in ("eager", "reduce-overhead", "default"):
        speedups = [compare_pairs(duel[name], duel["bare"]) for duel in found]
        mean = "{:.2f}x ({:.2f} to {:.2f})".format(*mean_of(speedups))
        lines.append([f"`{DUELISTS[name]}`" if name != "eager" else name, mean])
        lines[-1] += [times(end(row["speedup"] for row in speedups)) for end in (min, max)]
    print_table(["over", "geometric mean (95% interval)", "lowest", "highest"], lines)


def training(machine: str) -> None:
    """The step times of the duels, and the speedups of `InductorCompile()`."""
    lines = []
    for duel in duels_of(machine):
        eager, hand, ours = (duel[name] for name in ("eager", "reduce-overhead", "bare"))
        cells = [f"{ours['model']}, {ours['batch_size']}", ours["mode"]]
        cells += [ms(row["step_ms"]) for row in (eager, duel["default"], hand, ours)]
        compared = times(compare_pairs(eager, ours)["speedup"]), with_interval(compare_pairs(hand, ours))
        lines.append([*cells, *compared])
    head = ["model, batch size", "mode", "eager ms", "by hand, default ms", "by hand, reduce-overhead ms"]
    print_table([*head, "`InductorCompile()` ms", "over eager", "over reduce-overhead"], lines)


def slower(machine: str) -> None:
    """The duels that the faster way by hand wins clearly, and by a hundredth or more."""
    found, lost = duels_of(machine), []
    for duel in found:
        hand = min((duel["default"], duel["reduce-overhead"]), key=lambda row: row["step_ms"])
        compared = compare_pairs(duel["bare"], hand)
        if compared["faster"] and compared["speedup"] >= 1.01:
            lost.append(f"{workload(duel)} by {compared['speedup'] - 1:.0%}")
    text = (
        f"slower than the faster mode by hand, clearly and by 1% or more, in {len(lost) or 'none'} of {len(found)} rows"
    )
    print(f"{text}: {joined(lost)}" if lost else text)


def whole_steps(machine: str) -> None:
    """A CUDA graph of the whole step against `InductorCompile()`."""
    parts = [
        f"step of {workload(duel)} took {ms(duel['graph']['step_ms'])} ms instead of "
        f"{ms(duel['bare']['step_ms'])} ms, {with_interval(compare_pairs(duel['bare'], duel['graph']))}"
        for duel in duels_of(machine)
        if duel["graph"]
    ]
    print(f"a {'. A '.join(parts)}")


def no_gain(machine: str) -> None:
    """The duels in which compiled code without CUDA graphs is not clearly faster than eager code."""
    found = [(duel, compare_pairs(duel["eager"], duel["default"])) for duel in duels_of(machine)]
    rest = [f"{workload(duel)} ({times(compared['speedup'])})" for duel, compared in found if not compared["faster"]]
    text = f"clearly faster than eager in {len(found) - len(rest)} of {len(found)} rows"
    print(f"{text}, and not for {joined(rest)}" if rest else text)


def fastest(machine: str) -> None:
    """The mode that `InductorCompile()` chose, how often it is faster than eager and `default`, and the speedups."""
    found = duels_of(machine)
    chosen = sum(duel["bare"]["mode"].startswith("reduce-overhead") for duel in found)
    wins = [
        sum(compare_pairs(duel[other], duel["bare"])["faster"] is True for duel in found)
        for other in ("eager", "default")
    ]
    ranges = []
    for name in ("bare", "default"):
        ratios = [compare_pairs(duel["eager"], duel[name])["speedup"] for duel in found]
        ranges.append(f"{min(ratios):.2f} to {max(ratios):.2f} times")
    print(
        f'`"fast"` became `"reduce-overhead"` in {chosen} of {len(found)} workloads. Steps were clearly faster than '
        f"eager in {wins[0]}, and clearly faster than `net.compile()` in {wins[1]}. They were {ranges[0]} as fast as "
        f"eager steps, and those of `net.compile()` {ranges[1]}"
    )


def predict(machine: str) -> None:
    """The step times and speedups of `trainer.predict`, with weights as inputs and with frozen weights."""
    lines = [
        [f"{name.rpartition(', ')[2]}{', frozen weights' if 'frozen' in mode else ''}"]
        + [ms(row["step_ms"]) for row in (eager, hand, ours)]
        + [times(compare_pairs(eager, ours)["speedup"]), with_interval(compare_pairs(hand, ours))]
        for name, mode, eager, hand, ours in comparisons(machine)
        if mode in INFERENCE
    ]
    head = ["workload", "eager ms", "by hand, reduce-overhead ms", "`InductorCompile` ms", "over eager"]
    print_table([*head, "over reduce-overhead"], lines)


def memory_of_modes(machine: str) -> None:
    """The memory of "fast" relative to "default" and by hand, and of "auto" relative to the mode that it chose."""
    fields, ratios = ("peak_memory_mib", "last_reserved_mib"), defaultdict[str, list[float]](list)
    for result in (results := read(f"{machine}/memory_*")):
        default, hand, fast, auto = (find(result["rows"], way) for way in memory.MODES)
        winner = next((row for row in (default, fast) if row["mode"] == auto["mode"]), None)
        for field in fields:
            ratios[field] += [fast[field] / default[field]]
            ratios[f"auto {field}"] += [auto[field] / winner[field]] if winner else []
            ratios[f"by hand {field}"] += [fast[field] / hand[field]]
        ratios["trials"] += [auto["reserved_mib"] / fast["reserved_mib"]]
    most = {name: f"{max(values):.2f}" for name, values in ratios.items()}
    print(
        f"In {len(results)} workloads, the peak memory of `InductorCompile()` was at most {most[fields[0]]} times that "
        f'of `"default"`, but up to {most[f"by hand {fields[0]}"]} times that of '
        '`net.compile(mode="reduce-overhead")`: the first steps run eagerly, and the comparison needs memory. At the '
        f'end, torch held at most {most[fields[1]]} times as much as with `"default"`, and '
        f'{most[f"by hand {fields[1]}"]} times as much as by hand. With `"auto"`, it held up to {most["trials"]} times '
        "as much as with `InductorCompile()` during the trials, and at the end at most "
        f"{most[f'auto {fields[1]}']} times as much as with the mode that it chose"
    )


def same_code(machine: str) -> None:
    """The largest ratio of two tables' eager steps of the same workload."""
    others = read(f"{machine}/background_*")
    ratios = [
        find(other["rows"], "eager")["steady_ms"] / duel["eager"]["step_ms"]
        for duel in duels_of(machine)
        for other in others
        if other["title"].startswith("{model}, batch {batch_size},".format(**duel["eager"]))
    ]
    ratios += [1 / ratio for ratio in ratios]
    print(f"up to {max(ratios):.1f} times as long")


def tiny_overhead(machine: str) -> None:
    """The time that the callback adds to tiny steps."""
    rows = rows_of(f"{machine}/tiny_steps")
    added = [find(rows, "callback", loop=loop)["over_by_hand_us"] for loop in ("predict", "fit")]
    print("{:.0f} µs longer in `predict`, and {:.0f} µs longer in `fit`".format(*added))


def cost_of_comparison(machine: str) -> None:
    """The time that the comparison with eager adds to the first compiled call."""
    without, compared = (find(rows_of(f"{machine}/verification_cost"), f'verify="{way}"') for way in ("off", "warn"))
    seconds = compared["first_call_seconds"], without["first_call_seconds"]
    print("takes {:.1f} s instead of {:.1f} s".format(*seconds))


def fsdp2_step(machine: str) -> None:
    """The figures of FSDP2 in a sentence."""
    rows = rows_of(f"{machine}/fsdp2")
    ours, eager = find(rows, "default"), statistics.mean(row["step_ms"] for row in rows if row["way"] == "eager")
    print(f"an eager step takes {eager:.0f} ms, and a step with compiled blocks {ours['step_ms']:.0f} ms "
          f"({ours['speedup']:.2f}x). The peak memory is {ours['memory_ratio']:.2f} of eager's")  # fmt: skip


def longest_step(machine: str) -> None:
    """The longest step of a ResNet-50 in the background, and by hand."""
    rows = rows_of(f"{machine}/background_resnet50_16")
    print(f"{find(rows, 'background')['longest_s']:.1f} s instead of {find(rows, 'by hand')['longest_s']:.0f} s")


def longest_steps(machine: str) -> None:
    """The longest steps of all models in the background, and by hand."""
    rows = rows_of(f"{machine}/background_*")
    spans = [[row["longest_s"] for row in rows if row["way"] == way] for way in ("background", "by hand")]
    texts = [f"{min(seconds):.0f} to {max(seconds):.0f} s" for seconds in spans]
    print(f"the longest step of {len(spans[0])} workloads took {texts[0]} instead of {texts[1]}")


def meanwhile(machine: str) -> None:
    """How much longer the steps take while the helper process compiles, at most, than those of an eager run."""
    found = [{row["way"]: row for row in result["rows"]} for result in read(f"{machine}/background_*")]
    more = [rows["background"]["meanwhile_ms"] / rows["eager"]["steady_ms"] - 1 for rows in found]
    print(f"at most {max(more):.0%}")


def behind_eager(machine: str) -> None:
    """The step until which a run in the background has taken longer than an eager run, because of its costs."""
    steps, never = [], 0
    for result in read(f"{machine}/background_*"):
        ours, eager_ms = find(result["rows"], "background"), find(result["rows"], "eager")["steady_ms"]
        behind_ms = ours["seconds"] * 1000 - ours["steps"] * eager_ms
        # Without a difference in the run itself, that of two processes is noise.
        if ours["verdict"] in ("faster", "compile time not repaid"):
            steps.append(ours["steps"] + behind_ms / (eager_ms - ours["steady_ms"]))
        else:
            never += 1
    first, last = (f"{end(steps):,.0f}" for end in (min, max))
    text = f"until step {first}" if first == last else f"until step {first} to {last}"
    print(f"{text}, and to the end in {never} of {never + len(steps)}" if never else text)


def wrong_gradients(machine: str) -> None:
    """The share of wrong gradients that verification calls equal, as a table."""
    verification.show([row for row in rows_of(f"{machine}/verification") if row["gradient"] != "right"])


def first_compile(machine: str) -> None:
    """The first step of a ResNet-50 that is compiled by hand."""
    seconds = [row["longest_s"] for row in rows_of(f"{machine}/background_resnet50_*") if row["way"] == "by hand"]
    print(" to ".join(dict.fromkeys(f"{of_run:.0f}" for of_run in (min(seconds), max(seconds)))) + " s")


def chart_origin(machine: str) -> None:
    """The machine, the versions and the day of the bars of the chart, without the commits."""
    print(re.sub(r", commit .*(?=, [-\d]+( to |$))", "", origins(read(f"{machine}/duel_*"))))


def of_by_hand(machine: str) -> None:
    """The steps of the bars against those by hand in the same mode, and the longest one in relation."""
    found = [compare_pairs(duel["bare"], by_hand(duel)) for duel in duels_of(machine)]
    center, low, high = mean_of(found)
    slowest = max(found, key=lambda row: row["speedup"])
    bounds = "{:.2f} to {:.2f}".format(*slowest["speedup_interval"])
    print(
        f"{center:.2f} times as long in the geometric mean (95% interval {low:.2f} to {high:.2f}), and "
        f"{slowest['speedup']:.2f} times in the slowest workload ({bounds})"
    )


def whole_graphs(machine: str) -> None:
    """Whole graphs against split graphs under DDP."""
    parts, clear = [], 0
    for name, mode, _, split, whole in comparisons(machine):
        if "DDP" in name and split and whole:
            step = f"{whole['step_ms']:.1f} ms instead of {split['step_ms']:.1f} ms in mode `{mode}`"
            parts.append(f"{step}, {speedup(split, whole)}")
            clear += bool(compare_pairs(split, whole)["faster"])
    print(f"{', and '.join(parts)}. They were clearly faster in {clear or 'none'} of {len(parts)} modes")


def memory_peaks(machine: str) -> None:
    """The peak memory of a model like GPT-2: eager, the mode default, and settings for less memory."""
    rows = {row["way"]: row["peak_memory_mib"] for row in rows_of(f"{machine}/memory")}
    default, few = 'InductorCompile("default")', 'baseline_steps=0, verify="off"'
    print(
        f"eager steps need {rows['eager']:,.0f} MiB, the mode default {rows[default]:,.0f} MiB, the first two "
        f"settings {rows[few]:,.0f} MiB, and all three {rows[f'{few}, activation_memory_budget=0.5']:,.0f} MiB"
    )


def warm_seconds(machine: str) -> None:
    """The first compiled step of a ResNet-18 with an empty `cache_dir`, and with one of an earlier run."""
    rows = read(f"{machine}/warm_start*")[-1]["rows"]  # the newest torch
    cold, warm = (find(rows, f"library, {start}")["seconds"] for start in ("cold", "warm"))
    print(f"{cold:.0f} s without and {warm:.1f} s with the folder of an earlier run")


SUMMARIES = [
    answer, means, training, slower, whole_steps, no_gain, fastest, predict, tiny_overhead,
    memory_of_modes, cost_of_comparison, same_code, fsdp2_step, whole_graphs, longest_step, longest_steps, meanwhile,
    behind_eager, first_compile, chart_origin, of_by_hand, memory_peaks, warm_seconds, wrong_gradients,
]  # fmt: skip
