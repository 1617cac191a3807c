"""Modes of torch.compile side by side on one module: step times, compile times, memory and differences from eager."""

from compile_callbacks.bench.measure import BenchError, measure
from compile_callbacks.bench.rows import BenchRow, table, told
from compile_callbacks.bench.settings import BenchSettings, parse_settings
from compile_callbacks.bench.write import write_results

__all__ = ["BenchError", "BenchRow", "BenchSettings", "measure", "parse_settings", "table", "told", "write_results"]
