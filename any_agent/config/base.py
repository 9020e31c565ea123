"""The base class and the types of every section of the settings."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic.types import StringConstraints

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]


class Section(BaseModel):
    """Settings under one name, immutable; unknown names are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        # Every part reads the settings again: infinite, as no bound at all, must not become null.
        ser_json_inf_nan="constants",
    )


def split_texts(value: object) -> object:
    """Split a text at its commas, as a list is written on a command line."""
    if not isinstance(value, str):
        return value
    return [part.strip(" '\"") for part in value.strip("[] ").split(",") if part.strip()]


Texts = Annotated[tuple[str, ...], BeforeValidator(split_texts)]
"""Texts, given as a list or separated by commas."""
LocalPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""The path of a file or folder, or another name; ``~`` stands for the user's home."""
