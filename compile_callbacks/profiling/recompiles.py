"""Translates the guard that caused a recompile into a sentence, with advice. `CompileRecorder` stores both."""

from __future__ import annotations

import re

from compile_callbacks._utils.messages import in_one_line

_DYNAMIC = '{mode}={{"dynamic": True}}'
_DROP_LAST = f"drop_last=True in the DataLoader, or {_DYNAMIC}, avoids it"
_TENSOR, _NUMBER = r"tensor '(?P<what>.*)' ", r" == (?P<was>-?\d\S*)$"
_SIZE = _TENSOR + "size mismatch at index "
OTHER_GRAD_MODE = "is used under inference_mode, was under no_grad"
_GUARDS: tuple[tuple[str, str, str | None], ...] = (
    (_SIZE + r"0\. expected (?P<was>\d+), actual (?P<now>\d+)", "batch size {now}, was {was}, of {what}", _DROP_LAST),
    (_SIZE + r"(?P<dimension>\d+)\. expected (?P<was>\d+), actual (?P<now>\d+)",
     "dimension {dimension} of {what}: {now}, was {was}", f"{_DYNAMIC} avoids it"),
    (r"(?P<least>\d+) <= (?P<what>.+)\.size\(\)\[0\]$", "batch size of {what} below {least}", _DROP_LAST),
    (_TENSOR + r"dtype mismatch\. expected (?P<was>\w+), actual (?P<now>\w+)",
     "dtype of {what}: {now}, was {was}", None),
    (_TENSOR + r"requires_grad mismatch\. expected requires_grad=1", "{what} no longer requires grad", None),
    (_TENSOR + r"requires_grad mismatch\. expected requires_grad=0", "{what} now requires grad", None),
    (_TENSOR + r"dispatch key set mismatch\. expected .*Autograd.*, actual (?!.*Autograd)",
     f"{{what}} {OTHER_GRAD_MODE}", "Trainer(inference_mode=False) avoids it"),
    (r"(?P<what>.+)\.training == True$", "{what} is in eval mode, was in train mode", None),
    (r"(?P<what>.+)\.training == False$", "{what} is in train mode, was in eval mode", None),
    (r"(?P<what>___stack\d+)" + _NUMBER, "value of {what}: no longer {was}", "removing the graph break avoids it"),
    (r"(?P<what>\S*module\S+)" + _NUMBER, "value of {what}: no longer {was}", "a buffer in its place avoids it"),
    (r"(?P<what>[\w\[\]'.]+)" + _NUMBER, "value of {what}: no longer {was}", "passing a tensor avoids it"),
)  # fmt: skip
"""The pattern of a failed guard of torch 2.11 to 2.15 that training often causes, a plain sentence, and advice."""


def explain_recompile(torchs_reason: str | None, mode_argument: str) -> tuple[str, str | None]:
    """Return a failed guard as a plain sentence, or torch's text of an unknown guard, and advice that avoids it.

    Example::

        >>> explain_recompile("0/0: tensor 'args[0]' size mismatch at index 0. expected 32, actual 8", "train_mode")[0]
        'batch size 8, was 32'
    """
    if not torchs_reason or torchs_reason == "Unable to find recompilation reasons":
        return "torch gives no reason", None
    first_line = re.sub(r"^\d+/\d+: ", "", torchs_reason.strip().splitlines()[0])
    guard = re.sub(r"___as_tensor\((.+)\)\.item\(\)", r"\1", first_line.split("  #")[0].strip())
    for pattern, reason, fix in _GUARDS:
        if match := re.match(pattern, guard):
            values = match.groupdict() | {"what": _subject(match["what"])}
            if reason.startswith("dtype"):
                values |= {name: values[name].lower() for name in ("was", "now")}
            return reason.format(**values).removesuffix(", of argument 0"), fix and fix.format(mode=mode_argument)
    return guard, None


def short_reason(reason: str | None) -> str:
    r"""Return the sentence of torch's reason that describes the event, in one line.

    Example::

        >>> short_reason("Unsupported\n  Explanation: Dynamo does not know `print`.\n  Hint: Remove it.")
        'Dynamo does not know `print`.'
    """
    reason = str(reason or "torch gives no reason")
    explanation = re.search(r"^\s*Explanation: (.*)$", reason, re.MULTILINE)
    if explanation:  # which may be empty
        reason = explanation[1] or reason.partition("\n")[0]
    return in_one_line(reason, 120)


def _subject(expression: str) -> str:
    """Return the user's name of the guarded value."""
    if re.match(r"___stack\d+", expression):
        return "a result at the graph break"
    if argument := re.match(r"(?:args\[(\d+)\]|kwargs\[('\w+')\])(.*)$", expression):
        return f"argument {argument[1] or argument[2]}{argument[3]}"
    path = re.findall(r"_(?:modules|parameters|buffers)\['([^']+)'\]", expression)
    if attribute := re.fullmatch(r"module(?:\._modules\['[^']+'\])*\.([a-z]\w*)", expression):
        path.append(attribute[1])
    return repr(".".join(path)) if path else expression
