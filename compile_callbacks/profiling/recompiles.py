"""Translates the guard that caused a recompile into a sentence, with advice. `CompileRecorder` stores both."""

from __future__ import annotations

import re
from typing import NamedTuple

from compile_callbacks._utils.messages import in_one_line

_ARGUMENT = re.compile(r"^(?:args\[(?P<position>\d+)\]|kwargs\['(?P<keyword>\w+)'\])(?P<rest>.*)$")
_NAME = r"[\w\[\]'.]+"
_MODULE = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")
_ATTRIBUTE = re.compile(r"module(?:\._modules\['[^']+'\])*\.([a-z]\w*)")

OTHER_GRAD_MODE = "is used under inference_mode, was under no_grad"
"""A part of the reason of a recompile: torch also compiles an inference graph in the other grad mode."""


class Recompile(NamedTuple):
    """The reason for a recompile."""

    reason: str  # the failed guard as a plain sentence, or torch's text if the guard is unknown here
    fix: str | None = None  # advice that avoids the recompile


def explain_recompile(torchs_reason: str, mode: str = "mode") -> Recompile:
    """Translate a failed guard of torch 2.11 to 2.15 into a plain sentence.

    ``mode`` is the argument with the settings, for the advice.

    Example::

        >>> explain_recompile("0/0: tensor 'args[0]' size mismatch at index 0. expected 32, actual 8").reason
        'batch size 8, was 32'
    """
    first = re.sub(r"^\d+/\d+: ", "", torchs_reason.strip().splitlines()[0])
    subject = re.search(r"tensor '(.*)' (?=\w+ mismatch|dispatch key|requires_grad)", first)
    of = _subject(subject[1]) if subject else "a tensor"
    dynamic = f'{mode}={{"dynamic": True}}'
    ragged = f"drop_last=True in the DataLoader, or {dynamic}, avoids it"
    if found := re.search(r"size mismatch at index 0\. expected (\d+), actual (\d+)", first):
        which = "" if of == "argument 0" else f", of {of}"
        return Recompile(f"batch size {found[2]}, was {found[1]}{which}", ragged)
    if found := re.search(r"size mismatch at index (\d+)\. expected (\d+), actual (\d+)", first):
        return Recompile(f"dimension {found[1]} of {of}: {found[3]}, was {found[2]}", f"{dynamic} avoids it")
    if found := re.search(r"stride mismatch at index (\d+)\. expected (\d+), actual (\d+)", first):
        strides = f"stride {found[3]} in dimension {found[1]}, was {found[2]}"
        return Recompile(f"memory layout of {of}: {strides}", "contiguous() before the call avoids it")
    if found := re.search(r"dtype mismatch\. expected (\w+), actual (\w+)", first):
        return Recompile(f"dtype of {of}: {found[2].lower()}, was {found[1].lower()}")
    if found := re.search(r"requires_grad mismatch\. expected requires_grad=(\d)", first):
        return Recompile(f"{of} {'no longer requires' if found[1] == '1' else 'now requires'} grad")
    if found := re.search(r"rank mismatch\. expected (\d+), actual (\d+)", first):
        return Recompile(f"number of dimensions of {of}: {found[2]}, was {found[1]}")
    keys = r"dispatch key set mismatch\. expected DispatchKeySet\((.*?)\), actual DispatchKeySet\((.*?)\)"
    if found := re.search(keys, first):
        return Recompile(_dispatch_keys(found[1], found[2], of), "Trainer(inference_mode=False) avoids it")
    if found := re.search(r"GLOBAL_STATE changed: (\w+(?:\(\w+\)_enabled)?)", first):
        return Recompile(f"global state changed: {found[1]}")
    guard = re.sub(r"___as_tensor\((.+)\)\.item\(\)", r"\1", first.split("  #")[0].strip())
    if found := re.fullmatch(r"(.+)\.training == (True|False)", guard):
        now, before = ("eval", "train") if found[2] == "True" else ("train", "eval")
        return Recompile(f"{_subject(found[1])} is in {now} mode, was in {before} mode")
    if found := re.fullmatch(r"(\d+) <= (.+)\.size\(\)\[(\d+)\]", guard):
        which = "batch size" if found[3] == "0" else f"dimension {found[3]}"
        return Recompile(f"{which} of {_subject(found[2])} below {found[1]}", ragged if found[3] == "0" else None)
    if found := re.fullmatch(rf"({_NAME}) == (\S+)", guard):
        is_number = re.fullmatch(r"-?\d\S*", found[2])
        fix = "passing a tensor avoids it" if is_number else None
        return Recompile(f"value of {_subject(found[1])}: no longer {found[2]}", fix)
    if found := re.fullmatch(rf"({_NAME}) is ({_NAME})", guard):
        other = "None" if found[2] == "None" else f"the same object as {_subject(found[2])}"
        return Recompile(f"{_subject(found[1])} is no longer {other}")
    if found := re.fullmatch(rf"len\(({_NAME})\) [=!]= (\d+)", guard):
        return Recompile(f"length of {_subject(found[1])}: no longer {found[2]}")
    if found := re.fullmatch(rf"expected type of '({_NAME})' to be <class '(.+)'>, but found <class '(.+)'>", guard):
        return Recompile(f"type of {_subject(found[1])}: {found[3]}, was {found[2]}")
    return Recompile(guard)


def short_reason(reason: str) -> str:
    r"""Return the sentence of torch's reason that describes the event, in one line.

    Example::

        >>> short_reason("Unsupported\n  Explanation: Dynamo does not know `print`.\n  Hint: Remove it.")
        'Dynamo does not know `print`.'
    """
    explanation = re.search(r"^\s*Explanation: (.*)$", reason, re.MULTILINE)
    return in_one_line(explanation[1] if explanation else reason, 120)


def _subject(expression: str) -> str:
    """Return the user's name of the guarded value."""
    if argument := _ARGUMENT.match(expression):
        which = argument["position"] or repr(argument["keyword"])
        return f"argument {which}{argument['rest']}"
    path = _MODULE.findall(expression)
    if attribute := _ATTRIBUTE.fullmatch(expression):
        path.append(attribute[1])
    return repr(".".join(path)) if path else expression


def _dispatch_keys(before: str, now: str, of: str) -> str:
    lost = {key.strip() for key in before.split(",")} - {key.strip() for key in now.split(",")}
    if lost and all(key.startswith(("Autograd", "ADInplaceOrView")) for key in lost):
        return f"{of} {OTHER_GRAD_MODE}"
    return f"kind of {of}: dispatch keys {now}, were {before}"
