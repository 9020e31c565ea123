"""Implementations by name: registered in this process, or imported by their dotted name."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from any_agent.errors import ConfigError
from any_agent.runtime.import_string import import_string

T = TypeVar("T")


class NamedRegistry(Generic[T]):
    """Named implementations of one interface.

    ``what`` and ``setting`` name the interface and the setting that chooses one, for errors.
    A text in ``builtin`` is the dotted name of an implementation, imported at its first use.
    """

    def __init__(self, what: str, setting: str, **builtin: T | str) -> None:
        self._what = what
        self._setting = setting
        self._known: dict[str, T | str] = dict(builtin)

    def register(self, name: str, implementation: T) -> T:
        """Add an implementation; ValueError for a name with a dot or one that is in use."""
        if not name or "." in name:
            raise ValueError(f"the name of a {self._what} must be a word without dots: {name!r}")
        if self._known.setdefault(name, implementation) is not implementation:
            raise ValueError(f"there is already a {self._what} named {name!r}")
        return implementation

    def find(self, name: str) -> T:
        """Return the implementation of this name; ConfigError, with the known names, for no other.

        ``package.module.name`` is imported, so that every process of a run finds it.
        """
        found: Any = self._known.get(name, name)
        if not isinstance(found, str):
            return found  # type: ignore[no-any-return]
        if "." not in found:
            raise ConfigError(
                f"{self._setting}={name}: there is no {self._what} of this name; known are "
                f"{', '.join(sorted(self._known))}, or write package.module.name to import one"
            )
        imported: T = import_string(found, self._what)
        if name in self._known:
            self._known[name] = imported
        return imported
