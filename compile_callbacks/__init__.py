"""Lightning callbacks that compile a module: one set of Inductor settings for training, another for inference.

One line is enough::

    Trainer(callbacks=[InductorCompile(train_mode="reduce-overhead", infer_mode="max-autotune")])
"""

from compile_callbacks import templates
from compile_callbacks.by_grad_mode import compile_phases, report_of, restore
from compile_callbacks.callback import InductorCompile
from compile_callbacks.config import InductorConfig
from compile_callbacks.pass_library import (
    CudnnConvolutionReLU,
    RecordGraphs,
    TritonMaxPoolBackward,
    TritonSqueezeExcitation,
)
from compile_callbacks.passes import GraphPass, GraphPassError, graph_pass, pattern_pass
from compile_callbacks.region import CompileError, CompileWarning
from compile_callbacks.report import CompileReport, PhaseReport
from compile_callbacks.tune import Tune

__all__ = [
    "CompileError",
    "CompileReport",
    "CompileWarning",
    "CudnnConvolutionReLU",
    "GraphPass",
    "GraphPassError",
    "InductorCompile",
    "InductorConfig",
    "PhaseReport",
    "RecordGraphs",
    "TritonMaxPoolBackward",
    "TritonSqueezeExcitation",
    "Tune",
    "compile_phases",
    "graph_pass",
    "pattern_pass",
    "report_of",
    "restore",
    "templates",
]
