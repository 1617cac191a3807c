"""Custom Inductor graph passes that know training from inference.

- ``graph_pass``: a pass as a class and as a decorated function;
- ``hooks``: where passes run, and what a graph is there;
- ``sequence``: the passes of one hook point, run, watched and checked;
- ``identity``: what torch's cache knows a pass by;
- ``pattern``: a pass as a pattern and its replacement;
- ``nodes``: to find, count and replace the nodes of a graph.

Those that come with the library are in ``pass_library``.
"""

from compile_callbacks.passes.graph_pass import GraphPass, as_passes, graph_pass, pass_hook, pass_identity, pass_name
from compile_callbacks.passes.hooks import HOOK_OPTIONS
from compile_callbacks.passes.nodes import call_before, count_ops, find_nodes, replace_node
from compile_callbacks.passes.pattern import PatternMatch, PatternPass, pattern_pass
from compile_callbacks.passes.sequence import GraphPassError, PassRun, PassSequence, pass_options

__all__ = [
    "HOOK_OPTIONS",
    "GraphPass",
    "GraphPassError",
    "PassRun",
    "PassSequence",
    "PatternMatch",
    "PatternPass",
    "as_passes",
    "call_before",
    "count_ops",
    "find_nodes",
    "graph_pass",
    "pass_hook",
    "pass_identity",
    "pass_name",
    "pass_options",
    "pattern_pass",
    "replace_node",
]
