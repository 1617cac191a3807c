"""For your own tests: `assert_same_training` compares whole runs, and `check_pass` tests a graph pass."""

from compile_callbacks.testing.check_pass import PassCheck, check_pass
from compile_callbacks.testing.same_training import assert_same_training

__all__ = ["PassCheck", "assert_same_training", "check_pass"]
