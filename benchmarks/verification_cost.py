"""The time that the comparison with eager takes: the first call of a compiled network, with and without it.

Both ways load the compiled code from torch's cache, in alternating order, so that the difference is the comparison: one
eager forward and backward pass, and the comparison of their results.

python benchmarks/verification_cost.py [--model resnet50] [--batch-size 16] [--image-size 224] [--json FILE]
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from typing import Literal

import torch
from models import make
from tables import Row, parser_for, print_columns, save, say
from torch import nn
from trainer import synchronize

from compile_callbacks import compile_phases, report_of

WAYS: tuple[Literal["off", "warn"], ...] = ("off", "warn")
COLUMNS = {"model": "{}", "batch_size": "{}", "way": "{}", "first_call_seconds": "{:.2f}", "compared": "{}"}


def first_call(net: nn.Module, batch: torch.Tensor, verify: Literal["off", "warn"]) -> tuple[float, str | None]:
    """Return the seconds of the first compiled training call, and the result of the comparison."""
    torch._dynamo.reset()
    net = compile_phases(copy.deepcopy(net), verify=verify)
    synchronize()
    began = time.perf_counter()
    net(batch).square().mean().backward()
    synchronize()
    return time.perf_counter() - began, report_of(net).train.verified


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--model", default="resnet50", help="a name of models.py")
    add("--batch-size", type=int, default=16)
    add("--image-size", type=int, default=224)
    add("--pairs", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    net, batch, _ = make(args.model, args.batch_size, args.image_size, args.device)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    compared: dict[str, str | None] = {}
    first_call(net, batch, "off")  # fills the cache
    for pair in range(args.pairs):
        for way in reversed(WAYS) if pair % 2 else WAYS:
            took, compared[way] = first_call(net, batch, way)
            seconds[way].append(took)
            say(f"verify={way!r}: {took:.2f} s")
    rows: list[Row] = [
        {
            "model": args.model,
            "batch_size": args.batch_size,
            "way": f'verify="{way}"',
            "first_call_seconds": statistics.median(seconds[way]),
            "seconds": seconds[way],
            "compared": compared[way],
        }
        for way in WAYS
    ]
    print_columns(COLUMNS, rows)
    save(args.json, f"{args.model}, batch {args.batch_size}, the first compiled call", rows)


if __name__ == "__main__":
    main()
