"""Lightning callbacks that compile a module with Inductor: one config for training, another for inference.

One line is enough::

    Trainer(callbacks=[InductorCompile(train_mode="reduce-overhead", infer_mode="max-autotune")])

Each name is imported when it is first used, so that ``import compile_callbacks`` imports neither torch nor Lightning.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compile_callbacks._utils.errors import CompileError as CompileError
    from compile_callbacks._utils.errors import CompileWarning as CompileWarning
    from compile_callbacks.callbacks.inductor_compile import InductorCompile as InductorCompile
    from compile_callbacks.config import templates as templates
    from compile_callbacks.config.inductor_config import InductorConfig as InductorConfig
    from compile_callbacks.exporting.loaded_package import ExportError as ExportError
    from compile_callbacks.exporting.loaded_package import load_exported as load_exported
    from compile_callbacks.exporting.package import export as export
    from compile_callbacks.inference.backend import InductorBackend as InductorBackend
    from compile_callbacks.passes.base import GraphPass as GraphPass
    from compile_callbacks.passes.base import graph_pass as graph_pass
    from compile_callbacks.report.figures import PhaseReport as PhaseReport
    from compile_callbacks.report.report import CompileReport as CompileReport
    from compile_callbacks.session.grad_mode import compile_phases as compile_phases
    from compile_callbacks.session.grad_mode import report_of as report_of
    from compile_callbacks.session.grad_mode import restore as restore
    from compile_callbacks.tuning.tune import Tune as Tune

_MODULES = {
    "CompileError": "_utils.errors",
    "CompileReport": "report.report",
    "CompileWarning": "_utils.errors",
    "ExportError": "exporting.loaded_package",
    "GraphPass": "passes.base",
    "InductorBackend": "inference.backend",
    "InductorCompile": "callbacks.inductor_compile",
    "InductorConfig": "config.inductor_config",
    "PhaseReport": "report.figures",
    "Tune": "tuning.tune",
    "compile_phases": "session.grad_mode",
    "export": "exporting.package",
    "graph_pass": "passes.base",
    "load_exported": "exporting.loaded_package",
    "report_of": "session.grad_mode",
    "restore": "session.grad_mode",
    "templates": "config.templates",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("compile-callbacks")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    value = module if name == "templates" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
