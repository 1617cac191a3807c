"""`Check`: what one look at the machine found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from compile_callbacks.failures import describe_failure, in_one_line

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What one look at the machine found.

    Attributes:
        name: What was looked at.
        status: ``"ok"``; ``"warning"``: something may not work, or not everything does; ``"failed"``: it does not work.
        found: What is there.
        consequence: What will not work; empty where everything does.
        remedy: How to mend it; empty where nothing is to be mended.
    """

    name: str = ""
    status: Status = "ok"
    found: str = ""
    consequence: str = ""
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """The check as JSON-ready data."""
        return asdict(self)


def said(error: BaseException) -> str:
    """What an error says, in a line."""
    return in_one_line(describe_failure(error))
