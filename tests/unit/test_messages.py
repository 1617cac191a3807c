"""The text of error messages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from compile_callbacks._utils.messages import describe_failure


def chained(first, *wrappers):
    error = first
    for wrapper in wrappers:
        wrapper.__cause__ = error
        error = wrapper
    return error


def test_describe_failure_names_the_root_cause():
    error = chained(KeyError("weight"), RuntimeError("lowering failed"), ValueError("backend failed"))
    assert describe_failure(error) == "KeyError: 'weight'"


@pytest.mark.parametrize("others", [0, 1, 2])
def test_describe_failure_ends_if_the_causes_are_a_ring(others):
    error = RuntimeError("first")
    error.__cause__ = chained(error, *(ValueError(str(number)) for number in range(others)))
    assert describe_failure(error) == "RuntimeError: first"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('no space left'); raise SystemExit(3)", "ended with exit status 3: no space left"),
        ("import sys; print('a'); print('b', file=sys.stderr); raise SystemExit(1)", "exit status 1: a\nb"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL: it printed nothing"),
    ],
)
def test_describe_failure_shows_the_output_of_a_failed_process(code, said):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    described = describe_failure(chained(caught.value, RuntimeError("C++ compile error")))
    assert described.startswith("python")
    assert described.endswith(said)
