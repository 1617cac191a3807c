"""The only importer of torch's private parts, with one file for each subsystem of torch.

Differences between torch versions end here; 2.11 and 2.15 are tested. Each function says which private part it touches,
and why the public one does not do.
"""

from compile_callbacks._torch import autograd as autograd
from compile_callbacks._torch import caches as caches
from compile_callbacks._torch import distributed as distributed
from compile_callbacks._torch import dynamo as dynamo
from compile_callbacks._torch import events as events
from compile_callbacks._torch import export as export
from compile_callbacks._torch import fsdp as fsdp
from compile_callbacks._torch import graphs as graphs
from compile_callbacks._torch import inductor as inductor
from compile_callbacks._torch import passes as passes
