"""Journals on machines' own disks, and between two services in the run's folder."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.journal_storage import fetch_journals, note_homes, store_journals
from any_agent.rundir.layout import RunDir, read_json
from tests.support.errors import fails_with
from tests.support.launcher.stand_ins import Lab


def on(machine: str, tmp_path: Path) -> RunDir:
    """The run as this machine sees it: one folder for all, a disk for each."""
    run = RunDir.of(tmp_path / "shared", "me", "exp", "trial", tmp_path / machine / "disk")
    run.create()
    return run


def write(journal: Path, *rows: str) -> sqlite3.Connection:
    """Open, as while a service uses it."""
    connection = sqlite3.connect(journal)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE IF NOT EXISTS said (text)")
    connection.executemany("INSERT INTO said VALUES (?)", [(row,) for row in rows])
    connection.commit()
    return connection


def rows_of(journal: Path) -> Sequence[str]:
    with closing(sqlite3.connect(journal)) as connection:
        return [text for (text,) in connection.execute("SELECT text FROM said ORDER BY rowid")]


def nothing(line: str) -> None:
    raise AssertionError(line)


def test_a_machine_goes_on_with_the_journals_that_another_one_left(tmp_path: Path) -> None:
    one, two = on("n1", tmp_path), on("n2", tmp_path)
    fetch_journals(one, [0, 1], "n1", nothing)
    write(one.journal(0), "a").close()
    store_journals(one, [0, 1], "n1", nothing)
    fetch_journals(two, [0, 1], "n2", nothing)
    assert rows_of(two.journal(0)) == ["a"]
    assert not two.journal(1).exists()
    write(two.journal(0), "b").close()
    store_journals(two, [0, 1], "n2", nothing)
    # What lies there still is old by now.
    fetch_journals(one, [0, 1], "n1", nothing)
    assert rows_of(one.journal(0)) == ["a", "b"]


def test_a_copy_of_a_journal_is_whole_while_somebody_reads_it(tmp_path: Path) -> None:
    """A backup, say, or a shell that was left open: SQLite keeps its log for that reader."""
    one, two = on("n1", tmp_path), on("n2", tmp_path)
    fetch_journals(one, [0], "n1", nothing)
    write(one.journal(0), "a").close()
    with closing(sqlite3.connect(one.journal(0))) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM said").fetchone() == (1,)
        write(one.journal(0), "b").close()
        store_journals(one, [0], "n1", nothing)
    fetch_journals(two, [0], "n2", nothing)
    assert rows_of(two.journal(0)) == ["a", "b"]
    assert [path.name for path in one.journal(0).parent.iterdir() if "partial" in path.name] == []


def test_a_journal_that_did_not_end_well_is_reported_lost_elsewhere(tmp_path: Path) -> None:
    one, two = on("n1", tmp_path), on("n2", tmp_path)
    said: list[str] = []
    fetch_journals(one, [0], "n1", nothing)
    write(one.journal(0), "a").close()
    fetch_journals(one, [0], "n1", nothing)
    assert rows_of(one.journal(0)) == ["a"], "after a crash it is still here"
    fetch_journals(two, [0], "n2", said.append)
    assert not two.journal(0).exists()
    assert said == [
        f"rank 0    its sessions are lost: they are at n1:{one.journal(0)}, "
        "which did not end normally"
    ]


def test_a_journal_of_an_earlier_run_of_the_name_is_not_this_ones(tmp_path: Path) -> None:
    """Somebody removed the run's folder, and the nodes' disks kept theirs."""
    for turn, text in enumerate(("a", "b"), start=1):
        run = on("n1", tmp_path)
        said: list[str] = []
        fetch_journals(run, [0], "n1", said.append)
        assert not run.journal(0).exists()
        aside = Path(f"{run.journal(0)}.earlier-{turn - 1}")
        assert turn == 1 or said == [
            "rank 0    a journal of an earlier run of this name was here; "
            f"it was renamed to {aside}"
        ]
        with closing(write(run.journal(0), text)):
            # As a process leaves it that is killed: some of it is in the log only.
            log = Path(f"{run.journal(0)}-wal")
            shutil.copyfile(run.journal(0), tmp_path / "main")
            shutil.copyfile(log, tmp_path / "log")
        (tmp_path / "main").replace(run.journal(0))
        (tmp_path / "log").replace(log)
        shutil.rmtree(run.path)
    run = on("n1", tmp_path)
    fetch_journals(run, [0], "n1", lambda _: None)
    for number, text in ((1, "a"), (2, "b")):
        assert rows_of(Path(f"{run.journal(0)}.earlier-{number}")) == [text]


def test_the_folder_of_journals_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on("n1", tmp_path)
    folder = run.journal(0).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    run.create()  # an owner who lets others read knows why
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        with fails_with(ConfigError, f"chmod go-w {folder}", "server.journal_dir"):
            run.create()
    folder.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with fails_with(ConfigError, folder, "server.journal_dir"):
            run.make_journals()
    # What somebody planted there leads elsewhere.
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with fails_with(ConfigError, folder, "server.journal_dir"):
        run.create()
    with fails_with(ConfigError, folder, "server.journal_dir"):
        fetch_journals(run, [0], "n1", nothing)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = RunDir.of(tmp_path, "me", "exp", "trial", tmp_path / "file" / "disk")
    with fails_with(ConfigError, "/trial", "Not a directory"):
        run.create()


def test_a_service_brings_and_leaves_them_wherever_it_runs(lab: Lab, tmp_path: Path) -> None:
    """What it serves on this machine is what a job goes on with on another one."""
    two = on("n2", tmp_path)
    settings = ["server.ranks=2", f"root={tmp_path / 'shared'}", "user=me", "experiment=exp"]
    settings += ["trial=trial", f"server.journal_dir={tmp_path / 'n1' / 'disk'}"]
    fetch_journals(two, [0, 1], "n2", nothing)
    write(two.journal(1), "a").close()
    store_journals(two, [0, 1], "n2", nothing)
    with lab.node(*settings, train=False) as node:
        assert rows_of(node.dir.journal(1)) == ["a"]
        assert read_json(node.dir.path / "journal" / "rank-1.json")["kept"] is False
        write(node.dir.journal(1), "b").close()
    fetch_journals(two, [0, 1], "n2", nothing)
    assert rows_of(two.journal(1)) == ["a", "b"]


def test_a_journal_that_left_its_log_is_not_dropped_for_it(tmp_path: Path) -> None:
    """It ran without Redis since, and ended well on another machine."""
    one, two = on("n1", tmp_path), on("n2", tmp_path)
    fetch_journals(one, [0], "n1", nothing)
    note_homes(one, [0], "n1")
    write(one.journal(0), "a").close()
    store_journals(one, [0], "n1", nothing)
    with fails_with(StartupError, "rank 0 ", "on n1"):
        note_homes(two, [0], "n2")
    note_homes(one, [0], "n1")
