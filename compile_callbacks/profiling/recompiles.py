"""Why torch compiled something anew, in words."""

from __future__ import annotations

import re
from collections.abc import Callable

_ARGUMENT = re.compile(r"^(?:args\[(?P<position>\d+)\]|kwargs\['(?P<keyword>\w+)'\])(?P<rest>.*)$")
_MODULE = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")
_ATTRIBUTE = re.compile(r"module(?:\._modules\['[^']+'\])*\.([a-z]\w*)")

# Guard failures as torch 2.11 to 2.15 write them, and what each says in words; {subject} is the tensor.
_RULES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str], str]], ...] = (
    (
        re.compile(r"size mismatch at index 0\. expected (\d+), actual (\d+)"),
        lambda m, of: f"batch dimension of {of}: {m[2]}, was {m[1]}",
    ),
    (
        re.compile(r"size mismatch at index (\d+)\. expected (\d+), actual (\d+)"),
        lambda m, of: f"dimension {m[1]} of {of}: {m[3]}, was {m[2]}",
    ),
    (
        re.compile(r"stride mismatch at index (\d+)\. expected (\d+), actual (\d+)"),
        lambda m, of: f"memory layout of {of}: stride {m[3]} in dimension {m[1]}, was {m[2]}",
    ),
    (
        re.compile(r"dtype mismatch\. expected (\w+), actual (\w+)"),
        lambda m, of: f"dtype of {of}: {m[2].lower()}, was {m[1].lower()}",
    ),
    (
        re.compile(r"requires_grad mismatch\. expected requires_grad=(\d)"),
        lambda m, of: f"{of} {'no longer requires' if m[1] == '1' else 'now requires'} grad",
    ),
    (
        re.compile(r"rank mismatch\. expected (\d+), actual (\d+)"),
        lambda m, of: f"number of dimensions of {of}: {m[2]}, was {m[1]}",
    ),
    (
        re.compile(r"dispatch key set mismatch\. expected DispatchKeySet\((.*?)\), actual DispatchKeySet\((.*?)\)"),
        lambda m, of: _dispatch_keys(m[1], m[2], of),
    ),
)


def explain_recompile(reason: str) -> str:
    """Torch's account of a failed guard in words; as torch wrote it where no words are known.

    Args:
        reason: As in torch's compilation metrics, for example
            ``"0/0: tensor 'args[0]' size mismatch at index 0. expected 32, actual 8"``.

    Example::

        >>> explain_recompile("0/0: tensor 'args[0]' size mismatch at index 0. expected 32, actual 8")
        'batch dimension of argument 0: 8, was 32'
    """
    first = re.sub(r"^\d+/\d+: ", "", reason.strip().splitlines()[0])
    subject = re.search(r"tensor '(.*)' (?=\w+ mismatch|dispatch key|requires_grad)", first)
    of = _subject(subject[1]) if subject else "a tensor"
    for pattern, words in _RULES:
        if found := pattern.search(first):
            return words(found, of)
    if found := re.search(r"GLOBAL_STATE changed: (\w+(?:\(\w+\)_enabled)?)", first):
        return f"global state changed: {found[1]}"
    guard = re.sub(r"___as_tensor\((.+)\)\.item\(\)", r"\1", first.split("  #")[0].strip())
    if found := re.fullmatch(r"(.+)\.training == (True|False)", guard):
        return f"training flag of {_subject(found[1])}: {'eval' if found[2] == 'True' else 'train'} mode, was the other"
    if found := re.fullmatch(r"(\d+) <= (.+)\.size\(\)\[(\d+)\]", guard):
        which = "batch dimension" if found[3] == "0" else f"dimension {found[3]}"
        return f"{which} of {_subject(found[2])}: less than {found[1]}, which torch compiles apart"
    if found := re.fullmatch(r"([\w\[\]'.]+) == (\S+)", guard):
        return f"value of {_subject(found[1])}: no longer {found[2]}"
    return guard


def _subject(expression: str) -> str:
    """The thing that a guard is on, as a user knows it."""
    if argument := _ARGUMENT.match(expression):
        which = argument["position"] or repr(argument["keyword"])
        return f"argument {which}{argument['rest']}"
    path = _MODULE.findall(expression)
    if attribute := _ATTRIBUTE.fullmatch(expression):
        path.append(attribute[1])
    if path:
        return repr(".".join(path))
    return expression


def _dispatch_keys(before: str, now: str, of: str) -> str:
    lost = {key.strip() for key in before.split(",")} - {key.strip() for key in now.split(",")}
    if lost and all(key.startswith(("Autograd", "ADInplaceOrView")) for key in lost):
        return f"{of} is used under inference_mode, was under no_grad"
    return f"kind of {of}: dispatch keys {now}, were {before}"
