"""The device types on which a pass acts."""

from __future__ import annotations

from collections.abc import Sequence

from compile_callbacks.choices import unknown
from compile_callbacks.links import checks_settings

DEVICES = ("cpu", "cuda")


@checks_settings
def check_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """The device types of an argument, checked.

    Raises:
        TypeError: Not a list of strings.
        ValueError: An unknown device type, or none.
    """
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"devices={devices!r} must be a list of device types, not {type(devices).__name__}")
    for device in devices:
        if device not in DEVICES:
            raise ValueError(unknown("devices", device, DEVICES))
    if not devices:
        raise ValueError(f"devices={devices!r} names no device type: the pass would never act")
    return tuple(devices)
