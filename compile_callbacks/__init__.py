"""Lightning callbacks that compile a module: one set of Inductor settings for training, another for inference.

One line is enough::

    Trainer(callbacks=[InductorCompile(train_mode="reduce-overhead", infer_mode="max-autotune")])
"""

from typing import TYPE_CHECKING, Any

from compile_callbacks._utils.errors import CompileError, CompileWarning
from compile_callbacks.config import templates
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.tune import Tune
from compile_callbacks.exporting.loaded_package import ExportError, load_exported
from compile_callbacks.exporting.package import export
from compile_callbacks.inference.backend import InductorBackend
from compile_callbacks.passes import GraphPass, GraphPassError, graph_pass, pattern_pass
from compile_callbacks.passes.library import (
    RecordGraphs,
    TritonMaxPoolBackward,
    TritonSqueezeExcitation,
)
from compile_callbacks.report.export_report import ExportReport
from compile_callbacks.report.report import CompileReport, PhaseReport
from compile_callbacks.runtime.compile_phases import compile_phases, report_of, restore

if TYPE_CHECKING:
    from compile_callbacks.callbacks.aot_export import AOTInductorExport
    from compile_callbacks.callbacks.inductor_compile import InductorCompile

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
        from compile_callbacks.callbacks.inductor_compile import InductorCompile

        return InductorCompile
    if name == "AOTInductorExport":
        from compile_callbacks.callbacks.aot_export import AOTInductorExport

        return AOTInductorExport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
