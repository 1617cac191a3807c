"""Graph passes that come with the library, each in a file of its own.

- ``record_graphs``: writes down what it sees;
- ``squeeze_excitation``: inference; the two small layers of a squeeze-and-excitation block in one Triton kernel;
- ``max_pool_backward``: training; the gradient of a max pooling in a Triton kernel.

``operators`` defines the custom operators of the passes. Triton is imported only where a kernel is launched.
"""

from compile_callbacks.passes.library.max_pool_backward import TritonMaxPoolBackward
from compile_callbacks.passes.library.record_graphs import RecordedGraph, RecordGraphs, graph_text
from compile_callbacks.passes.library.squeeze_excitation import TritonSqueezeExcitation

__all__ = [
    "RecordGraphs",
    "RecordedGraph",
    "TritonMaxPoolBackward",
    "TritonSqueezeExcitation",
    "graph_text",
]
