"""Files of other users: an error that says whose they are and what to do."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from any_agent.errors import ConfigError


def no_access(error: PermissionError) -> ConfigError:
    """Return the error for a file that this process's user may not use.

    ``error`` must name the file. Whose it is, is read of the nearest folder that can be seen.
    """
    path = Path(os.fsdecode(error.filename)).absolute()
    found, owner = path, os.geteuid()
    for found in (path, *path.parents):
        with suppress(OSError):
            owner = found.stat().st_uid
            break
    failed = f"there is no access to {path}"
    if owner == os.geteuid():
        return ConfigError(
            f"{failed}: {found} is yours, but its permissions or its file system forbid it; "
            f"change them (chmod u+rwX {found}), or choose another place (a trial's is root=)"
        )
    return ConfigError(
        f"{failed}: {found} belongs to the user {_name(owner)}, and you are "
        f"{_name(os.geteuid())}; run this as {_name(owner)}, or choose a place of your own (a "
        "trial's is set by root=, user=, --experiment and --trial)"
    )


@contextmanager
def access_required() -> Iterator[None]:
    """Raise ConfigError in place of a PermissionError about a file."""
    try:
        yield
    except PermissionError as error:
        if error.filename is None:
            raise
        raise no_access(error) from None


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a user of another machine, or of a container's image
        return f"number {uid}"
