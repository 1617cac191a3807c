"""What is said of a failure."""

from __future__ import annotations

import subprocess
import sys

import pytest

from compile_callbacks.failures import describe_failure, in_one_line

pytestmark = pytest.mark.newest


def chained(first, *wrappers):
    error = first
    for wrapper in wrappers:
        wrapper.__cause__ = error
        error = wrapper
    return error


def test_the_first_error_of_a_chain_is_named():
    error = chained(KeyError("weight"), RuntimeError("lowering failed"), ValueError("backend failed"))
    assert describe_failure(error) == "KeyError: 'weight'"


def test_an_error_that_holds_itself_ends_the_chain():
    error = RuntimeError("round and round")
    error.inner_exception = error
    assert describe_failure(error) == "RuntimeError: round and round"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('no space left'); raise SystemExit(3)", "ended with exit status 3: no space left"),
        ("import sys; print('a'); print('b', file=sys.stderr); raise SystemExit(1)", "exit status 1: a\nb"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL: it printed nothing"),
    ],
)
def test_of_a_program_what_it_printed_is_the_cause(code, said):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    described = describe_failure(chained(caught.value, RuntimeError("C++ compile error")))
    assert described.startswith("python")
    assert described.endswith(said)


def test_one_line_has_no_breaks_and_an_end():
    assert in_one_line(" a\n\n   b\t") == "a b"
    assert in_one_line("x" * 9, width=8) == "x" * 7 + "…"
