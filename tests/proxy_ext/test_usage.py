"""What a run has used, as its folder has it, against the usage in the answers that agents got."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from any_agent.launcher.trial import trial_dir
from any_agent.rundir.layout import RunDir
from any_agent.rundir.usage import TABLE, Usage, UsageReader, day_of
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Restart, Start
from tests.support.sessions import unwritable

TAG = "server.lane_tag=0badc0de"
RETRY = "x-stainless-retry-count"


class Bill:
    """Adds up the usage in answers."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()

    def add(self, usage: dict[str, Any]) -> None:
        self.sums["prompt_tokens"] += usage["prompt_tokens"]
        self.sums["sampled_tokens"] += usage["completion_tokens"]
        self.sums["calls"] += 1

    def usage(self, *, sessions: int) -> Usage:
        return Usage(**self.sums, sessions=sessions)


def used(proxy: Proxy) -> Usage:
    """The usage that the folder has, of a service that may be running."""
    days = UsageReader(trial_dir(proxy.service.config)).read()["rank-0"]
    # A test may run over midnight.
    assert days.keys() <= {day_of(time.time()), day_of(time.time() - 600)}
    return sum(days.values(), Usage())


async def test_every_answer_is_counted_once_and_stays_counted(
    restart: Restart,
) -> None:
    bill, proxy = Bill(), await restart(TAG)
    first, second = await proxy.open(), await proxy.open(mode="eval")
    for session in (first, second):
        key = session["api_key"]
        answer = await proxy.complete(key)
        bill.add(answer["usage"])
        # A continuation has the whole prompt in its usage, and stores what it adds.
        talk = [*HELLO, answer["choices"][0]["message"], {"role": "user", "content": "Again."}]
        bill.add((await proxy.complete(key, talk))["usage"])
        bill.add((await proxy.complete(key, n=3))["usage"])
        events, done = await proxy.stream(key, stream_options={"include_usage": True})
        assert done
        bill.add(events[-1]["usage"])
    body = {"model": "x", "messages": HELLO, "max_tokens": 7}
    marked = [
        await proxy.post("/v1/chat/completions", body, first["api_key"], **{RETRY: str(number)})
        for number in (0, 1)
    ]
    assert marked[0].json()["id"] != ""
    # The second is another sample unless the first was not delivered; each answer is one call.
    for answer in {a.json()["id"]: a.json() for a in marked}.values():
        bill.add(answer["usage"])
    refused = await proxy.call(first["api_key"], n=0)
    assert refused.status_code == 400
    assert used(proxy) == bill.usage(sessions=2)
    # What is deleted was used all the same.
    gone = await proxy.http.delete(f"/rl/v1/sessions/{second['session_id']}")
    assert gone.status_code == 200
    assert await proxy.recorded(second["session_id"]) == []
    assert used(proxy) == bill.usage(sessions=2)
    proxy = await restart(TAG)
    assert used(proxy) == bill.usage(sessions=2)
    bill.add((await proxy.complete(first["api_key"]))["usage"])
    assert used(proxy) == bill.usage(sessions=2)


async def test_calls_of_no_session_are_counted_too(start: Start) -> None:
    bill, proxy = Bill(), await start(TAG)
    await proxy.client.set_run("finished", step=7, checkpoint="/ckpt")
    for _ in range(3):
        answer = await proxy.call(None)
        assert answer.status_code == 200, answer.text
        bill.add(answer.json()["usage"])
    now = used(proxy)
    assert (now.calls, now.prompt_tokens, now.sampled_tokens) == (
        bill.sums["calls"],
        bill.sums["prompt_tokens"],
        bill.sums["sampled_tokens"],
    )


async def test_calls_at_once_are_all_counted(start: Start) -> None:
    bill, proxy = Bill(), await start(TAG, admit=50)
    keys = [(await proxy.open())["api_key"] for _ in range(10)]
    for answer in await asyncio.gather(*(proxy.complete(key) for key in keys for _ in range(4))):
        bill.add(answer["usage"])
    assert used(proxy) == bill.usage(sessions=10)


async def test_a_call_that_could_not_be_recorded_is_not_counted(start: Start) -> None:
    proxy = await start(TAG, admit=5)
    key = (await proxy.open())["api_key"]
    with unwritable(proxy.service.journal):
        assert (await proxy.call(key)).status_code >= 500
    assert used(proxy) == Usage(sessions=1)
    bill = Bill()
    bill.add((await proxy.complete(key))["usage"])
    await until(lambda: used(proxy) == bill.usage(sessions=1))


async def test_a_service_of_one_run_counts_no_calls_for_a_bill(start: Start) -> None:
    proxy = await start(admit=5)
    await proxy.complete((await proxy.open())["api_key"])
    assert used(proxy) == Usage(sessions=1)


def test_what_was_counted_is_not_read_again_at_the_next_look(tmp_path: Path) -> None:
    run = RunDir.of(tmp_path, "alice", "e", "t")
    journal = run.journal(0)
    journal.parent.mkdir(parents=True)
    day, step = 86400.0, {"step": 1, "time": 10.0, "tokens": 5}
    with closing(sqlite3.connect(journal)) as rows, rows:
        rows.executescript(f"CREATE TABLE sessions (created_at REAL); {TABLE}")
        rows.executemany("INSERT INTO sessions VALUES (?)", [(1.0,), (2.0,)])
    run.metrics.write_text(json.dumps(step) + "\n")
    reader = UsageReader(run)
    assert reader.read()["rank-0"] == {"1970-01-01": Usage(sessions=2)}
    with closing(sqlite3.connect(journal)) as rows, rows:
        # Nothing does this: it shows that the first two rows are not looked at.
        rows.execute("UPDATE sessions SET created_at = ?", (9 * day,))
        rows.executemany("INSERT INTO sessions VALUES (?)", [(3.0,), (3.0 + day,)])
    with run.metrics.open("r+") as lines:
        lines.write("x")
        lines.seek(0, 2)
        lines.write(json.dumps({**step, "step": 2}) + "\n")
    assert reader.read() == {
        "rank-0": {"1970-01-01": Usage(sessions=3), "1970-01-02": Usage(sessions=1)},
        "trainer": {"1970-01-01": Usage(trained_tokens=10, steps=2)},
    }
    # A file that was written anew is read anew.
    run.metrics.write_text(json.dumps({**step, "tokens": 6}) + "\n")
    assert reader.read()["trainer"] == {"1970-01-01": Usage(trained_tokens=11, steps=2)}


def test_a_step_that_was_made_again_counts_as_its_last_line_says(tmp_path: Path) -> None:
    run = RunDir.of(tmp_path, "alice", "e", "t")
    run.path.mkdir(parents=True)
    day = 86400.0
    lines: list[Any] = [
        {"step": 1, "time": 10.0, "tokens": 5},
        {"step": 2, "time": 20.0, "tokens": 70},
        {"step": 2, "time": 21.0, "eval": {}, "tokens": 999},
        # After a kill, from the checkpoint of step 1, a day later.
        {"step": 2, "time": 20.0 + day, "tokens": 71},
        {"step": 3, "time": 30.0 + day, "tokens": 9},
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    run.metrics.write_text(text + '{"step": 4, "tok')
    assert UsageReader(run).read() == {
        "trainer": {
            "1970-01-01": Usage(trained_tokens=5, steps=1),
            "1970-01-02": Usage(trained_tokens=80, steps=2),
        }
    }
