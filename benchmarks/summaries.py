"""Tables and sentences of the docs that join several result files of a machine, such as results/h200."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence

import verification
from tables import Row, compare_blocks, find, in_order, ms, origins, print_table, read, times, with_interval

FROZEN = "reduce-overhead, frozen"
WAYS = {  # by file: the mode, and the rows that run eagerly, by hand and with this library
    "resnet50_train*": [
        ("default", "eager", "child compiled by hand, default", 'InductorCompile("default")'),
        ("reduce-overhead", "eager", "child compiled by hand, reduce-overhead", 'InductorCompile("reduce-overhead")'),
    ],
    "resnet50_infer": [
        (f"{FROZEN}, bare loop", "eager", f"bare loop, {FROZEN} by hand", f"InductorBackend, {FROZEN}"),
        (f"{FROZEN}, `predict`", "predict, eager", f"predict, {FROZEN} by hand", f"predict, InductorCompile, {FROZEN}"),
    ],
    "ordinary_*": [
        ("default", "eager", "child compiled by hand, default", 'InductorCompile("default")'),
        ("reduce-overhead", "eager", "child compiled by hand, reduce-overhead", 'InductorCompile("reduce-overhead")'),
    ],
}
DDP = {"ddp_128": "default", "ddp": "default", "ddp_1024": "default", "ddp_reduce_overhead": "reduce-overhead"}
MODES = {"default": 'InductorCompile("default")', "reduce-overhead": 'InductorCompile("reduce-overhead")'}
LITTLE = 0.02  # the interquartile range of blocks, as a part of a step
WITH_INTERVALS = ("resnet50_*", "ordinary_*")  # files with an interval of each speedup


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


def workload(row: Row) -> str:
    """The workload of a row of `harness`."""
    phase = {"train": "training", "infer": "inference"}[row["phase"]]
    return f"{row['model']}, {phase}, batch {row['batch_size']}"


def speedup(before: Row, after: Row) -> str:
    """The ratio of two step times as a cell, with its 95% interval if both rows have at least five blocks."""
    blocks = compare_blocks(before.get("block_ms", ()), after.get("block_ms", ()))
    return with_interval(blocks) or times(before["step_ms"] / after["step_ms"])


def rounds(rows: list[Row], way: str, batch_size: int) -> Row:
    """The median of all rounds of a way under DDP, with the rounds as blocks; an empty row without rounds."""
    of_rounds = [row["step_ms"] for row in rows if (row["way"], row["batch_size"]) == (way, batch_size)]
    return {"step_ms": statistics.median(of_rounds), "block_ms": of_rounds} if of_rounds else {}


def comparisons(machine: str) -> Iterator[tuple[str, str, Row, Row, Row]]:
    """Workloads and modes, with the rows of eager, by hand and this library."""
    for file, ways in WAYS.items():
        rows = rows_of(f"{machine}/{file}")
        for name in in_order(rows, workload):
            of_name = [row for row in rows if workload(row) == name]
            for mode, *names in ways:
                yield name, mode, *(find(of_name, way) for way in names)
    for file, mode in DDP.items():
        rows = [row for row in rows_of(f"{machine}/{file}") if row["gpus"] == 2]
        rows = [row for row in rows if row.get("step_ms")]
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
    lines = [
        [name, mode, *(ms(row["step_ms"]) if row else "" for row in (eager, hand, ours)), speedup(eager, ours)]
        for name, mode, eager, hand, ours in comparisons(machine)
        if eager.get("step_ms") and ours.get("step_ms")
    ]
    print_from(machine, [*WAYS, *DDP, "fsdp2"], head, lines)


def with_cudagraphs(machine: str) -> None:
    """The part of `answer` with one GPU and CUDA graphs. The loop of inference stands in the cell of the workload."""
    lines = [
        [", ".join([name, *mode.split(", ")[2:]]), *(ms(row["step_ms"]) for row in (eager, hand, ours)),
         times(eager["step_ms"] / ours["step_ms"])]
        for name, mode, eager, hand, ours in comparisons(machine)
        if mode.startswith("reduce-overhead") and "DDP" not in name
        if all(row.get("step_ms") for row in (eager, hand, ours))
    ]  # fmt: skip
    print_table(["workload", "eager ms", "by hand ms", "this library ms", "speedup over eager"], lines)


def no_gain(machine: str) -> None:
    """The five compiled ways with the lowest speedups, of those that are not faster than eager by more than noise."""
    rows = [row for name in WITH_INTERVALS for row in rows_of(f"{machine}/{name}")]
    rows = [row for row in rows if row["faster"] is False and "eager" not in row["way"]]
    lines = []
    for row in sorted(rows, key=lambda row: row["speedup"])[:5]:
        verdict = "slower" if row["speedup_interval"][1] < 1 else "no clear difference"
        lines.append([workload(row), row["way"], with_interval(row), verdict])
    print_table(["workload", "way", "speedup over eager (95% interval)", "steps"], lines)


def modes(machine: str) -> None:
    """Eager and the modes of this library, for each ordinary model."""
    rows = rows_of(f"{machine}/ordinary_*")
    ways = {**MODES, '"auto"': 'InductorCompile("auto")'}
    lines = []
    for model in in_order(rows, lambda row: row["model"]):
        eager, *ours = (find(rows, way, model=model) for way in ("eager", *ways.values()))
        cells = (f"{ms(row['step_ms'])} ms, {with_interval(row)}" if row["step_ms"] else "failed" for row in ours)
        lines.append([f"{model}, batch {eager['batch_size']}", f"{ms(eager['step_ms'])} ms", *cells])
    print_from(machine, ["ordinary_*"], ["model", "eager", *ways], lines)


def fastest(machine: str) -> None:
    """How often `reduce-overhead` is faster than eager and `default` on the ordinary models, and the speedups."""
    rows, ways = rows_of(f"{machine}/ordinary_*"), ("eager", *MODES.values())
    of_models = [[find(rows, way, model=model) for way in ways] for model in in_order(rows, lambda row: row["model"])]
    of_models = [of_model for of_model in of_models if all(row["step_ms"] for row in of_model)]
    wins = [
        sum(compare_blocks(of_model[other]["block_ms"], of_model[2]["block_ms"])["faster"] is True
            for of_model in of_models)
        for other in (0, 1)
    ]  # fmt: skip
    ranges = []
    for number in (1, 2):
        ratios = [of_model[0]["step_ms"] / of_model[number]["step_ms"] for of_model in of_models]
        ranges.append(f"{min(ratios):.2f} to {max(ratios):.2f} times")
    print(
        f"`reduce-overhead` was clearly faster than eager on {wins[0]} of {len(of_models)} models, and clearly faster "
        f"than `default` on {wins[1]}. Its steps were {ranges[1]} as fast as eager steps, and those of `default` "
        f"{ranges[0]}"
    )


def against_hand(machine: str) -> None:
    """The steps of this library against those by hand: steady workloads, and others with CUDA graphs."""
    steady, noisy = list[float](), list[float]()
    for _, mode, _, hand, ours in comparisons(machine):
        if all(row.get("spread_ms") is not None for row in (hand, ours)):
            if "`predict`" in mode and hand["batch_size"] == 1:  # the page explains this case
                continue
            is_steady = all(row["spread_ms"] < LITTLE * row["step_ms"] for row in (hand, ours))
            if is_steady or mode.startswith("reduce-overhead"):
                (steady if is_steady else noisy).append(ours["step_ms"] / hand["step_ms"])
    text = (
        f"In {len(steady)} rows, the interquartile range of the blocks is below {LITTLE:.0%} of a step, by hand and "
        f"with this library. There, this library takes {min(steady):.2f} to {max(steady):.2f} times as long as by hand"
    )
    if noisy:
        text += (
            f". In the other rows with one GPU and mode `reduce-overhead`, it takes {min(noisy):.2f} to "
            f"{max(noisy):.2f} times as long"
        )
    print(text)


def compile_costs(machine: str) -> None:
    """The compile times and the break-even steps of the ordinary models."""
    rows = [row for row in rows_of(f"{machine}/ordinary_*") if row["way"] in MODES.values() and row["step_ms"]]
    seconds = [row["compile_seconds"] for row in rows]
    steps = [row["break_even_steps"] for row in rows if row["break_even_steps"] is not None]
    print(
        f"compiling took {min(seconds):.0f} to {max(seconds):.0f} s, and a run saves time after {min(steps):,.0f} to "
        f"{max(steps):,.0f} steps. In {len(rows) - len(steps)} of {len(rows)} runs, the report sees no difference yet "
        "and names no number"
    )


def predict_at_batch_1(machine: str) -> None:
    """A step of `trainer.predict` with and without this library."""
    rows = [row for row in rows_of(f"{machine}/resnet50_infer") if row["batch_size"] == 1]
    ours, hand = (find(rows, WAYS["resnet50_infer"][1][way]) for way in (3, 2))
    print(f"{ours['step_ms']:.2f} ms instead of {hand['step_ms']:.2f} ms")


def same_code(machine: str) -> None:
    """The largest ratio of the eager steps of ResNet-50 at batch 16 in several tables."""
    work = {"model": "resnet50", "phase": "train", "batch_size": 16}
    steps = [
        find(rows_of(f"{machine}/resnet50_train*"), "eager", **work)["step_ms"],
        find(rows_of(f"{machine}/background_resnet50_16"), "eager")["steady_ms"],
    ]
    print(f"up to {max(steps) / min(steps):.1f} times as long")


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


def behind_eager(machine: str) -> None:
    """The step until which a run in the background has taken longer than an eager run, because of its costs."""
    steps, never = [], 0
    for result in read(f"{machine}/background_*"):
        ours, eager_ms = find(result["rows"], "background"), find(result["rows"], "eager")["steady_ms"]
        behind_ms = ours["seconds"] * 1000 - ours["steps"] * eager_ms
        if eager_ms > ours["steady_ms"]:
            steps.append(ours["steps"] + behind_ms / (eager_ms - ours["steady_ms"]))
        else:
            never += 1
    text = f"until step {min(steps):,.0f} to {max(steps):,.0f}"
    print(f"{text}, and with {never} workload to the end" if never else text)


def wrong_gradients(machine: str) -> None:
    """The share of wrong gradients that verification calls equal, as a table."""
    verification.show([row for row in rows_of(f"{machine}/verification") if row["gradient"] != "right"])


def first_compile(machine: str) -> None:
    """The first step of a ResNet-50 that is compiled by hand."""
    seconds = [row["longest_s"] for row in rows_of(f"{machine}/background_resnet50_*") if row["way"] == "by hand"]
    print(" to ".join(dict.fromkeys(f"{of_run:.0f}" for of_run in (min(seconds), max(seconds)))) + " s")


def chart_origin(machine: str) -> None:
    """The machine, the versions and the day of the bars of the chart, without the commits."""
    found = origins([*read(f"{machine}/resnet50_train"), *read(f"{machine}/ordinary_*")])
    print(re.sub(r", commit .*(?=, [-\d]+$)", "", found))


def of_by_hand(machine: str) -> None:
    """The steps of the bars against those by hand, in the same mode."""
    ratios = [
        ours["step_ms"] / hand["step_ms"]
        for name, mode, _, hand, ours in comparisons(machine)
        if mode == "reduce-overhead" and "DDP" not in name
    ]
    print(f"{statistics.geometric_mean(ratios):.2f} times as long")


def whole_graphs(machine: str) -> None:
    """Whole graphs against split graphs, at the batch size with several rounds."""
    rows = rows_of(f"{machine}/ddp")
    size = rows[0]["batch_size"]
    whole, split = (rounds([row for row in rows if row["gpus"] == 2], way, size) for way in ("ours", "by hand"))
    print(f"a step with {size} images on each GPU took {whole['step_ms']:.0f} ms instead of {split['step_ms']:.0f} ms")


def max_pool(machine: str) -> None:
    """Training with and without the example's pass, as a table."""
    without = 'InductorCompile("reduce-overhead")'
    rows, lines = rows_of(f"{machine}/resnet50_train*"), []
    for size in in_order(rows, lambda row: row["batch_size"]):
        ways = ("eager", without, f"{without}, TritonMaxPoolBackward")
        found = [find(rows, way, batch_size=size) for way in ways]
        lines.append([workload(found[0]), *(ms(row["step_ms"]) for row in found), speedup(*found[1:])])
    head = ["workload", "eager ms", "without the pass ms", "with the pass ms", "ratio (95% interval)"]
    print_from(machine, ["resnet50_train*"], head, lines)


