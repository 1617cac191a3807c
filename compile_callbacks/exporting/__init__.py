"""Export of a module to a ``.pt2`` package, and loading of packages."""

from compile_callbacks.report.report import ExportReport

__all__ = ["ExportReport"]
