"""Compile time and step time of training steps in a Trainer, against the batch size.

Each way is a process with an empty cache, and --jobs of them compile at the same time; blocks of steps alternate with
nothing else running. "first step" is the time of the first training step with compiling, "compiling" the time torch
compiled before the timed steps, "step" the median of the blocks.

python benchmarks/batch_sizes.py [--batch-sizes 1 4 16 64 256] [--model resnet18] [--ways eager whole] [--device cuda]
                                 [--json FILE]
"""

from __future__ import annotations

from conduct import Variant, Workload
from tables import add_pacing, ms, parser_for, print_table, rows_of, times

WAYS = {
    "eager": Variant("eager", "fit"),
    "whole": Variant("whole", "fit", "callback", "default"),
    "whole-cudagraphs": Variant("whole-cudagraphs", "fit", "callback", "reduce-overhead"),
}
RUN_STEPS = 10_000


def main() -> None:
    parser = parser_for(__doc__)
    add_pacing(parser)
    add = parser.add_argument
    add("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    add("--model", default="resnet18", help="a torchvision model, or blocks-DEPTH")
    add("--image-size", type=int, default=224)
    add("--ways", nargs="+", choices=list(WAYS), default=["eager", "whole"])
    args = parser.parse_args()
    works = [Workload(args.model, "train", size, args.image_size, args.device, RUN_STEPS) for size in args.batch_sizes]
    groups = [(work, [WAYS[name] for name in args.ways]) for work in works]
    lines = []
    for row in rows_of(args, "Training against the batch size", [groups], own_caches=True):
        seconds = [row.get("first_step_seconds"), row.get("compile_seconds") if row["way"] != "eager" else None]
        cells = [f"{value:.1f}" if value else "" for value in seconds]
        lines.append([str(row.get("batch_size", "")), row["way"], *cells, ms(row["step_ms"]), times(row["speedup"])])
    print_table(["batch", "way", "first step s", "compiling s", "step ms", "of eager"], lines)


if __name__ == "__main__":
    main()