def memory_peaks(machine: str) -> None:
    """The peak memory of a model like GPT-2: eager, the mode default, and settings for less memory."""
    rows = {row["way"]: row["peak_memory_mib"] for row in rows_of(f"{machine}/memory")}
    default, few = MODES["default"], 'baseline_steps=0, verify="off"'
    print(
        f"eager steps need {rows['eager']:,.0f} MiB, the mode default {rows[default]:,.0f} MiB, the first two "
        f"settings {rows[few]:,.0f} MiB, and all three {rows[f'{few}, activation_memory_budget=0.5']:,.0f} MiB"
    )


def warm_seconds(machine: str) -> None:
    """The first compiled step of a ResNet-18 with an empty `cache_dir`, and with one of an earlier run."""
    rows = read(f"{machine}/warm_start*")[-1]["rows"]
    cold, warm = (find(rows, f"library, {start}")["seconds"] for start in ("cold", "warm"))
    print(f"{cold:.0f} s without and {warm:.1f} s with the folder of an earlier run")


SUMMARIES = [
    answer, with_cudagraphs, no_gain, modes, fastest, against_hand, compile_costs, predict_at_batch_1, tiny_overhead,
    cost_of_comparison, same_code, fsdp2_step, whole_graphs, max_pool, longest_step, longest_steps, behind_eager,
    first_compile, chart_origin, of_by_hand, memory_peaks, warm_seconds, wrong_gradients,
]  # fmt: skip
