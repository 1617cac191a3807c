"""The only importer of torch's private parts, with one file for each subsystem of torch.

Differences between torch versions end here; 2.11 and 2.15 are tested. The docstring of a workaround has a sentence
``Workaround (torch<2.12): reason`` if a version of torch makes it unnecessary, or ``Workaround (until ...): reason``.
``tests/unit/test_layers.py`` fails if the oldest supported torch makes one unnecessary.
"""

from compile_callbacks._torch import autograd as autograd
from compile_callbacks._torch import caches as caches
from compile_callbacks._torch import distributed as distributed
from compile_callbacks._torch import dynamo as dynamo
from compile_callbacks._torch import events as events
from compile_callbacks._torch import export as export
from compile_callbacks._torch import graphs as graphs
from compile_callbacks._torch import inductor as inductor
from compile_callbacks._torch import regions as regions
