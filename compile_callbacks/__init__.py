"""Lightning callbacks that compile a module: one set of Inductor settings for training, another for inference.

One line is enough::

    Trainer(callbacks=[InductorCompile(train_mode="reduce-overhead", infer_mode="max-autotune")])
"""

from typing import TYPE_CHECKING, Any

from compile_callbacks._utils.errors import CompileError, CompileWarning
from compile_callbacks.backend.backend import InductorBackend
from compile_callbacks.by_grad_mode import compile_phases, report_of, restore
from compile_callbacks.exporting.export import export
from compile_callbacks.exporting.exported import ExportError, load_exported
from compile_callbacks.pass_library import (
    RecordGraphs,
    TritonMaxPoolBackward,
    TritonSqueezeExcitation,
)
from compile_callbacks.passes import GraphPass, GraphPassError, graph_pass, pattern_pass
from compile_callbacks.reporting.export_report import ExportReport
from compile_callbacks.reporting.report import CompileReport, PhaseReport
from compile_callbacks.settings import templates
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.settings.tune import Tune

if TYPE_CHECKING:
    from compile_callbacks.callback import InductorCompile
    from compile_callbacks.export_callback import AOTInductorExport

__all__ = [
    "AOTInductorExport",
    "CompileError",
    "CompileReport",
    "CompileWarning",
    "ExportError",
    "ExportReport",
    "GraphPass",
    "GraphPassError",
    "InductorBackend",
    "InductorCompile",
    "InductorConfig",
    "PhaseReport",
    "RecordGraphs",
    "TritonMaxPoolBackward",
    "TritonSqueezeExcitation",
    "Tune",
    "compile_phases",
    "export",
    "graph_pass",
    "load_exported",
    "pattern_pass",
    "report_of",
    "restore",
    "templates",
]


def __getattr__(name: str) -> Any:
    # Imported when asked for: they take Lightning with them, whose import fails where torchvision does not fit torch.
    # `compile-callbacks doctor` says so, and has to run there.
    if name == "InductorCompile":
        from compile_callbacks.callback import InductorCompile

        return InductorCompile
    if name == "AOTInductorExport":
        from compile_callbacks.export_callback import AOTInductorExport

        return AOTInductorExport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
