"""Logs, keys and settings of a run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.auth.key_store import create_key
from any_agent.errors import NotFound
from any_agent.rundir.layout import RunDir
from router.dashboard import service_files
from router.dashboard.service_files import keys_of, log_of, logs_of, settings_of


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def test_the_end_of_a_long_log_is_shown_in_whole_lines(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.logs / "rank-0.log").write_bytes(b"first\nsecond \xff\n")
    (run.logs / "Other.log").write_text("x")
    assert logs_of(run) == ["rank-0"]
    assert log_of(run, "rank-0").text == "first\nsecond \ufffd\n"
    assert log_of(run, "rank-0").whole
    monkeypatch.setattr(service_files, "MAX_BYTES", 10)
    tail = log_of(run, "rank-0")
    assert (tail.text, tail.whole) == ("second \ufffd\n", False)
    for end in (b"", b"\n"):
        (run.logs / "rank-0.log").write_bytes(b"one line without an end" + end)
        assert log_of(run, "rank-0").text == ("one line without an end" + end.decode())[-10:]


def test_no_file_but_a_log_is_shown(run: RunDir) -> None:
    (run.logs / "rank-0.log").write_text("x")
    (run.logs / "link.log").symlink_to(run.secret)
    run.signing_secret()
    for name in ("rank-1", "../secret", "..", "a/b", "RANK-0", "rank-0\n", "link"):
        with pytest.raises(NotFound):
            log_of(run, name)


def test_keys_are_listed_without_their_texts_and_hashes(run: RunDir) -> None:
    text, key = create_key(run.keys, "tenant", tenant="alice")
    (row,), problem = keys_of(run)
    assert problem == ""
    assert (row.id, row.scope, row.tenant, row.state) == (key.id, "tenant", "alice", "live")
    assert text not in str(row)
    assert key.hash not in str(row)
    run.keys.write_text("{")
    rows, problem = keys_of(run)
    assert rows == [] and "is no file of keys" in problem


def test_the_settings_of_the_run_are_shown_or_said_to_be_unreadable(run: RunDir) -> None:
    assert "cannot be read" in settings_of(run)
    run.resolved.write_text("server: {ranks: 2}\n")
    assert settings_of(run) == "server: {ranks: 2}\n"
