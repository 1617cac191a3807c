"""The settings of ``InductorConfig(dynamo={...})``, and the kinds of graph breaks that a setting may remove."""

from __future__ import annotations

import re
from collections.abc import Iterable

SWITCHES = (
    "allow_rnn",
    "allow_unspec_int_on_nn_module",
    "capture_dynamic_output_shape_ops",
    "capture_scalar_outputs",
    "trace_autograd_ops",
)
"""The names of the settings, which are ``True`` or ``False``."""

HEALINGS = (
    (r"Unsupported Tensor\.item\(\) call with capture_scalar_outputs=False\n", "capture_scalar_outputs"),
    (r"Data dependent operator\n.*capture_scalar_outputs", "capture_scalar_outputs"),
)
"""The kinds of graph breaks that a setting may remove (torch 2.11 and 2.15): a pattern for torch's reason, and the
setting. The first line of a reason is the name of the kind in torch's registry."""


def healing_settings(reasons: Iterable[str]) -> list[str]:
    """Return the settings that may remove graph breaks with these reasons.

    If a setting is set, torch gives other reasons than `HEALINGS` has.
    """
    texts = [reason.lstrip() for reason in reasons]
    return sorted({s for kind, s in HEALINGS if any(re.match(kind, text, re.DOTALL) for text in texts)})
