"""Manifests of folders with weights: the size and the checksum of each file, and what is damaged.

A checkpoint and a published version each have one, written last. Checksums are CRC-32: they are for
accidents, such as a bad disk or a half-copied folder, and take half a second per gigabyte.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from any_agent.errors import ConfigError, StartupError
from any_agent.rundir.layout import checkpoint_problem
from any_agent.runtime.atomic_files import fsync

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
_DAMAGED = "damaged-"
_CHUNK = 4 << 20
_THREADS = 4
_OF_THIS_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
"""Errors that say nothing about a file's content."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder's files."""
    manifest = folder / MANIFEST
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != manifest)
    names = [path.relative_to(folder).as_posix() for path in files]
    sizes = [path.stat().st_size for path in files]
    data = {
        "format": FORMAT,
        "files": dict(zip(names, sizes, strict=True)),
        "crc32": dict(zip(names, file_checksums(files), strict=True)),
    }
    manifest.write_text(json.dumps(data, indent=1), encoding="utf-8")


def damage(folder: Path) -> str | None:
    """Return how a folder differs from what was written, else None. It reads every file.

    Raises StartupError if this process may not read it, or has nothing left to read it by.
    """
    try:
        data: Any = json.loads((folder / MANIFEST).read_bytes())
        if not {"files", "crc32"} & data.keys():
            # A model's folder may have a file of this name that is no manifest of ours.
            return None
        if (problem := checkpoint_problem(folder)) is not None:
            return problem
        sums = data.get("crc32", {})
        if sums.keys() != data["files"].keys():
            return f"{MANIFEST} does not have a checksum for each file"
        found = file_checksums([folder / name for name in sums])
    except (OSError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in _OF_THIS_PROCESS:
            raise StartupError(
                f"{folder} cannot be checked ({error}): it stays as it is; let this user read it, "
                "or raise the limit, and start again"
            ) from error
        return f"it cannot be read ({error})"
    wrong = [name for name, now in zip(sums, found, strict=True) if sums[name] != now]
    return f"{', '.join(wrong)}: the content is not what was written" if wrong else None


def sound(folder: Path) -> bool:
    """Return True if a folder is there and undamaged; a damaged one is set aside."""
    problem = damage(folder) if folder.is_dir() else None
    # Read again: a writer that replaced the whole folder meanwhile has damaged nothing.
    if problem is not None and (problem := damage(folder)) is not None:
        set_aside(folder, problem)
    return folder.is_dir()


def set_aside(folder: Path, problem: str) -> None:
    """Rename a damaged folder to `damaged-...`, for people to look at, and log it."""
    name, number = f"{_DAMAGED}{folder.name}", 1
    while (target := folder.with_name(name)).exists():
        name, number = f"{_DAMAGED}{folder.name}-{number}", number + 1
    try:
        folder.rename(target)
        fsync(folder.parent)
    except FileNotFoundError:
        return  # It was removed while it was read.
    except OSError as error:
        raise StartupError(
            f"{folder} is damaged ({problem}), and it cannot be renamed ({error.strerror}): "
            "remove it, or make its folder writable"
        ) from error
    log.error("%s is damaged (%s): it is set aside as %s", folder, problem, name)


def require_sound(folder: Path) -> None:
    """Raise ConfigError for damaged weights, which somebody asked for by name."""
    if (problem := damage(folder)) is not None:
        raise ConfigError(
            f"{folder} is damaged: {problem}; restore it from a copy, or use another checkpoint"
        )


def damaged_folders(root: Path) -> list[str]:
    """Return the names of the folders in ``root`` that were set aside."""
    return sorted(path.name for path in root.glob(f"{_DAMAGED}*"))


def file_checksums(files: list[Path]) -> list[str]:
    """Return the CRC-32 of each file, 8 hexadecimal digits."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(_checksum, files))


def _checksum(path: Path) -> str:
    value = 0
    with open(path, "rb", buffering=0) as file:
        chunk = memoryview(bytearray(_CHUNK))
        while count := file.readinto(chunk):
            value = zlib.crc32(chunk[:count], value)
    return f"{value:08x}"


def tensor_ends(path: Path) -> dict[str, int]:
    """Return the names of a safetensors file's tensors, each with the byte at which it ends.

    Raises ValueError for a file that is none, or is cut off.
    """
    with open(path, "rb") as file:
        return tensor_ends_in(file, os.fstat(file.fileno()).st_size)


def tensor_ends_in(file: BinaryIO, size: int) -> dict[str, int]:
    """Return the same of an open file, or of its bytes in memory; ``size`` is how many it has."""
    length = int.from_bytes(file.read(8), "little")
    if 8 + length > size:
        raise ValueError(f"it has {size} bytes, and its header alone is said to have {length}")
    header = json.loads(file.read(length))
    try:
        ends = {k: v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"}
        whole = 8 + length + max(ends.values(), default=0)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"its {size} bytes do not begin with a header of tensors") from error
    if whole != size:
        raise ValueError(f"it has {size} bytes, and must have {whole} bytes")
    return ends
