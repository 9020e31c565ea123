"""`any-agent export --out`: files are replaced whole, what is no file is written to."""

from __future__ import annotations

import asyncio
import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from any_agent.errors import ConfigError
from proxy_ext.export.output import output
from tests.proxy_ext.export.test_export import export
from tests.support.archives import Rank, settings_of
from tests.support.errors import fails_with

LINES = [b"one\n", b"two\n"]


def write(name: object) -> None:
    with output(str(name)) as out:
        for line in LINES:
            out.write(line)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    path.chmod(0o600)
    before = path.stat()
    with pytest.raises(ZeroDivisionError), output(str(path)) as out:
        out.write(LINES[0])
        raise ZeroDivisionError
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["out"]
    write(path)
    assert path.read_bytes() == b"".join(LINES) and os.listdir(tmp_path) == ["out"]
    assert path.stat().st_ino != before.st_ino and path.stat().st_mode == before.st_mode


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_leads_to_is_written(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "there" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there:
        target.write_text("before")
    link.symlink_to("there/target")
    write(link)
    assert link.is_symlink() and target.read_bytes() == b"".join(LINES)
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("linked", [True, False])
def test_a_pipe_is_written_to_until_its_reader_leaves(tmp_path: Path, linked: bool) -> None:
    pipe = name = tmp_path / "pipe"
    os.mkfifo(pipe)
    if linked:
        name = tmp_path / "link"
        name.symlink_to(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write(name)
    reader.join(30)
    assert got == [b"".join(LINES)]
    left = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(BrokenPipeError), output(str(name)) as out:
        os.close(left)
        out.write(bytes(1 << 20))
    assert stat.S_ISFIFO(pipe.stat().st_mode) and name.is_symlink() == linked


def test_a_file_that_is_open_and_deleted(tmp_path: Path) -> None:
    with open(tmp_path / "gone", "wb+") as file:
        (tmp_path / "gone").unlink()
        write(f"/dev/fd/{file.fileno()}")
        assert file.read() == b"".join(LINES)
    assert os.listdir(tmp_path) == []


def test_names_of_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    names = ("", "/new/", "/no/out", "/file/out", "/loop")
    for name in ("", *(f"{tmp_path}{name}" for name in names)):
        with fails_with(ConfigError, name) as refused:
            write(name)
        assert ".partial" not in refused.value.message


@pytest.mark.service
async def test_what_cannot_be_written_is_named(rank: Rank, tmp_path: Path) -> None:
    """As on a full disk, but for the limit on a file's size."""
    for id in "abc":
        await rank.add(id, text=id * 50_000)
    await rank.stop()
    path = tmp_path / "out"
    path.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        done = export(tmp_path, "--out", str(path))
        command = [sys.executable, "-m", "any_agent.cli", "export", *settings_of(tmp_path)]
        into = ["sh", "-c", f'exec "$@" >{tmp_path}/standard', "sh", *command]
        standard = await asyncio.to_thread(subprocess.run, into, stderr=subprocess.PIPE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = "File too large"
    assert done.code == 1
    assert f"{path}: {said}" in done.said and done.said.count("\n") == 1
    assert path.read_text() == "before"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert standard.returncode == 1
    assert standard.stderr.decode().endswith(f": {said}\n")
    await rank.start()
