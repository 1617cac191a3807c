"""An ordinary model in Lightning: AdamW, `self.log`, and each way of compiling it with its default settings.

Each way is a process. The ways prepare one after another; then they are timed in alternating blocks of steps with
nothing else running. The verdict and the reported speedup are those of the report, from its own samples during the
preparation. On a GPU everything runs in bf16 autocast.

python benchmarks/ordinary.py --model vit_b_16 [--batch-size 32] [--image-size 224] [--ways eager auto]
                              [--json FILE]
"""

from __future__ import annotations

from harness import Variant, Workload, add_pacing, rows_of
from tables import Row, in_order, parser_for, print_columns

BATCH_SIZES = {"bert": 16, "gpt2": 8, "efficientnet_b0": 64, "unet": 16}
WAYS = {
    "auto": Variant('InductorCompile("auto")', "fit", "callback", "auto"),
    "background": Variant('InductorCompile("default", background=True)', "fit", "callback", "default", background=True),
    "fast": Variant("InductorCompile()", "fit", "callback", "fast"),
    "eager": Variant("eager", "fit"),
    "default": Variant('InductorCompile("default")', "fit", "callback", "default"),
    "reduce-overhead": Variant('InductorCompile("reduce-overhead")', "fit", "callback", "reduce-overhead"),
    "hand": Variant("child compiled by hand, default", "fit", "child", "default"),
    "hand-reduce-overhead": Variant("child compiled by hand, reduce-overhead", "fit", "child", "reduce-overhead"),
    "lightning": Variant("Lightning's torch.compile(module)", "fit", "module"),
}
COLUMNS = {
    "way": "{}", "first_step_seconds": "{:.1f}", "compile_seconds": "{:.1f}", "step_ms": "{:.2f}", "speedup": "{:.2f}x",
    "speedup_interval": "{0[0]:.2f} to {0[1]:.2f}", "chosen": "{}", "verdict": "{}",
    "reported_speedup": "{:.2f}x", "break_even_steps": "{:.0f}", "peak_memory_mib": "{:.0f}", "reserved_mib": "{:.0f}",
}  # fmt: skip
RUN_STEPS = 15_000


def show(rows: list[Row]) -> None:
    """Print a table for each model: eager, by hand, then this library."""
    for model in in_order(rows, lambda row: row["model"]):
        of_model = [row for row in rows if row["model"] == model]
        print(f"{model}, batch {of_model[0]['batch_size']}:\n")
        print_columns(COLUMNS, sorted(of_model, key=lambda row: "InductorCompile" in row["way"]))


def main() -> None:
    parser = parser_for(__doc__)
    add_pacing(parser)
    parser.set_defaults(prepare_steps=80)  # for a verdict
    add = parser.add_argument
    add("--model", required=True, help="a name of models.py")
    add("--batch-size", type=int, help="by default 32, or that of the model")
    add("--image-size", type=int, default=224)
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    args = parser.parse_args()
    batch_size = args.batch_size or BATCH_SIZES.get(args.model, 32)
    work = Workload(args.model, "train", batch_size, args.image_size, args.device, RUN_STEPS, ordinary=True)
    group = work, [WAYS[name] for name in args.ways]
    show(rows_of(args, f"{args.model}, batch {batch_size}, AdamW", [group], own_caches=True))


if __name__ == "__main__":
    main()
