"""`as_config`: converts the value of a mode argument, such as ``train_mode``, to an `InductorConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.import_ref import class_and_arguments
from compile_callbacks._utils.messages import part_of, unknown
from compile_callbacks.config import templates
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.options import check_mode

EAGER = "eager"
"""The mode of a phase that runs uncompiled."""

USER = "user"
"""In a report, the mode of a phase that the callback leaves alone: its modules run as the user compiled them."""

Mode = str | Mapping[str, Any] | InductorConfig | None
"""The type of a mode argument. ``Mapping`` comes before the class, so that LightningCLI passes a YAML mapping on
unchanged, and the messages about its entries are those of `as_config`."""


def as_config(value: object, argument: str, also: tuple[str, ...] = ()) -> InductorConfig | None:
    """Return the config that a mode stands for; ``None`` for ``None`` and ``"eager"``, which compile nothing.

    Args:
        value: The mode: a mode's or a template's name, a mapping of `InductorConfig`'s fields, or a config.
        argument: The name of the argument, for messages.
        also: Further strings that the argument accepts, which messages list.

    Raises:
        ValueError: The mode or a field is unknown.
        TypeError: The value has another type.
    """
    if isinstance(value, Mapping) and "class_path" in value:
        _, value = class_and_arguments(value, argument, (InductorConfig,))
    if value is None or value == EAGER:
        return None
    if isinstance(value, InductorConfig):
        return value
    if isinstance(value, str):
        if value in templates.names():
            return InductorConfig(template=value)
        check_mode(value, argument, also=(EAGER, *also, *templates.names()))
        return InductorConfig(mode=value)
    if isinstance(value, Mapping):
        known = [field.name for field in fields(InductorConfig)]
        for name in value:
            if name not in known:
                hint = f" Inductor options belong in {argument}={{'options': {{...}}}}."
                raise ValueError(with_code("CC201", unknown(f"{argument} field", name, known) + hint))
        with part_of(argument):
            return InductorConfig(**value)
    raise TypeError(
        with_code(
            "CC202",
            f"{argument}={value!r} must be a mode, a mapping of InductorConfig's fields or an InductorConfig, not "
            f"{type(value).__name__}",
        )
    )


def as_compiling_config(value: object, argument: str = "mode") -> InductorConfig:
    """Return the config that a mode stands for.

    Raises:
        ValueError: The mode or a field is unknown, or the mode compiles nothing (``None`` and ``"eager"``).
        TypeError: The value has another type.
    """
    config = as_config(value, argument)
    if config is None:
        raise ValueError(with_code("CC203", f"{argument}={value!r} compiles nothing; give a mode of torch.compile"))
    return config
