"""Imports by dotted names, and registries of named implementations."""

from __future__ import annotations

import difflib
import inspect
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from any_agent.errors import ConfigError

Kind: TypeAlias = Literal["class", "function"]
_EXAMPLES: dict[Kind, str] = {
    "class": "module.Class, as in my_agent.MyAgent",
    "function": "module.function, as in my_rewards.exact",
}
_PLURALS: dict[Kind, str] = {"class": "classes", "function": "functions"}


def import_string(name: str, what: str = "workflow", *, kind: Kind = "class") -> Any:
    """Import ``package.module.Name``; ``what`` names its purpose in errors, which suggest names of
    this ``kind``.

    Raises ConfigError if the module is missing, fails while it is imported, or lacks the name.
    """
    if ":" in name:
        raise ConfigError(f"{what} {name!r}: write a dot, not a colon: {name.replace(':', '.')}")
    module_name, dot, attribute = name.rpartition(".")
    if not dot and name.isidentifier() and find_spec(name) is not None:
        raise _only_a_module(name, what, kind)
    if not dot or not module_name:
        raise ConfigError(f"{what} {name!r} names no module: write {_EXAMPLES[kind]}")
    module = import_by_setting(module_name, f"{what} {name!r}")
    found = getattr(module, attribute, None)
    # A package has only those of its modules as attributes that were imported.
    unloaded = found is None and hasattr(module, "__path__") and find_spec(name) is not None
    if isinstance(found, ModuleType) or unloaded:
        raise _only_a_module(name, what, kind)
    if not hasattr(module, attribute):
        names = _names_in(module, kind)
        near = difflib.get_close_matches(attribute, names, n=1)
        raise ConfigError(
            f"{what} {name!r}: {module_name} ({getattr(module, '__file__', '?')}) has no "
            f"{attribute!r}; {f'did you mean {module_name}.{near[0]}? Its' if near else 'its'} "
            f"{_PLURALS[kind]} are {', '.join(names) or 'none'}"
        )
    return found


def name_of(found: Any) -> str:
    """Return the dotted name of a function or a class, or that of an object's class."""
    named = found if hasattr(found, "__qualname__") else type(found)
    return f"{named.__module__}.{named.__qualname__}"


def import_by_setting(name: str, setting: str) -> ModuleType:
    """Import the module that ``setting`` names.

    Raises ConfigError: there is no such module, or it fails while it is imported.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            raise ConfigError(
                f"{setting}: there is no module {missing!r}. Run the script from the folder that "
                "the file is in, or put that folder into PYTHONPATH"
            ) from None
        raise ConfigError(
            f"{setting}: {name} imports {missing!r}, which is not installed"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{setting}: {name} fails when it is imported: {type(error).__name__}: {error}"
        ) from error


def _only_a_module(name: str, what: str, kind: Kind) -> ConfigError:
    member = "ClassName" if kind == "class" else "function_name"
    return ConfigError(f"{what} {name!r} names a module, no {kind}: write {name}.{member}")


def _names_in(module: ModuleType, kind: Kind) -> list[str]:
    """Return the public classes, or functions, that the module, or a package's own modules,
    define."""
    wanted = inspect.isclass if kind == "class" else inspect.isfunction
    return [
        name
        for name, value in vars(module).items()
        if wanted(value)
        and name[0] != "_"
        and f"{value.__module__}.".startswith(f"{module.__name__}.")
    ]


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
