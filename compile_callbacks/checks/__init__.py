"""What torch.compile needs of this machine: what is there, what will not work, and how to mend it."""

from compile_callbacks.checks.check import Check, Status
from compile_callbacks.checks.run import run_checks

__all__ = ["Check", "Status", "run_checks"]
