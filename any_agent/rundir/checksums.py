"""Manifests of folders with weights: the size and the checksum of each file, and what is damaged.

A checkpoint and a published version each have one, written last. Checksums are CRC-32: they are for
accidents, such as a bad disk or a half-copied folder, and take half a second per gigabyte.
"""

from __future__ import annotations

import json
import logging
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from any_agent.errors import ConfigError
from any_agent.rundir.layout import checkpoint_problem
from any_agent.runtime.atomic_files import fsync

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
_DAMAGED = "damaged-"
_CHUNK = 4 << 20
_THREADS = 4


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder's files."""
    manifest = folder / MANIFEST
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != manifest)
    names = [path.relative_to(folder).as_posix() for path in files]
    sizes = [path.stat().st_size for path in files]
    data = {
        "format": FORMAT,
        "files": dict(zip(names, sizes, strict=True)),
        "crc32": dict(zip(names, _checksums(files), strict=True)),
    }
    manifest.write_text(json.dumps(data, indent=1), encoding="utf-8")


def damage(folder: Path) -> str | None:
    """Return how a folder differs from what was written, else None. It reads every file.

    Of a folder without checksums, which an earlier version wrote, only the form of its files is
    checked.
    """
    while True:
        before = _inode(folder)
        problem = _damage(folder)
        # A writer that replaces the whole folder meanwhile damages nothing.
        if _inode(folder) == before:
            return problem


def set_aside(folder: Path, problem: str) -> Path:
    """Rename a damaged folder to `damaged-...`, for people to look at, and log it."""
    number = 0
    while (target := _aside(folder, number)).exists():
        number += 1
    folder.rename(target)
    fsync(folder.parent)
    log.error("%s is damaged (%s): it is set aside as %s", folder, problem, target.name)
    return target


def sound(folder: Path) -> bool:
    """Return True if a folder is there and undamaged; a damaged one is set aside."""
    problem = damage(folder) if folder.is_dir() else None
    if problem is not None and folder.is_dir():
        set_aside(folder, problem)
    return folder.is_dir()


def require_sound(folder: Path) -> None:
    """Raise ConfigError for damaged weights, which somebody asked for by name."""
    if (problem := damage(folder)) is not None:
        raise ConfigError(
            f"{folder} is damaged: {problem}; restore it from a copy, or use another checkpoint"
        )


def damaged_folders(root: Path) -> list[str]:
    """Return the names of the folders in ``root`` that were set aside."""
    return sorted(p.name for p in root.glob(f"{_DAMAGED}*")) if root.is_dir() else []


def _aside(folder: Path, number: int) -> Path:
    return folder.with_name(f"{_DAMAGED}{folder.name}{f'-{number}' if number else ''}")


def _inode(folder: Path) -> int:
    try:
        return (folder / MANIFEST).stat().st_ino
    except OSError:
        return 0


def _damage(folder: Path) -> str | None:
    manifest = folder / MANIFEST
    try:
        data: Any = json.loads(manifest.read_bytes()) if manifest.exists() else {}
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if manifest.exists() and (problem := checkpoint_problem(folder)) is not None:
        return problem
    sums = data.get("crc32")
    if sums is None:
        log.info("%s has no checksums, as an earlier version wrote it", folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        return next((problem for path in files if (problem := _malformed(path))), None)
    try:
        if sums.keys() != data["files"].keys():
            return f"{MANIFEST} does not have a checksum for each file"
        found = _checksums([folder / name for name in sums])
    except (OSError, AttributeError) as error:
        return str(error)
    wrong = [name for name, now in zip(sums, found, strict=True) if sums[name] != now]
    return f"{', '.join(wrong)}: the content is not what was written" if wrong else None


def _checksums(files: list[Path]) -> list[str]:
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(_checksum, files))


def _checksum(path: Path) -> str:
    value = 0
    with open(path, "rb", buffering=0) as file:
        chunk = memoryview(bytearray(_CHUNK))
        while count := file.readinto(chunk):
            value = zlib.crc32(chunk[:count], value)
    return f"{value:08x}"


def _malformed(path: Path) -> str | None:
    """Return why a file of JSON or tensors cannot be read."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size - 8 - length
                header = json.loads(file.read(length) if size >= 0 else b"")
            ends = (v["data_offsets"][1] for k, v in header.items() if k != "__metadata__")
            if max(ends, default=0) != size:
                return f"{path.name} has {size} bytes of tensors, its header says otherwise"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path.name} cannot be read ({error})"
    return None
