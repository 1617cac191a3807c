"""Translates the guard that caused a recompile into a sentence, with advice. `CompileRecorder` stores both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from compile_callbacks._utils.messages import in_one_line

_ARGUMENT = re.compile(r"^(?:args\[(\d+)\]|kwargs\[('\w+')\])(.*)$")
_MODULE = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")
_ATTRIBUTE = re.compile(r"module(?:\._modules\['[^']+'\])*\.([a-z]\w*)")

_RESULT = "a result at the graph break"

OTHER_GRAD_MODE = "is used under inference_mode, was under no_grad"
"""A part of the reason of a recompile: torch also compiles an inference graph in the other grad mode."""


class Recompile(NamedTuple):
    """The reason for a recompile."""

    reason: str  # the failed guard as a plain sentence, or torch's text if the guard is unknown here
    fix: str | None = None  # advice that avoids the recompile


def explain_recompile(torchs_reason: str, mode_argument: str = "mode") -> Recompile:
    """Translate a failed guard of torch 2.11 to 2.15 that training often causes, and return torch's text of others.

    Example::

        >>> explain_recompile("0/0: tensor 'args[0]' size mismatch at index 0. expected 32, actual 8").reason
        'batch size 8, was 32'
    """
    first_line = re.sub(r"^\d+/\d+: ", "", torchs_reason.strip().splitlines()[0])
    guard = re.sub(r"___as_tensor\((.+)\)\.item\(\)", r"\1", first_line.split("  #")[0].strip())
    dynamic = f'{mode_argument}={{"dynamic": True}}'
    drop_last = f"drop_last=True in the DataLoader, or {dynamic}, avoids it"
    if match := re.match(r"tensor '(.*)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)", guard):
        tensor, (dimension, before, now) = _subject(match[1]), match.groups()[1:]
        if dimension != "0":
            return Recompile(f"dimension {dimension} of {tensor}: {now}, was {before}", f"{dynamic} avoids it")
        return Recompile(
            f"batch size {now}, was {before}{'' if tensor == 'argument 0' else f', of {tensor}'}", drop_last
        )
    if match := re.fullmatch(r"(\d+) <= (.+)\.size\(\)\[0\]", guard):
        return Recompile(f"batch size of {_subject(match[2])} below {match[1]}", drop_last)
    if match := re.match(r"tensor '(.*)' dtype mismatch\. expected (\w+), actual (\w+)", guard):
        return Recompile(f"dtype of {_subject(match[1])}: {match[3].lower()}, was {match[2].lower()}")
    if match := re.match(r"tensor '(.*)' requires_grad mismatch\. expected requires_grad=(\d)", guard):
        return Recompile(f"{_subject(match[1])} {'no longer' if match[2] == '1' else 'now'} requires grad")
    keys = r"tensor '(.*)' dispatch key set mismatch\. expected .*Autograd.*, actual (?!.*Autograd)"
    if match := re.match(keys, guard):
        return Recompile(f"{_subject(match[1])} {OTHER_GRAD_MODE}", "Trainer(inference_mode=False) avoids it")
    if match := re.fullmatch(r"(.+)\.training == (True|False)", guard):
        now, before = ("eval", "train") if match[2] == "True" else ("train", "eval")
        return Recompile(f"{_subject(match[1])} is in {now} mode, was in {before} mode")
    if match := re.fullmatch(r"([\w\[\]'.]+) == (-?\d\S*)", guard):
        value = _subject(match[1])
        fix = "a buffer in its place avoids it" if value.startswith("'") else "passing a tensor avoids it"
        return Recompile(f"value of {value}: no longer {match[2]}", fix)
    if guard.startswith("record_name == "):  # in the hooks of Lightning's profiler
        return Recompile(guard, "profiler=PyTorchProfiler(record_module_names=False) avoids it")
    return Recompile(guard)


def at_graph_break(recompile: Recompile, file: str, line: int, reason: str | None) -> Recompile:
    """Name the graph break in the explanation of a recompile behind it, if a result at the break caused the recompile.

    An example of such a result is the number of ``.item()``.
    """
    if _RESULT not in recompile.reason:
        return recompile
    text = recompile.reason.removeprefix("value of ").replace(_RESULT, f"{_RESULT} in {Path(file).name}:{line}")
    return Recompile(text, f"removing the graph break{f' ({short_reason(reason)})' if reason else ''} avoids it")


def short_reason(reason: str) -> str:
    r"""Return the sentence of torch's reason that describes the event, in one line.

    Example::

        >>> short_reason("Unsupported\n  Explanation: Dynamo does not know `print`.\n  Hint: Remove it.")
        'Dynamo does not know `print`.'
    """
    explanation = re.search(r"^\s*Explanation: (.*)$", reason, re.MULTILINE)
    if explanation:  # which may be empty
        reason = explanation[1] or reason.partition("\n")[0]
    return in_one_line(reason, 120)


def _subject(expression: str) -> str:
    """Return the user's name of the guarded value."""
    if re.match(r"___stack\d+", expression):
        return _RESULT
    if argument := _ARGUMENT.match(expression):
        return f"argument {argument[1] or argument[2]}{argument[3]}"
    path = _MODULE.findall(expression)
    if attribute := _ATTRIBUTE.fullmatch(expression):
        path.append(attribute[1])
    return repr(".".join(path)) if path else expression
