"""Wraps torch's private modules, one file for each subsystem. No other package imports them, except ``_pytree``.

These files hide the differences between torch versions. Tests run with 2.11 and 2.15. The docstring of a workaround
contains ``Workaround (torch<2.12; pytorch#1): reason`` if a version of torch makes the workaround unnecessary, or
``Workaround (until ...; no issue): reason``. ``tests/unit/test_layers.py`` fails if the oldest torch makes a workaround
of the first kind unnecessary. ``tests/compile/test_workarounds.py`` does so for the second kind and the newest torch.
"""

from compile_callbacks._torch import autograd as autograd
from compile_callbacks._torch import dynamo as dynamo
from compile_callbacks._torch import events as events
from compile_callbacks._torch import graphs as graphs
from compile_callbacks._torch import inductor as inductor
from compile_callbacks._torch import portable_graphs as portable_graphs
from compile_callbacks._torch import ports as ports
from compile_callbacks._torch import torch_2_11 as torch_2_11
