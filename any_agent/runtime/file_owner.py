"""Files of other users: checks that keep them out of a run, and errors that name their owner.

Another local user can prepare a folder where a run will be: with links to files of ours, keys of
theirs, or a name that they rename later. So a run's folder, and what it is known by, must be ours.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from any_agent.errors import ConfigError

TRIAL = "root=, user=, --experiment or --trial"
"""The settings that choose a trial's folder."""


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
        f"{_name(os.geteuid())}; run this as {_name(owner)} (a container: --user {owner}), or "
        f"choose a place of your own (a trial's is set by {TRIAL})"
    )


def require_own_folder(path: Path, *, private: bool = False, place: str = TRIAL) -> None:
    """Raise ConfigError for a folder that is not ours, is a link, or that others may write in.

    With ``private`` others may not read it either. A missing folder passes. ``place`` names the
    settings that choose another one.
    """
    if (found := _lstat(path)) is not None:
        _require(path, found, stat.S_ISDIR, 0o077 if private else 0o022, place)


def require_own_entries(path: Path, *, place: str = TRIAL) -> None:
    """Raise ConfigError for something in a folder that belongs neither to us nor to root."""
    try:
        with os.scandir(path) as entries:
            found = [(Path(entry), entry.stat(follow_symlinks=False)) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry, one in found:
        if one.st_uid not in (os.geteuid(), 0):
            raise _not_ours(entry, one, place)


def require_safe_parents(parents: Sequence[Path], *, place: str = TRIAL) -> None:
    """Raise ConfigError where another user could replace what is in one of these folders.

    They are the folders above one of ours, the nearest first; the last one was chosen by its user
    and may be a link. Each is ours or root's. Where everybody may write, it must be sticky, as
    `/tmp` is. Their groups are trusted: many systems give each user a group of its own.
    """
    for path in parents:
        if (found := _lstat(path)) is None:
            continue
        if found.st_uid not in (os.geteuid(), 0):
            raise _not_ours(path, found, place)
        if path == parents[-1] and stat.S_ISLNK(found.st_mode):
            path = path.resolve()
            if (found := _lstat(path)) is None:
                continue
        free = 0 if found.st_mode & stat.S_ISVTX else 0o002
        _require(path, found, stat.S_ISDIR, free, place, trusted=(os.geteuid(), 0))


def own_file(path: str, flags: int) -> int:
    """Open a file that is ours and no link; create it for its owner alone: an ``opener``.

    Raises ConfigError for anything else, before any byte changes: so it never empties a file.
    """
    return _open_own(path, flags, 0)


def secret_file(path: str, flags: int) -> int:
    """Open a file as :func:`own_file` does; ConfigError if others may read or write it, too."""
    return _open_own(path, flags, 0o077)


def _open_own(path: str, flags: int, denied: int) -> int:
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, safe, mode=0o600)
    except OSError as error:
        if error.errno != errno.ELOOP or (found := _lstat(Path(path))) is None:
            raise
        _require(Path(path), found, stat.S_ISREG, denied, TRIAL)
        raise
    try:
        _require(Path(path), os.fstat(descriptor), stat.S_ISREG, denied, TRIAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _require(
    path: Path,
    found: os.stat_result,
    kind: Callable[[int], bool],
    denied: int,
    place: str,
    *,
    trusted: Sequence[int] = (),
) -> None:
    """Raise ConfigError unless a file is of this kind, ours, and without the bits ``denied``."""
    mode, owner = stat.S_IMODE(found.st_mode), _name(found.st_uid)
    if found.st_uid not in (trusted or (os.geteuid(),)):
        raise _not_ours(path, found, place)
    if not kind(found.st_mode):
        what = "a link" if stat.S_ISLNK(found.st_mode) else "of another kind than a run has here"
        raise ConfigError(
            f"{path} of the user {owner} is {what}, and could lead elsewhere: remove it, or name "
            f"another place by {place}"
        )
    if mode & denied:
        may, remedy = "read or write", "go-rwx"
        if not denied & 0o044:
            may, remedy = "write in", "go-w" if denied & 0o020 else "+t"
        raise ConfigError(
            f"other users may {may} {path} (mode {mode:04o}, owner {owner}): chmod {remedy} {path} "
            f"if you trust what is in it, or choose another place by {place}"
        )


def _not_ours(path: Path, found: os.stat_result, place: str) -> ConfigError:
    owner, me = _name(found.st_uid), _name(os.geteuid())
    return ConfigError(
        f"{path} belongs to the user {owner}, and you are {me}: choose a place of your own by "
        f"{place}, run this as {owner} (a container: --user {found.st_uid}), or, if you trust what "
        f"is in it, chown -R {os.geteuid()} {path}"
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
