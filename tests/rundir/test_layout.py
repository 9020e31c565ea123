from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from any_agent.errors import StartupError
from any_agent.rundir.layout import FORMAT, RunDir, read_json, write_json
from tests.support.errors import fails_with


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.of(tmp_path, "me", "exp", "trial")
    run.create()
    return run


def test_a_run_folder_is_readable_by_its_owner_alone(run: RunDir) -> None:
    run.signing_secrets()
    with run.lock():
        run.next_epoch(0)
    for path in (run.path, *run.path.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    run.logs.chmod(0o750)
    run.create()
    assert run.logs.stat().st_mode & 0o777 == 0o750, "an owner who shares it knows why"


def test_several_processes_may_create_a_run_folder_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are started by hand for a new trial create its folder at the same time."""
    run, ready = RunDir(tmp_path / "trial"), threading.Barrier(4)
    monkeypatch.setattr(os, "fsync", lambda _: time.sleep(0.05))

    def create(_: int) -> None:
        ready.wait(10)
        run.create()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(create, range(4)))
    assert (run.path / "format").read_text() == f"{FORMAT}\n"
    assert [path.name for path in run.path.iterdir() if path.is_file()] == ["format"]


@pytest.mark.service
def test_a_second_service_cannot_lock_the_same_run(run: RunDir) -> None:
    with run.lock():
        code = (
            "import sys; from pathlib import Path; from any_agent.rundir import RunDir\n"
            "with RunDir(Path(sys.argv[1])).lock(): pass"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(run.path)], capture_output=True, text=True
        )
        assert other.returncode == 1
        assert "another service is using" in other.stderr
        with fails_with(StartupError, run.path, "another service"), run.lock():
            pass
    with run.lock():
        pass


def test_the_secret_is_made_once_for_its_owner_only(run: RunDir) -> None:
    secret = run.signing_secret()
    assert len(secret) == 32
    assert run.signing_secret() == secret
    assert (run.path / "secret.key").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in run.path.iterdir() if "secret" in p.name] == ["secret.key"]


@pytest.mark.parametrize("content", ["", "00" * 31, "zz" * 32, "\x00" * 64])
def test_a_half_written_secret_is_not_taken(run: RunDir, content: str) -> None:
    """A key signed with it could be forged."""
    run.secret.write_text(content)
    run.secret.chmod(0o600)
    with fails_with(StartupError, run.secret, "no secret"):
        run.signing_secret()


def test_json_is_replaced_whole(run: RunDir) -> None:
    assert read_json(run.state) is None
    assert read_json(run.state, {"a": 1}) == {"a": 1}
    write_json(run.state, {"step": 1})
    with pytest.raises(TypeError):
        write_json(run.state, {"step": object()})
    assert read_json(run.state) == {"step": 1}
    write_json(run.state, {"step": 2})
    assert read_json(run.state) == {"step": 2}


def test_each_start_of_the_trainer_has_a_number_of_its_own(run: RunDir) -> None:
    assert [run.next_epoch(0) for _ in range(3)] == [1, 2, 3]
    assert RunDir(run.path).next_epoch(2) == 4


@pytest.mark.parametrize("content", ["", "x", "4\x00\x00", "1", "-3", "9" * 400, "\xff", None])
def test_the_number_of_a_start_is_above_what_the_journals_have(
    run: RunDir, content: str | None
) -> None:
    """The file was emptied by a crash, cut off or removed."""
    path = run.path / "trainer.epoch"
    for _ in range(3):
        run.next_epoch(0)
    if content is None:
        path.unlink()
    else:
        path.write_text(content, encoding="latin-1")
    assert run.next_epoch(41) == 42
    assert run.next_epoch(0) == 43


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run = RunDir(tmp_path)
    with fails_with(StartupError, tmp_path, "No locks available"), run.lock():
        pass
