"""Weight folding: an inference graph caches the values that depend only on weights, until a weight changes.

The code splits the graph into a *constant subgraph*, which runs after weights have changed, and a *main subgraph*,
which runs in each call (docs/how_to/cuda_graphs.md).
"""
