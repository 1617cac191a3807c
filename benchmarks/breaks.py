"""Counts the graphs of small modules that break graphs, without and with the setting of Dynamo that may remove a break.

Each module trains a few steps eagerly, compiled, and compiled with the setting. The outputs and gradients of the
compiled steps are compared with eager's. `--models` does the same for models of packages that are installed.

    python benchmarks/breaks.py [--only NAME ...] [--models] [--out FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compile_callbacks import compile_phases, report_of, restore

FEATURES, BATCH, STEPS = 64, 256, 30
LOGGER = logging.getLogger("benchmark")


class Breaking(nn.Module):
    """Two layers with one kind of code between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.between = between
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x).relu())).tanh()


class WithLSTM(nn.Module):
    """An LSTM between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.rnn = nn.LSTM(FEATURES, FEATURES, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(self.first(x).view(-1, 8, FEATURES))[0]).tanh()


def _count(module: Any, x: Tensor) -> Tensor:
    module.calls += 1
    return x * (1 + 1 / module.calls)


def _call(function: Callable[..., Any], *arguments: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    def between(module: nn.Module, x: Tensor) -> Tensor:
        function(*arguments)
        return x

    return between


def _gradient(module: nn.Module, x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    return x + torch.autograd.grad(y.square().sum(), y)[0]


SCALAR, SHAPE = {"capture_scalar_outputs": True}, {"capture_dynamic_output_shape_ops": True}
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "x.item()": (lambda: Breaking(lambda m, x: x * x.mean().item()), SCALAR),
    "float(x)": (lambda: Breaking(lambda m, x: x * float(x.mean())), SCALAR),
    "x.tolist()": (lambda: Breaking(lambda m, x: x * x.mean(0)[:2].long().tolist()[1]), SCALAR),
    "x[: n.item()]": (lambda: Breaking(lambda m, x: x[: (x[:, 0] > -1).sum().item()]), SCALAR),
    "torch.arange(n)": (lambda: Breaking(lambda m, x: x + torch.arange((x[:, 0] > 0).sum()).sum()), SCALAR),
    "x[x > 0]": (lambda: Breaking(lambda m, x: x - x[x > 0].mean()), SHAPE),
    "nonzero()": (lambda: Breaking(lambda m, x: x[(x[:, 0] > 0).nonzero()[:, 0]]), SHAPE),
    "masked_select()": (lambda: Breaking(lambda m, x: x + x.masked_select(x > 0).sum()), SHAPE),
    "unique()": (lambda: Breaking(lambda m, x: x + x.detach().sign().unique().sum()), SHAPE),
    "repeat_interleave(counts)": (
        lambda: Breaking(lambda m, x: x.repeat_interleave((x[:, 0] > 0).long() + 1, 0)),
        SHAPE,
    ),
    "torch.autograd.grad": (lambda: Breaking(_gradient), {"trace_autograd_ops": True}),
    "self.calls += 1": (lambda: Breaking(_count), {"allow_unspec_int_on_nn_module": True}),
    "nn.LSTM": (WithLSTM, {"allow_rnn": True}),
    "print": (lambda: Breaking(_call(print, "")), {"reorderable_logging_functions": ["print"]}),
    "print, dropped": (lambda: Breaking(_call(print, "")), {"ignore_logging_functions": ["print"]}),
    "logging.info": (
        lambda: Breaking(_call(logging.info, "call")),
        {"ignore_logging_functions": ["logging.info"]},
    ),
    "logger.info": (lambda: Breaking(_call(LOGGER.info, "call")), {"ignore_logging_functions": ["logging.info"]}),
    "warnings.warn": (
        lambda: Breaking(_call(warnings.warn, "call")),
        {"reorderable_logging_functions": ["warnings.warn"]},
    ),
    "if x.sum() > 0": (lambda: Breaking(lambda m, x: x * 2 if x.sum() > 0 else x), SCALAR),
}


class GraphNet(nn.Module):
    """Two layers of PyTorch Geometric, a pooling layer over the nodes of each graph, and a linear layer."""

    def __init__(self, first: nn.Module, second: nn.Module, topk: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second, self.last, self.topk = first, second, nn.Linear(FEATURES, 4), topk

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        x = self.first(x, edge_index).relu()
        if self.topk is not None:
            x, edge_index, _, batch, _, _ = self.topk(x, edge_index, None, batch)
        per_graph = (batch,) if type(self.second).__name__ == "GPSConv" else ()
        return self.last(global_mean_pool(self.second(x, edge_index, *per_graph), batch))


def graphs(count: int = 32) -> dict[str, Tensor]:
    """Return a batch of graphs of 10 to 40 nodes with three edges for each node."""
    sizes = torch.randint(10, 40, (count,)).tolist()
    starts = torch.tensor([0, *sizes]).cumsum(0)
    edges = [start + torch.randint(size, (2, 3 * size)) for start, size in zip(starts[:-1], sizes, strict=True)]
    batch = torch.arange(count).repeat_interleave(torch.tensor(sizes))
    return {"x": torch.randn(len(batch), FEATURES), "edge_index": torch.cat(edges, 1), "batch": batch}


def words() -> dict[str, Tensor]:
    """Return a batch of texts that end with the token 2."""
    return {"input_ids": torch.cat([torch.randint(3, 90, (4, 63)), torch.full((4, 1), 2)], 1)}


def models() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]]:
    """Return small models of PyTorch Geometric and transformers that break graphs, and their inputs."""
    import torch_geometric.nn as pyg
    import transformers as hf

    sizes: dict[str, Any] = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 128}
    sides: dict[str, Any] = {"vocab_size": 99, "d_model": 64}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 128}
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    led = {f"max_{side}_position_embeddings": 64 for side in ("encoder", "decoder")} | {"attention_window": 8}
    moe: dict[str, Any] = {"num_key_value_heads": 2, "num_local_experts": 4, "experts_implementation": "eager"}

    pna: dict[str, Any] = {"aggregators": ["mean", "max", "std"], "scalers": ["identity"]}
    pna["deg"] = torch.tensor([1, 2, 3, 4])

    def gcn() -> nn.Module:
        return pyg.GCNConv(FEATURES, FEATURES)

    return {
        "PyG GCN": (lambda: GraphNet(gcn(), gcn()), graphs),
        "PyG GPS": (lambda: GraphNet(gcn(), pyg.GPSConv(FEATURES, gcn(), heads=4)), graphs),
        "PyG PNA": (lambda: GraphNet(*(pyg.PNAConv(FEATURES, FEATURES, **pna) for _ in range(2))), graphs),
        "PyG TopKPooling": (lambda: GraphNet(gcn(), gcn(), pyg.TopKPooling(FEATURES)), graphs),
        "transformers BartForSequenceClassification": (
            lambda: hf.BartForSequenceClassification(hf.BartConfig(**sides, **tokens)), words
        ),
        "transformers Longformer": (
            lambda: hf.LongformerModel(hf.LongformerConfig(**sizes, attention_window=8, max_position_embeddings=70)),
            words,
        ),
        "transformers LED": (lambda: hf.LEDModel(hf.LEDConfig(**sides, **led)), words),
        "transformers Mixtral, eager experts": (lambda: hf.MixtralModel(hf.MixtralConfig(**sizes, **moe)), words),
    }  # fmt: skip


def run(module: nn.Module, x: Any, dynamo: dict[str, Any] | None, steps: int = STEPS) -> dict[str, Any]:
    """Train a copy of a module eagerly and compiled, and return the graphs, the errors and the step times."""
    torch.compiler.reset()
    eager, ours = copy.deepcopy(module), copy.deepcopy(module)
    compile_phases(ours, {} if dynamo is None else {"dynamo": dynamo}, None)
    error, times = 0.0, {"eager": [], "compiled": []}
    for step in range(steps):
        results = []
        for name, each in (("eager", eager), ("compiled", ours)):
            each.zero_grad()
            torch.manual_seed(step)
            started = time.perf_counter()
            output = each(**x) if isinstance(x, dict) else each(x)
            output = output if isinstance(output, Tensor) else output[0]
            output.square().mean().backward()
            times[name].append((time.perf_counter() - started) * 1000)
            results.append([output.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
        pairs = zip(*reversed(results), strict=True)
        differences = (((a - b).abs().max() / (1 + b.abs().max())).item() for a, b in pairs)
        error = max(error, *differences)
    report = report_of(ours).train
    restore(ours)
    state = {name: getattr(each, "calls", 0) for name, each in (("eager", eager), ("compiled", ours))}
    return {
        "graphs": report.graphs,
        "graph_breaks": report.graph_breaks,
        "recompiles": report.recompiles,
        "fallbacks": report.fallbacks,
        "verified": report.verified,
        "max_error": error,
        "equal": error < 1e-4 and state["eager"] == state["compiled"],
        "eager_ms": statistics.median(times["eager"][steps // 3 :]),
        "compiled_ms": statistics.median(times["compiled"][steps // 3 :]),
        "reasons": [
            e["reason"].strip().splitlines()[0]
            for e in report.diagnostics.events
            if e["kind"] in ("graph_break", "fallback")
        ],
    }


def main() -> None:
    """Print a row for each kind, and write all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="kinds or models to run")
    parser.add_argument("--models", action="store_true", help="run models of installed packages")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    parser.add_argument("--out", help="JSON file for the rows")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, (make, value) in (models() if arguments.models else KINDS).items():
        if arguments.only and name not in arguments.only:
            continue
        torch.manual_seed(0)
        if arguments.models:  # without dropout, which draws other numbers in compiled code
            module, x, dynamo = make().eval(), value(), SCALAR | SHAPE
        else:
            module, x, dynamo = make(), torch.randn(BATCH, FEATURES), value
        row = {"name": name, "dynamo": dynamo, "torch": torch.__version__}
        for label, settings in (("without", None), ("with", dynamo)):
            try:
                row[label] = run(module, x, settings, arguments.steps)
            except Exception as error:
                row[label] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            print(name, label, json.dumps(row[label]), flush=True)
        rows.append(row)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
