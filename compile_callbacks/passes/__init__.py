"""Custom Inductor graph passes that know training from inference.

- ``graph_pass``: a pass as a class and as a decorated function;
- ``hooks``: where passes run, and what a graph is there;
- ``sequence``: the passes of one hook point, run, watched and checked;
- ``identity``: what torch's cache knows a pass by;
- ``pattern``: a pass as a pattern and its replacement;
- ``nodes``: to find, count and replace the nodes of a graph;
- ``record_graphs``: a pass that writes down what it sees.
"""

from compile_callbacks.passes.graph_pass import GraphPass, as_passes, graph_pass, pass_hook, pass_identity, pass_name
from compile_callbacks.passes.hooks import HOOK_OPTIONS
from compile_callbacks.passes.sequence import GraphPassError, PassRun, PassSequence, pass_options

__all__ = [
    "HOOK_OPTIONS",
    "GraphPass",
    "GraphPassError",
    "PassRun",
    "PassSequence",
    "as_passes",
    "graph_pass",
    "pass_hook",
    "pass_identity",
    "pass_name",
    "pass_options",
]
