"""The base class and the types of every section of the settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict
from pydantic.types import StringConstraints

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]


class Section(BaseModel):
    """Settings under one name, immutable; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def listed(value: object) -> object:
    """Split a text at its commas, as a list is written on a command line."""
    if not isinstance(value, str):
        return value
    return [part.strip(" '\"") for part in value.strip("[] ").split(",") if part.strip()]
