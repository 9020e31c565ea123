"""Folders with weights that change while they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.rundir import checksums
from any_agent.runtime.atomic_files import atomic_folder


def write(folder: Path, content: bytes) -> None:
    with atomic_folder(folder, replace=True) as new:
        (new / "model.safetensors").write_bytes(content)
        checksums.write_manifest(new)


def test_a_folder_that_is_replaced_meanwhile_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step-00000002"
    write(folder, b"before")
    read = checksums._checksums

    def replaced(files: list[Path]) -> list[str]:
        monkeypatch.setattr(checksums, "_checksums", read)
        write(folder, b"later!")
        return read(files)

    monkeypatch.setattr(checksums, "_checksums", replaced)
    assert checksums.sound(folder)
    assert not checksums.damaged_folders(tmp_path)
    (folder / "model.safetensors").write_bytes(b"strange")
    assert not checksums.sound(folder)
    assert checksums.damaged_folders(tmp_path) == ["damaged-step-00000002"]
