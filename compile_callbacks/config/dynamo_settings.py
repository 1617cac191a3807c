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
    (r"Dynamic shape operator\n", "capture_dynamic_output_shape_ops"),
)
"""The kinds of graph breaks that a setting may remove (torch 2.11 and 2.15): a pattern for torch's reason, and the
setting. The first line of a reason is the name of the kind in torch's registry."""


def healing_settings(reasons: Iterable[str]) -> tuple[dict[str, bool], int]:
    """Return the settings that may remove graph breaks with these reasons, and the number of these graph breaks.

    If a setting is set, torch gives other reasons than `HEALINGS` has.
    """
    settings = [
        next((setting for kind, setting in HEALINGS if re.match(kind, reason.lstrip(), re.DOTALL)), None)
        for reason in reasons
    ]
    named = [setting for setting in settings if setting is not None]
    return dict.fromkeys(sorted(set(named)), True), len(named)
