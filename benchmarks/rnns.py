"""Times RNNs of torch, eager and with torch.compile, without and with Dynamo's setting `allow_rnn`.

Blocks of five eager and five compiled steps alternate. The ratio is eager by compiled: the median over the blocks, with
the smallest and the largest.

    python benchmarks/rnns.py [--only LSTM-32-1 ...]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._dynamo import config

BLOCKS, STEPS, LENGTH = 10, 5, 20
CASES = [  # kind, width, layers, whether bidirectional, batch size
    ("LSTM", 32, 1, False, 8),
    ("LSTM", 32, 2, False, 32),
    ("GRU", 32, 1, False, 8),
    ("LSTM", 32, 1, True, 8),
    ("GRU", 128, 1, False, 64),
    ("RNN", 32, 1, False, 8),
]


class Net(nn.Module):
    """An RNN and a linear layer."""

    def __init__(self, kind: str, width: int, layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(width, width, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(width * (1 + bidirectional), 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def step(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, train: bool) -> float:
    """Run a step, and return its milliseconds."""
    began = time.perf_counter()
    with torch.set_grad_enabled(train):
        result = call(x).square().mean()
    if train:
        module.zero_grad()
        result.backward()
    return (time.perf_counter() - began) * 1000


def compare(eager: nn.Module, x: Tensor, train: bool) -> str:
    """Return the compile time, the step times and the ratios of a module."""
    ours = copy.deepcopy(eager)
    compiled = torch.compile(ours)
    seconds = step(compiled, ours, x, train) / 1000
    step(compiled, ours, x, train), step(eager, eager, x, train)
    pairs = [
        [statistics.median(step(call, module, x, train) for _ in range(STEPS)) for call, module in ways]
        for ways in [((eager, eager), (compiled, ours))] * BLOCKS
    ]
    ratios = [eager_ms / compiled_ms for eager_ms, compiled_ms in pairs]
    both = " / ".join(f"{statistics.median(column):.2f}" for column in zip(*pairs, strict=True))
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"compile {seconds:.1f} s, eager / compiled {both} ms, ratio {spread}"


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="KIND-WIDTH-LAYERS")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    for kind, width, layers, bidirectional, batch in CASES:
        name = f"{kind}-{width}-{layers}"
        for train, allow_rnn in ((True, False), (True, True), (False, False), (False, True)):
            if only and name not in only:
                continue
            torch.compiler.reset()
            torch.manual_seed(0)
            try:
                with config.patch(allow_rnn=allow_rnn):
                    result = compare(Net(kind, width, layers, bidirectional), torch.randn(batch, LENGTH, width), train)
            except Exception as error:
                result = f"{type(error).__name__}: {error}".splitlines()[0]
            case = f"{name}{' bidirectional' if bidirectional else ''}, batch {batch}, {'train' if train else 'infer'}"
            print(f"{torch.__version__} {case}, allow_rnn={allow_rnn}: {result}", flush=True)


if __name__ == "__main__":
    main()
