"""Weight folding: an inference graph computes what depends only on weights once for each version of the weights.

The graph is cut into a *constant subgraph*, which runs after weights have changed, and a *main subgraph*, which runs on
each call (docs/how_to/cuda_graphs.md).
"""
