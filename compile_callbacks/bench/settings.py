"""`BenchSettings`: what is measured, made of the words of a command line and checked before anything runs."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compile_callbacks.choices import check_choice
from compile_callbacks.devices.device_option import parse_device
from compile_callbacks.phases import PHASES, Phase
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.settings.mode import EAGER, as_config

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions by name, and what autocast computes in."""

CONFIG = "config"
"""What the row of ``--config`` is called."""

_DEFAULT_STEPS = {"cpu": 20, "cuda": 200}


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured.

    Attributes:
        module: A torchvision name, ``timm/NAME``, or ``package:factory``.
        configs: The settings of each row by its name, ``None`` for eager, which comes first.
        phases: The phases that are measured, one after the other.
        device: Where.
        precision: A name in `PRECISIONS`.
        batch_size: Images in a batch; ``None``: as many as suit the device.
        image_size: Height and width of an image in pixels; ``None``: what the model is made for.
        steps: Timed steps of each row.
        channels_last: Whether images and weights are laid out channels last.
        output: The folder that results go to.
    """

    module: str
    configs: Mapping[str, InductorConfig | None]
    phases: tuple[Phase, ...]
    device: torch.device
    precision: str
    batch_size: int | None
    image_size: int | None
    steps: int
    channels_last: bool
    output: Path

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready data."""
        configs = {name: config.to_dict() if config else None for name, config in self.configs.items()}
        return {
            **vars(self),
            "configs": configs,
            "phases": list(self.phases),
            "device": str(self.device),
            "output": str(self.output),
        }


def parse_settings(
    module: str,
    *,
    modes: Sequence[str] | None = None,
    config: str | None = None,
    phase: str = "infer",
    device: str | None = None,
    precision: str = "fp32",
    batch_size: int | None = None,
    image_size: int | None = None,
    steps: int | None = None,
    channels_last: bool = False,
    output: Path | None = None,
) -> BenchSettings:
    """The settings that the options of the command line ask for, which errors name.

    Args:
        module: As in `BenchSettings`; looked up by `compile_callbacks.bench.subject.load`.
        modes: Modes and templates by name, beside eager; ``None``: ``"default"``, and on a GPU ``"reduce-overhead"``.
        config: An `InductorConfig` to measure too: JSON text, the path of a JSON file, or base64 of JSON.
        phase: ``"train"``, ``"infer"`` or ``"both"``.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; ``None``: the GPU if there is one.
        precision: As in `BenchSettings`.
        batch_size: As in `BenchSettings`.
        image_size: As in `BenchSettings`.
        steps: As in `BenchSettings`; ``None``: 20 on a CPU, 200 on a GPU.
        channels_last: As in `BenchSettings`.
        output: As in `BenchSettings`; ``None``: a folder below ``runs/bench``, named for the module.

    Raises:
        ValueError: A value that is none of the choices, a number below 1, a config that cannot be read, a device that
            is not there, or an output that cannot be written to.
        TypeError: A config with a value of the wrong type.

    Example::

        >>> parse_settings("resnet18", modes=["max-autotune"], device="cpu").configs.keys()
        dict_keys(['eager', 'max-autotune'])
    """
    check_choice("--phase", phase, [*PHASES, "both"])
    check_choice("--precision", precision, list(PRECISIONS))
    for option, number in (("--batch-size", batch_size), ("--image-size", image_size), ("--steps", steps)):
        if number is not None and number < 1:
            raise ValueError(f"{option}={number} must be 1 or more")
    found = parse_device(device)
    default = ["default"] if found.type == "cpu" else ["default", "reduce-overhead"]
    configs: dict[str, InductorConfig | None] = {EAGER: None}
    configs |= {mode: as_config(mode, "--modes") for mode in (default if modes is None else modes)}
    if config is not None:
        configs[CONFIG] = read_config(config)
    folder = output or Path("runs", "bench", re.sub(r"[^\w.-]+", "_", module))
    check_writable(folder)
    return BenchSettings(
        module=module,
        configs=configs,
        phases=tuple(name for name in PHASES if phase in (name, "both")),
        device=found,
        precision=precision,
        batch_size=batch_size,
        image_size=image_size,
        steps=steps or _DEFAULT_STEPS[found.type],
        channels_last=channels_last,
        output=folder,
    )


def read_config(text: str) -> InductorConfig:
    """The `InductorConfig` that a text stands for: JSON, the path of a JSON file, or base64 of JSON.

    Raises:
        ValueError: It is none of these, with the place where the JSON breaks; or as `InductorConfig.from_dict`.
        TypeError: As `InductorConfig.from_dict`.

    Example::

        >>> read_config('{"mode": "max-autotune"}') == read_config("eyJtb2RlIjogIm1heC1hdXRvdHVuZSJ9")
        True
    """
    stripped = text.strip()
    if stripped.startswith(("{", "[", '"')):
        return _from_json(stripped, "")
    if _is_file(stripped):
        try:
            return InductorConfig.from_json(stripped)
        except OSError as error:
            raise ValueError(f"--config={text!r} cannot be read: {error.strerror or error}") from error
    if stripped.endswith(".json"):
        raise ValueError(f"--config={text!r}: there is no such file")
    try:
        decoded = base64.b64decode(stripped, validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"--config={text!r} is no JSON text, no file, and no base64 of JSON: {error}") from error
    return _from_json(decoded, " once decoded from base64")


def _from_json(text: str, where: str) -> InductorConfig:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--config is no JSON{where}: {error}") from error
    return InductorConfig.from_dict(data)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # a name that is too long for one
        return False


def check_writable(folder: Path) -> None:
    """Refuse a folder that could not be made or written to, before minutes are spent on what is to go there.

    Raises:
        ValueError: It is a file or below one, or nothing may be written there.
    """
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ValueError(f"--output={str(folder)!r} cannot be a folder: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"--output={str(folder)!r} cannot be written to: {nearest} is read-only")
