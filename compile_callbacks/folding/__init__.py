"""Weight folding: what an inference graph computes from weights alone is computed once per version of the weights.

- ``scales``: moves what follows a convolution or matrix product channel by channel, as a batch norm does, into its
  weight;
- ``split``: which part of a graph depends on weights alone, and the two halves that it is cut into;
- ``folded``: the halves compiled, and the weight half run anew when weights changed.
"""
