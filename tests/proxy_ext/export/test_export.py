"""`any-agent export`: each session once, in order, whole or said so; files are replaced whole."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from any_agent.config import load_config
from any_agent.errors import ConfigError
from any_agent.types import SessionState
from proxy_ext.archive.files import ArchiveFolder, ArchiveWriter, read_lines
from proxy_ext.archive.records import read_record
from proxy_ext.export import reader as reading
from proxy_ext.export.__main__ import main
from proxy_ext.export.output import output
from proxy_ext.journal import EraseContent, SetReward
from proxy_ext.journal.reader import ExportFilter
from tests.support.archives import CALLS, Exported, Rank, archive_now, export_trial, settings_of
from tests.support.errors import fails_with
from tests.support.proxy import HELLO
from tests.support.proxy_fixtures import Start
from tests.support.sessions import played

TRIAL = Path("u") / "e" / "t"
JOURNAL = Path("journal") / "rank-0.sqlite"
PAGE = 16_384


def export(root: Path, *arguments: str, open_files: int | None = None) -> Exported:
    """Run the program as a process."""
    config = load_config(None, settings_of(root), {})
    return Exported(config, *arguments, open_files=open_files)


async def fill(rank: Rank) -> None:
    """Some archived, some not, in turns."""
    await rank.add("a")
    await rank.add("b", SessionState.TRAINED, step=9)
    await rank.add("c", SessionState.EVALUATED)
    await rank.archive.sweep()
    await rank.add("d", SessionState.TRAINED, step=2)
    await rank.add("e", SessionState.OPEN)


@pytest.mark.parametrize("serving", [True, False])
async def test_each_session_is_exported_once(rank: Rank, tmp_path: Path, serving: bool) -> None:
    await fill(rank)
    if not serving:
        await rank.stop()
    done = export_trial(tmp_path)
    assert (done.code, done.ids) == (0, list("abcde")), done.said
    assert "5 sessions (2 of them from archives)" in done.said
    for line in done.lines:
        record = read_record(json.dumps(line).encode())
        assert len(record.interactions) == len(record.rewards) == CALLS
        assert record.session["metadata"] == {"é": [1, None]}
    states = ["aborted", "trained", "evaluated", "trained", "open"]
    assert [line["session"]["state"] for line in done.lines] == states
    if not serving:
        await rank.start()
        assert (await rank.sessions.by_id("e")).state is SessionState.OPEN
    # Not what is deleted.
    await rank.archive.remove("a")
    await rank.journal.commit(EraseContent(("a", "b")))
    assert export_trial(tmp_path).ids == list("cde")


async def test_words_of_users_are_exported_from_journals_and_archives(
    rank: Rank, tmp_path: Path
) -> None:
    said = "\u202e <b>rude</b>"
    for id in ("a", "b"):
        await rank.add(id)
        words = SetReward(id, None, "feedback", None, "user", 6.0, None, said)
        await rank.journal.commit(words)
        if id == "a":
            await rank.archive.sweep()
    done = export_trial(tmp_path)
    assert "2 sessions (1 of them from archives)" in done.said
    assert [line["rewards"][-1] for line in done.lines] == [
        {"interaction_id": None, "name": "feedback", "value": None, "by": "user", "at": 6.0}
        | {"text": said}
    ] * 2


async def test_filters_choose_sessions_of_all_ranks(rank: Rank, tmp_path: Path) -> None:
    await fill(rank)
    other = await Rank(tmp_path / TRIAL, number=1).start()
    await other.add("x")
    await other.archive.sweep()
    await other.stop()
    for options, ids in (
        (["--state", "trained", "--state", "evaluated"], "bcd"),
        (["--task", "none"], ""),
        (["--rank", "0", "--since", "1970-01-01"], "abcde"),
        (["--since", "12h"], ""),
        (["--rank", "1"], "x"),
        ([], "abcdex"),
    ):
        assert sorted(export_trial(tmp_path, *options).ids) == list(ids), options
    for state in SessionState:
        assert export_trial(tmp_path, "--state", state).code == 0


async def test_wrong_options_are_refused(rank: Rank, tmp_path: Path) -> None:
    await rank.add("a")
    for wrong in (
        "--rank 1",
        "--since soon",
        "--style odd",
        "--discount 2 --style concat",
        "--format parquet --out -",
        "--format hf --out -",
        "--format preferences --style messages",
        "--best 2",
        "--format preferences --min-reward 1",
        "--format sft --margin 1",
        "--format atif --style concat",
        "--format nemo-gym --best 2",
        "--format csv",
    ):
        done = export_trial(tmp_path, *wrong.split())
        assert (done.code, done.lines, "error: " in done.said) == (2, [], True), wrong


async def test_settings_that_cannot_be_read_are_not_needed(rank: Rank, tmp_path: Path) -> None:
    await rank.add("a")
    (tmp_path / TRIAL / "config.yaml").write_text("a setting of another version: 1\n")
    assert export_trial(tmp_path).code == 2
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / TRIAL).parent.mkdir(parents=True)
    (elsewhere / TRIAL).symlink_to(rank.folder / "journal")
    done = export_trial(tmp_path, f"server.journal_dir={elsewhere}", "--discount", "1")
    assert (done.code, done.ids) == (0, ["a"]), done.said


async def test_archives_alone_can_be_read_and_with_a_journal_that_began_anew(
    rank: Rank, tmp_path: Path
) -> None:
    await fill(rank)
    await rank.stop()
    for path in (rank.folder / "journal").iterdir():
        path.unlink()
    assert export_trial(tmp_path).ids == ["a", "c"]
    assert export_trial(tmp_path, "--state", "aborted").ids == ["a"]
    # The numbers of its sessions are those of others in the archives.
    await rank.start()
    for id in ("x", "y"):
        await rank.add(id)
        await rank.archive.sweep()
    await rank.add("z")
    done = export_trial(tmp_path)
    assert (done.code, done.ids) == (0, ["a", "c", "x", "y", "z"]), done.said


async def test_damage_in_an_archive_is_reported_and_passed_over(rank: Rank, tmp_path: Path) -> None:
    for id in ("a", "b", "c"):
        await rank.add(id)
    await rank.archive.sweep()
    await rank.add("d")
    (path,) = (rank.folder / "archive").iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)
    done = export_trial(tmp_path)
    assert (done.code, done.ids) == (1, ["a", "c", "d"])
    assert "damaged at byte" in done.said and "session b" in done.said
    path.unlink()
    done = export_trial(tmp_path)
    assert (done.code, done.ids) == (1, ["d"])


async def test_damage_in_the_journal_costs_the_sessions_that_it_hit(
    rank: Rank, tmp_path: Path
) -> None:
    for id in ("a", "b", "c", "d", "e"):
        await rank.add(id, text=id * 12_000)
    await rank.stop()
    path = rank.folder / JOURNAL
    change(path, f"UPDATE sessions SET recorded = {CALLS}")
    change(path, "DELETE FROM interactions WHERE id = 'a-1'")
    change(path, "UPDATE interactions SET data = x'00' WHERE session_id = 'e'")
    content = bytearray(path.read_bytes())
    page = content.index(b"c" * 12_000) // PAGE * PAGE
    content[page : page + PAGE] = bytes(PAGE)
    path.write_bytes(content)
    done = export_trial(tmp_path)
    assert (done.code, done.ids) == (1, ["b", "d"]), done.said
    assert all(f"session {id}" in done.said for id in "ace")
    await rank.start()
    await rank.stop()
    change(path, "PRAGMA user_version = 1")
    done = export_trial(tmp_path)
    assert (done.code, done.lines) == (1, []) and "use the any-agent that wrote it" in done.said
    for other in path.parent.glob("rank-0*"):
        other.unlink()
    path.write_bytes(b"no journal" * 1000)
    done = export_trial(tmp_path)
    assert (done.code, done.lines) == (1, [])
    path.unlink()
    await rank.start()


async def test_an_archived_session_is_exported_although_its_row_is_damaged(
    rank: Rank, tmp_path: Path
) -> None:
    await fill(rank)
    await rank.stop()
    path = rank.folder / JOURNAL
    with closing(sqlite3.connect(path)) as connection:
        sql = "SELECT rootpage FROM sqlite_master WHERE name = 'sessions'"
        (page,) = connection.execute(sql).fetchone()
    content = bytearray(path.read_bytes())
    content[(page - 1) * PAGE : page * PAGE] = bytes(PAGE)
    path.write_bytes(content)
    await rank.start()
    rows = [(await rank.sessions.by_id(id)).row for id in "abcde"]
    assert {row.reason for row in rows} == {"damaged"}
    assert [row.id for row in rows if row.content == "archived"] == ["a", "c"]
    done = export_trial(tmp_path)
    assert (done.code, done.ids) == (0, ["a", "c"])


async def test_a_session_deleted_during_an_export_is_not_reported_missing(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id in ("a", "b"):
        await rank.add(id)
    await rank.archive.sweep()
    journal = rank.folder / JOURNAL
    find = ArchiveFolder.find

    def deleted(self: ArchiveFolder, number: int, session_id: str) -> bytes | None:
        if session_id == "b":
            return find(self, number, session_id)
        change(journal, "UPDATE sessions SET content = 'deleted' WHERE id = 'a'")
        return None

    monkeypatch.setattr(ArchiveFolder, "find", deleted)
    said: list[str] = []
    found = reading.read_rank(journal, rank.folder / "archive", 0, ExportFilter(), said.append)
    assert [each.session_id for each in found] == ["b"]
    assert said == []


def change(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql)


async def test_an_export_reads_more_overlapping_archives_than_files_may_be_open(
    rank: Rank, tmp_path: Path
) -> None:
    """Each with a session that took very long."""
    folder, files = rank.folder / "archive", 60
    await rank.add("a")
    await rank.archive.sweep()
    (line,) = [line for line in read_lines(next(folder.iterdir()), print) if b'"number"' in line]
    for k in range(1, files):
        writer = ArchiveWriter(folder, 0, {})
        for number in (k + 1, files + k):
            head = b'{"number":%d,"session":{"id": "s%d"' % (number, number)
            writer.add(number, line.replace(b'{"number":1,"session":{"id": "a"', head))
        writer.finish()
    (rank.folder / JOURNAL).unlink()
    done = export(tmp_path, open_files=50)
    assert (done.code, len(done.ids)) == (0, 2 * files - 1), done.said


@pytest.mark.service
async def test_a_reader_of_the_pipe_that_leaves_causes_no_traceback(
    rank: Rank, tmp_path: Path
) -> None:
    for k in range(40):
        await rank.add(f"s{k}")
    command = f"{sys.executable} -m any_agent.cli export {' '.join(settings_of(tmp_path))}"
    script = f"{command} | head -c 10; exit ${{PIPESTATUS[0]}}"
    done = await asyncio.to_thread(subprocess.run, ["bash", "-c", script], capture_output=True)
    assert done.returncode == 141, done.stderr
    assert b"Traceback" not in done.stderr and b"Error" not in done.stderr


async def test_no_reward_is_not_a_reward_of_0(start: Start, tmp_path: Path) -> None:
    proxy = await start(*settings_of(tmp_path))
    keys = [(await proxy.open(mode="eval", task_id=str(k)))["api_key"] for k in range(3)]
    for key in keys:
        await proxy.complete(key)
    await proxy.post("/rl/v1/set_reward", {"reward": 0}, keys[1])
    await proxy.post("/rl/v1/finalize", {"final_reward": 0}, keys[2])
    for style in ("individual", "concat", "messages"):
        field = "reward" if style == "messages" else "rewards"
        lines = export_trial(tmp_path, "--style", style).lines
        assert {line["task_id"]: line[field] for line in lines} == {"0": None, "1": 0.0, "2": 0.0}


async def test_each_style_exports_the_same_tokens(start: Start, tmp_path: Path) -> None:
    proxy = await start(*settings_of(tmp_path), admit=9)
    session = await proxy.open(mode="eval", task_id="t")
    key = session["api_key"]
    first = await proxy.complete(key)
    asked = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "Again."}]
    second = await proxy.complete(key, asked)
    await proxy.post("/rl/v1/set_reward", {"reward": 1, "completion_id": first["id"]}, key)
    await proxy.post("/rl/v1/finalize", {"final_reward": 2}, key)
    for archived in (False, True):
        if archived:
            assert await archive_now(proxy) == 1
        one, two = export_trial(tmp_path, "--style", "individual", "--discount", "0.5").lines
        assert (one["interaction_id"], two["interaction_id"]) == (first["id"], second["id"])
        assert (one["rewards"], two["rewards"]) == (2.0, 2.0)
        assert (one["session_id"], one["task_id"]) == (session["session_id"], "t")
        assert sum(one["loss_mask"]) == 8 and one["versions"].count(-1) == one["loss_mask"].count(0)
        (row,) = export_trial(tmp_path, "--style", "concat").lines
        assert row["input_ids"] == two["input_ids"]
        assert sum(row["loss_mask"]) == 16
        (talk,) = export_trial(tmp_path, "--style", "messages").lines
        assert [m["role"] for m in talk["messages"]] == ["user", "assistant"] * 2
        assert talk["reward"] == 2.0
        # The run's own discount, 1 by default.
        one, two = export_trial(tmp_path, "--style", "individual").lines
        assert (one["rewards"], two["rewards"]) == (3.0, 2.0)
    (tmp_path / TRIAL / "config.yaml").write_text("train:\n  discount: 0.25\n")
    one, _ = export_trial(tmp_path, "--style", "individual").lines
    assert one["rewards"] == 1.5


async def test_a_path_that_is_not_exact_is_left_out(start: Start, tmp_path: Path) -> None:
    proxy = await start(*settings_of(tmp_path))
    session = await proxy.open(mode="eval")
    answer = await proxy.complete(session["api_key"])
    # Nothing follows the recorded answer: rendered anew, which is no part of a single row.
    await proxy.complete(session["api_key"], [*HELLO, answer["choices"][0]["message"]])
    other = await played(proxy, mode="eval")
    done = export_trial(tmp_path, "--style", "concat")
    assert (done.code, done.ids) == (1, [other["session_id"]])
    assert f"session {session['session_id']}" in done.said and "individual" in done.said


def test_an_export_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; sys.argv = ['x', 'root=/nowhere']\n"
        "try: runpy.run_module('proxy_ext.export', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'litellm', 'fastapi'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_trial_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error lists those that there are."""
    (tmp_path / "u" / "arithmetic" / "first").mkdir(parents=True)
    (tmp_path / "u" / "arithmetic" / "first" / "format").write_text("2\n")
    where = [f"root={tmp_path}", "user=u", "experiment=arithmetic"]
    assert main([*where, "trial=frist"]) == 2
    assert "arithmetic/first (user u)" in capsys.readouterr().err
    assert main([*where, "trial=first"]) == 2
    assert "no sessions" in capsys.readouterr().err


LINES = [b"one\n", b"two\n"]


def write(name: object) -> None:
    with output(str(name)) as out:
        for line in LINES:
            out.write(line)


def test_an_exported_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
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
def test_an_export_to_a_link_writes_the_file_that_it_leads_to(tmp_path: Path, there: bool) -> None:
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


def test_an_export_writes_to_an_open_file_that_was_deleted(tmp_path: Path) -> None:
    with open(tmp_path / "gone", "wb+") as file:
        (tmp_path / "gone").unlink()
        write(f"/dev/fd/{file.fileno()}")
        assert file.read() == b"".join(LINES)
    assert os.listdir(tmp_path) == []


def test_a_path_that_can_be_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    names = ("", "/new/", "/no/out", "/file/out", "/loop")
    for name in ("", *(f"{tmp_path}{name}" for name in names)):
        with fails_with(ConfigError, name) as refused:
            write(name)
        assert ".partial" not in refused.value.message


@pytest.mark.service
async def test_a_failed_write_of_an_export_is_named(rank: Rank, tmp_path: Path) -> None:
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
