"""How often verification calls a wrong gradient equal, and a right one different.

python benchmarks/verification.py [--gradients 400] [--json FILE]

The gradients have random elements and the shapes (64, 8), (64, 9), ... The true gradient is rounded twice to the
precision: to eager's result, and to the compiled one, which is then made wrong in one way. float64 is the truth.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tables import Row, parser_for, print_table, save, say

from compile_callbacks.graphs.accuracy import compare_results, tolerance

PRECISIONS = {
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bf16-mixed": (torch.float32, torch.bfloat16),
}
"""The dtype of the gradient, and the dtype that its graph computes in."""


def _zero(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def zero(gradient: torch.Tensor) -> torch.Tensor:
        wrong = gradient.flatten().clone()
        wrong[: max(1, round(share * len(wrong)))] = 0
        return wrong.view_as(gradient)

    return zero


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "right": lambda gradient: gradient,
    "sign flipped": torch.neg,
    "elements shuffled": lambda gradient: gradient.flatten()[torch.randperm(gradient.numel())].view_as(gradient),
    "scaled by 1.08": lambda gradient: gradient * 1.08,
    "first tenth of the elements zero": _zero(0.1),
    "first hundredth zero": _zero(0.01),
    "one element in a thousand zero": _zero(0.001),
}


def verdict(way: str, precision: str, seed: int) -> str:
    """Compare one wrong gradient with eager's."""
    torch.manual_seed(seed)
    dtype, computed_in = PRECISIONS[precision]
    truth = torch.randn(64, 8 + seed, dtype=torch.float64)
    noise = 1 + torch.finfo(computed_in).eps / 2 * (2 * torch.rand(2, *truth.shape, dtype=torch.float64) - 1)
    eager, compiled = (truth * noise).to(computed_in).to(dtype)
    expected, actual, reference = ({"the gradient of x": gradient} for gradient in (eager, WAYS[way](compiled), truth))
    allowed = tolerance([dtype, computed_in], torch.device("cpu"))
    return compare_results(expected, actual, allowed, lambda: reference).result


def show(rows: list[Row]) -> None:
    """Print the share of the gradients that are called equal."""
    lines = [[row["gradient"], *(f"{row[precision]:.1%}" for precision in PRECISIONS)] for row in rows]
    print_table(["gradient", *PRECISIONS], lines)


def main() -> None:
    """Measure and print the share of the gradients that are called equal, by way and precision."""
    parser = parser_for(__doc__)
    parser.add_argument("--gradients", type=int, default=400, help="gradients for each way and precision")
    args = parser.parse_args()
    rows: list[Row] = []
    for way in WAYS:
        row = {"gradient": way, "gradients": args.gradients}
        for precision in PRECISIONS:
            equal = sum(verdict(way, precision, seed) == "equal" for seed in range(args.gradients))
            row[precision] = equal / args.gradients
        say(str(row))
        rows.append(row)
    show(rows)
    save(args.json, "Gradients that verification calls equal", rows)


if __name__ == "__main__":
    main()
