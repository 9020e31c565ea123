"""`any-agent sessions prune`: settled sessions of a stopped trial go, and nothing else does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from any_agent.cli.main import main
from any_agent.rundir.layout import RunDir
from any_agent.types import SessionState
from proxy_ext.export import prune
from proxy_ext.journal import PutMeta, SetState
from tests.support.archives import Rank, export_trial, settings_of

OLD = ("--older-than", "5s")


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Prune = Callable[..., Awaitable[Said]]


@pytest.fixture
async def rank(tmp_path: Path) -> Rank:
    """A stopped trial: two sessions in an archive, five in the journal, one of them open."""
    run = RunDir(tmp_path / "u" / "e" / "t")
    run.create()
    run.resolved.write_text("experiment: e\ntrial: t\n")
    rank = await Rank(run.path).start()
    await rank.add("evaluated", SessionState.EVALUATED)
    await rank.add("aborted")
    assert await rank.archive.sweep() == 2
    await rank.add("early", SessionState.TRAINED, step=4, text="secret" * 3000)
    await rank.add("late", SessionState.TRAINED, step=5)
    await rank.add("expired", SessionState.EXPIRED)
    await rank.add("finalized", SessionState.FINALIZED)
    await rank.add("recent", SessionState.ABORTED)
    fresh = SetState(("recent",), SessionState.ABORTED, at=time.time())
    await rank.journal.commit(fresh, PutMeta("run", {"oldest_step": 4}))
    await rank.stop()
    return rank


@pytest.fixture
def pruned(rank: Rank, capfd: pytest.CaptureFixture[str]) -> Prune:
    """Run the program in a thread of its own, as it has an event loop of its own."""

    async def run(*arguments: str) -> Said:
        names = settings_of(rank.folder.parents[2])
        if "--trial" in arguments:
            names = [name for name in names if not name.startswith("trial=")]

        def program() -> int:
            try:
                return prune.main([*arguments, *names])
            except SystemExit as error:
                return int(error.code or 0)

        capfd.readouterr()
        code = await asyncio.to_thread(program)
        return Said(code, *capfd.readouterr())

    return run


def exported(rank: Rank) -> list[str]:
    found = export_trial(rank.folder.parents[2])
    assert found.code == 0, found.said
    return found.ids


async def test_a_dry_run_says_what_would_go_and_removes_nothing(rank: Rank, pruned: Prune) -> None:
    before = exported(rank)
    said = await pruned(*OLD, "--json")
    assert said.code == 0, said.err
    states = said.json["states"]
    settled = {"aborted": 1, "evaluated": 1, "expired": 1, "trained": 1}
    assert {s: v["sessions"] for s, v in states.items() if v["sessions"]} == settled
    assert states["trained"]["journal_bytes"] > 18_000 > states["expired"]["journal_bytes"] > 0
    files = [rank.folder / "archive" / name for name in rank.files]
    archived = states["aborted"]["archive_bytes"] + states["evaluated"]["archive_bytes"]
    assert 0 < archived <= sum(file.stat().st_size for file in files)
    assert (said.json["needed"], said.json["unsettled"]) == (1, 1)
    assert said.json["freed_bytes"] is None
    assert "dry run" in (await pruned(*OLD)).out
    assert exported(rank) == before


async def test_prune_removes_settled_sessions_and_keeps_the_rest(rank: Rank, pruned: Prune) -> None:
    size = rank.folder / "journal" / "rank-0.sqlite"
    before = size.stat().st_size
    said = await pruned(*OLD, "--apply", "--json")
    assert said.code == 0, said.err
    assert exported(rank) == ["late", "finalized", "recent"]
    (line,) = (rank.folder / "audit" / "prune.jsonl").read_text().splitlines()
    assert {"event": "sessions prune", "older_than": 5.0}.items() <= json.loads(line).items()
    assert rank.files == []
    assert said.json["freed_bytes"] > 0 and size.stat().st_size < before
    assert b"secretsecret" not in size.read_bytes()
    again = await rank.start()
    for id, state in (("early", "trained"), ("evaluated", "evaluated")):
        row = await again.journal.session(id)
        assert row is not None
        assert (row.state, row.content, row.final_reward) == (state, "deleted", 2.0)
    await rank.stop()
    empty = await pruned(*OLD, "--apply", "--json")
    assert sum(state["sessions"] for state in empty.json["states"].values()) == 0


async def test_prune_removes_only_the_states_that_were_named(rank: Rank, pruned: Prune) -> None:
    before = exported(rank)
    said = await pruned(*OLD, "--state", "aborted", "--state", "expired", "--apply")
    assert said.code == 0, said.err
    assert exported(rank) == [id for id in before if id not in ("aborted", "expired")]
    # Before any checkpoint all trained sessions stay.
    await rank.start()
    await rank.journal.commit(PutMeta("run", {"oldest_step": None}))
    await rank.stop()
    said = await pruned(*OLD, "--apply", "--json")
    assert (said.code, said.json["needed"]) == (0, 2)
    assert {"early", "late"} <= set(exported(rank))


async def test_a_kill_before_a_file_changes_is_made_up_for(
    rank: Rank, pruned: Prune, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prune, "remove_from", killed)
        assert (await pruned(*OLD, "--apply")).code == 130
    assert len(rank.files) == 1
    assert "evaluated" not in exported(rank)
    assert (await pruned(*OLD, "--apply")).code == 0
    assert rank.files == []


async def test_archives_without_their_journal_are_pruned(rank: Rank, pruned: Prune) -> None:
    for path in (rank.folder / "journal").iterdir():
        path.unlink()
    assert (await pruned(*OLD, "--state", "aborted", "--apply")).code == 0
    assert exported(rank) == ["evaluated"]
    assert not (rank.folder / "journal" / "rank-0.sqlite").exists()


async def test_wrong_input_is_refused_and_changes_nothing(rank: Rank, pruned: Prune) -> None:
    before = exported(rank)
    for arguments, named in (
        (("--older-than", "5"), "--older-than"),
        (("--older-than", "-1d"), "--older-than"),
        ((), "--older-than"),
        ((*OLD, "--state", "open"), "not settled"),
        ((*OLD, "--state", "finalized"), "not settled"),
        ((*OLD, "--state", "gone"), "trained"),
        ((*OLD, "no.such=1"), "unknown key"),
    ):
        told = await pruned(*arguments, "--apply")
        assert (told.code, named in told.err) == (2, True), told.err
    # An unknown trial is named, with those that there are.
    told = await pruned(*OLD, "--trial", "another")
    assert told.code == 1 and "e/another" in told.err and "e/t (user u)" in told.err
    with RunDir(rank.folder).lock():
        told = await pruned(*OLD, "--apply")
    assert (told.code, "stop it" in told.err) == (1, True), "it is served"
    RunDir(rank.folder).log_note(0).write_text("{}")
    told = await pruned(*OLD, "--apply")
    assert (told.code, "server.journal" in told.err) == (2, True), "its log is in Redis"
    assert exported(rank) == before


async def test_the_prune_command_runs_the_module_with_its_arguments(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, arguments: ran.append(arguments))
    given = ["sessions", "prune", *OLD, *settings_of(rank.folder.parents[2])]
    monkeypatch.setattr("sys.argv", ["any-agent", *given])
    main(given)
    assert ran[0][1:] == ["-m", "proxy_ext.export.prune", *given[2:]]


async def test_journals_in_another_folder_are_found(
    rank: Rank, pruned: Prune, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "disk"
    (elsewhere / "u" / "e").mkdir(parents=True)
    (rank.folder / "journal").rename(elsewhere / "u" / "e" / "t")
    run = RunDir(rank.folder)
    run.resolved.write_text(f"experiment: e\ntrial: t\nserver: {{journal_dir: {elsewhere}}}\n")
    said = await pruned(*OLD, "--apply", "--json")
    assert said.json["states"]["trained"]["sessions"] == 1, said.err
