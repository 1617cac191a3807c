"""What a phase's settings may be given as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from compile_callbacks._utils.import_ref import class_and_arguments
from compile_callbacks._utils.messages import part_of, unknown
from compile_callbacks.config import templates
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.options import check_mode

EAGER = "eager"
"""The mode string for a phase that runs uncompiled."""

USER = "user"
"""The mode in the report of a phase that the callback leaves alone (``None``): it runs as the user wrote it."""

Mode = str | Mapping[str, Any] | InductorConfig | None
"""What a phase's settings may be given as. The mapping comes before the class: LightningCLI then hands over what stands
in YAML as it stands there, and what is wrong with it is told by us, with the argument's name."""


def as_config(value: object, argument: str, also: tuple[str, ...] = ()) -> InductorConfig | None:
    """The config that a ``train_mode`` or ``infer_mode`` stands for; ``None`` where it is not to be compiled.

    Args:
        value: What was given.
        argument: The argument that it was given for.
        also: Mode strings that the argument takes beside these, to be named among the choices.

    Raises:
        ValueError: An unknown mode or field.
        TypeError: A value that is no mode, mapping or config.
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
        known = [f.name for f in fields(InductorConfig)]
        for name in value:
            if name not in known:
                as_option = f" Inductor's options go into {argument}={{'options': {{...}}}}."
                raise ValueError(unknown(f"{argument} field", name, known) + as_option)
        with part_of(argument):
            return InductorConfig(**value)
    raise TypeError(
        f"{argument}={value!r} must be a mode, a mapping of InductorConfig's fields, an InductorConfig or None, "
        f"not {type(value).__name__}"
    )
