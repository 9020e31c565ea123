"""Damage is found in a folder's content, and not in a process that cannot read it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from any_agent.errors import StartupError
from any_agent.rundir import checksums
from tests.support.errors import fails_with


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "v00000001"
    made.mkdir()
    (made / "config.json").write_text("{}", encoding="utf-8")
    checksums.write_manifest(made)
    return made


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.EIO])
def test_only_an_error_of_the_disk_counts_as_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A process that cannot read sets nothing aside."""

    def refuse(path: Path, *_: object, **__: object) -> str:
        raise OSError(number, "refused", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checksums, "open", refuse, raising=False)
        if number == errno.EIO:
            assert not checksums.sound(folder)
            assert checksums.damaged_folders(folder.parent) == [f"damaged-{folder.name}"]
            return
        with fails_with(StartupError, folder.name, "refused"):
            checksums.sound(folder)
    assert checksums.sound(folder)
