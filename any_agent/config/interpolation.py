"""``${actor.path}`` in a file of settings: the value that another name has there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from any_agent.errors import ConfigError

_WHOLE = re.compile(r"\$\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*\}")
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env:")


def resolve(
    data: Mapping[str, Any],
    source: object,
    variable: Callable[[str], str],
    changed: Callable[[str], tuple[bool, Any]],
) -> dict[str, Any]:
    """Return a file's settings with the value of ``b`` of ``a`` for each whole ``${a.b}``.

    ``source`` names the file; ``variable`` gives the environment's name of a setting, ``changed``
    whether the environment or the command line gives a setting, and its value, which then counts.
    Raises ConfigError for names that the file lacks, circles, and other uses of ``${``.
    """

    def resolved(value: Any, key: str, trail: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            # In a copy: what is named twice must not be held twice.
            return {k: resolved(one, f"{key}.{k}", trail) for k, one in value.items()}
        if isinstance(value, list):
            return [resolved(one, key, trail) for one in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        match = _WHOLE.fullmatch(value)
        if match is None:
            refuse(value, key, variable)
        name = match[1]
        if name in trail:
            raise ConfigError(
                f"{key}: {' -> '.join((*trail, name))} is a circle in {source}: write the value"
            )
        given, other = changed(name)
        if given:
            return other
        return resolved(named(name, key), name, (*trail, name))

    def named(name: str, key: str) -> Any:
        value: Any = data
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise ConfigError(f"{key}: ${{{name}}} names nothing in {source}: write the value")
            value = value[part]
        return value

    return {k: resolved(one, str(k), ()) for k, one in data.items()}


def refuse(value: str, key: str, variable: Callable[[str], str]) -> NoReturn:
    """Raise ConfigError for a text with ``${`` that is not resolved; the text is not shown."""
    if _ENVIRONMENT.search(value):
        raise ConfigError(
            f"{key}: ${{oc.env:...}} is not resolved: set it by the environment {variable(key)}"
        )
    raise ConfigError(
        f"{key}: only a whole value ${{section.name}} in a file is resolved: write the value"
    )
