"""A trial's folder of another user: one line that says whose it is, from every command."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from any_agent.cli.main import main
from any_agent.client.service_url import UrlFile
from any_agent.errors import ConfigError
from any_agent.rundir.layout import RunDir
from any_agent.runtime.file_owner import no_access
from proxy_ext.export.__main__ import main as export
from tests.support.errors import fails_with


@contextmanager
def no_access_to(folder: Path) -> Iterator[str]:
    """Take this process the access to a folder; yield the word of errors that says whose it is."""
    if os.geteuid():
        folder.chmod(0)
        try:
            yield "is yours"
        finally:
            folder.chmod(0o700)
        return
    os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        yield "belongs to the user root, and you are nobody"
    finally:
        os.seteuid(0)


@pytest.fixture
def trial(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "u" / "e" / "t")
    run.create()
    (run.path / "config.yaml").write_text("{}")
    run.url.write_text("http://127.0.0.1:1\n")
    return run


@pytest.mark.parametrize("command", ["config", "keys list", "keys create --scope admin", "export"])
def test_a_command_names_the_owner_in_one_line(
    command: str, trial: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"root={trial.path.parents[2]}", "user=u", "experiment=e", "trial=t"]
    with no_access_to(trial.path) as whose:
        code = export(names) if command == "export" else main([*command.split(), *names])
    err = capsys.readouterr().err
    assert code != 0 and whose in err
    if command != "export":
        assert code == 2 and err.count("\n") == 1 and "root=" in err


def test_a_known_url_stays_while_its_file_cannot_be_read_and_an_unknown_one_is_refused(
    trial: RunDir,
) -> None:
    known = UrlFile(trial.url)
    url = known.read()
    with no_access_to(trial.path) as whose:
        assert known.read() == url == "http://127.0.0.1:1"
        with fails_with(ConfigError, whose):
            UrlFile(trial.url).read()


def test_an_owner_without_a_name_has_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    error = no_access(PermissionError(13, "Permission denied", str(tmp_path / "a" / "b")))
    assert "4000000" in error.message
    assert str(tmp_path / "a" / "b") in error.message
