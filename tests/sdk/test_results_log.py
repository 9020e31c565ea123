from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from any_agent.errors import ConfigError
from any_agent.sdk.results import ResultsLog, RunResult, StartedRun
from any_agent.sdk.run_plan import PlanHeader, RunId
from tests.support.errors import fails_with

HEADER = PlanHeader("run-1", "00", items=2, group_size=2, mode="train", service="e/t")
DONE = RunResult(item=0, epoch=0, member=1, state="finalized", reward=1.0, session_id="s-2")


def opened(file: Path) -> ResultsLog:
    log = ResultsLog(file)
    log.open()
    return log


async def written(file: Path) -> None:
    log = opened(file)
    await log.begin(HEADER)
    await asyncio.gather(
        log.opened(RunId(0, 0, 0), 0, "s-1"),
        log.opened(RunId(0, 0, 1), 2, "s-2"),
        log.void(RunId(0, 1, 0), 1),
        log.regrouped([RunId(0, 1, 0), RunId(0, 1, 1)], 1),
        log.ended(DONE),
    )
    await log.close()


async def test_results_that_were_written_are_known_again(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    await written(file)
    log = opened(file)
    assert log.header == HEADER
    assert log.results == {RunId(0, 0, 1): DONE}
    assert log.started == {
        RunId(0, 0, 0): StartedRun(0, "s-1"),
        RunId(0, 0, 1): StartedRun(2, "s-2"),
        RunId(0, 1, 0): StartedRun(1, None),
    }
    assert log.groups == {RunId(0, 1, 0): (1, 2), RunId(0, 1, 1): (1, 2)}
    await log.close()


async def test_a_half_written_line_is_ignored(tmp_path: Path) -> None:
    """However much of it was there."""
    file = tmp_path / "r.jsonl"
    await written(file)
    content = file.read_bytes()
    last = content.rindex(b"\n", 0, -1) + 1
    for end in (last + 1, len(content) - 1):
        file.write_bytes(content[:end])
        log = opened(file)
        assert not log.results
        await log.ended(DONE)
        await log.close()
        assert file.read_bytes() == content
    # Of its first line: nothing was run, so there is nothing to go on from.
    for torn in (content[:1], content[:40]):
        file.write_bytes(torn)
        log = opened(file)
        assert log.header is None
        await log.begin(HEADER)
        await log.close()
        assert file.read_bytes() == content[: content.index(b"\n") + 1]


def test_a_file_that_is_no_runners_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    file, header = tmp_path / "mine.jsonl", json.dumps(HEADER.as_dict())
    for content, named in (
        ('{"question": "What?"}\n', "header of a run"),
        ("hello", "no results of a runner"),
        ("hello\n", "line 1"),
        ("3\n", "line 1"),
        (f'{header}\n{{"state": "lost"}}\n', "line 2"),
        (f"{header}\n\n", "line 2"),
        ('{"any_agent_run": 2}\n', "line 1"),
        ('{"any_agent_run": 1, "speed": 2}\n', "line 1"),
    ):
        file.write_text(content)
        with fails_with(ConfigError, file, named):
            opened(file)
        assert file.read_text() == content
    with fails_with(ConfigError, tmp_path, "Is a directory"):
        opened(tmp_path)


async def test_a_character_that_has_no_encoding_is_written_as_a_question_mark(
    tmp_path: Path,
) -> None:
    """Of a file's name, or of what a model wrote."""
    file = tmp_path / "r.jsonl"
    await written(file)
    log = opened(file)
    async with asyncio.timeout(60):
        await log.ended(replace(DONE, item=1, state="failed", error="no file \udcff"))
    await log.close()
    log = opened(file)
    assert log.results[RunId(0, 1, 1)].error == "no file ?"
    await log.close()


async def test_a_forked_process_does_not_hold_the_lock_of_a_results_file(tmp_path: Path) -> None:
    """A worker of the agent's may outlive a runner that is killed."""
    file = tmp_path / "r.jsonl"
    log = opened(file)
    ready, forked = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(forked, b"1")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(ready, 1)
        # As if its process were killed: no lock is given back, the file is only closed.
        await log.close()
        await opened(file).close()
    finally:
        os.kill(child, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, child, 0)
        os.close(ready)
        os.close(forked)


async def test_a_results_file_is_one_runners_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    log = opened(file)
    with fails_with(ConfigError, file, "another runner"):
        opened(file)
    await log.close()
    await opened(file).close()


async def test_a_full_disk_is_told_and_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "r.jsonl"
    await written(file)
    before = file.read_bytes()
    log = opened(file)
    write, room = os.write, [10]

    def full(number: int, data: bytes) -> int:
        if not room:
            raise OSError(28, "No space left on device")
        return write(number, data[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    results = await asyncio.gather(
        *(log.ended(replace(DONE, item=item)) for item in range(3)), return_exceptions=True
    )
    monkeypatch.undo()
    assert all(isinstance(result, ConfigError) for result in results)
    assert "No space left" in str(results[0])
    assert file.read_bytes() == before
    await log.ended(DONE)
    await log.close()
    assert file.read_bytes().startswith(before)
