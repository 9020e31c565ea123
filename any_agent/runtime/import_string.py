"""Classes, functions and objects by their dotted names."""

from __future__ import annotations

import difflib
import inspect
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from any_agent.errors import ConfigError


def import_string(name: str, what: str = "workflow") -> Any:
    """What ``package.module.Name`` stands for; ``what`` it is to be, for errors.

    Raises ConfigError: there is no such module, it fails while it is imported, or has no such name.
    """
    if ":" in name:
        raise ConfigError(f"{what} {name!r}: a dot, not a colon: {name.replace(':', '.')}")
    module_name, dot, attribute = name.rpartition(".")
    if not dot and name.isidentifier() and find_spec(name) is not None:
        raise _no_class(name, what)
    if not dot or not module_name:
        raise ConfigError(
            f"{what} {name!r} names no module: write module.Class, as in my_agent.MyAgent"
        )
    module = import_by_setting(module_name, f"{what} {name!r}")
    found = getattr(module, attribute, None)
    # A package has those of its modules only that were imported.
    unloaded = found is None and hasattr(module, "__path__") and find_spec(name) is not None
    if isinstance(found, ModuleType) or unloaded:
        raise _no_class(name, what)
    if not hasattr(module, attribute):
        classes = _classes_of(module)
        near = difflib.get_close_matches(attribute, classes, n=1)
        raise ConfigError(
            f"{what} {name!r}: {module_name} ({getattr(module, '__file__', '?')}) has no "
            f"{attribute!r}; {f'did you mean {module_name}.{near[0]}? Its' if near else 'its'} "
            f"classes are {', '.join(classes) or 'none'}"
        )
    return found


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


def _no_class(name: str, what: str) -> ConfigError:
    return ConfigError(f"{what} {name!r} names a module, no class: write {name}.ClassName")


def _classes_of(module: ModuleType) -> list[str]:
    """Those that are written there, or in a package's own modules."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and name[0] != "_"
        and f"{value.__module__}.".startswith(f"{module.__name__}.")
    ]
