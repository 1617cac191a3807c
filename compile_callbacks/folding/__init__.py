"""Weight folding: an inference graph computes values that depend only on weights once for each version of the weights.

The code splits the graph into a *constant subgraph*, which runs after weights have changed, and a *main subgraph*,
which runs in each call (docs/how_to/cuda_graphs.md).
"""
