"""Griffe's extension for the site: a docstring's :func:`name`, a role of Sphinx, becomes `name`."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")


class PlainRoles(griffe.Extension):
    """Replaces the roles in every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
