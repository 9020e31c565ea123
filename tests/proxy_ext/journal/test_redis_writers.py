"""Processes that each believe they carry the rank: at most one is acknowledged, ever."""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import RedisError

from any_agent.errors import StoreUnavailable
from proxy_ext.journal import redis_log, redis_scripts
from proxy_ext.journal.redis_log import Head, RedisLog
from proxy_ext.journal.redis_server import LogOptions
from tests.support.redis_server import RedisServer

WRITERS = 3
APPEND = hashlib.sha1(redis_scripts.APPEND.encode()).hexdigest()


class Writer:
    """One process: its log, and a file that has no more than the place."""

    def __init__(self, url: str, name: str, number: int) -> None:
        self.options = LogOptions(url, name, lease=0.001, durability="always", replicas=0)
        self.number = number
        self.lives = 0
        self.log: RedisLog | None = None
        self.file = sqlite3.connect(":memory:", isolation_level=None)
        self.file.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL)")
        self.unanswered: set[int] = set()
        """Its writes without an answer since it began or last got one."""

    def claim(self) -> None:
        """Take the rank over, as a process that has just started, with everything in the log."""
        self.lives += 1
        owner = f"writer {self.number} life {self.lives}"
        log = RedisLog(self.options, owner=owner, home=f"home {self.number}")
        head = log.claim("nobody")
        if not isinstance(head, Head):
            log.close()
            return
        self.close()
        self.log = log
        self.unanswered = set()
        log.begin(head.run or "run", head.seq)
        if not head.run:
            log.seed(0, "none")

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def write(self, value: int, fate: str) -> bool:
        """Append a commit, whose answer may be lost before or after the server has it."""
        if self.log is None:
            return False
        client: Any = self.log.client
        real = client.evalsha

        def lossy(sha: str, *arguments: Any) -> Any:
            if sha == APPEND and fate == "lost before":
                raise RedisError("no answer")
            answer = real(sha, *arguments)
            if sha == APPEND and fate == "lost after":
                raise RedisError("no answer")
            return answer

        client.evalsha = lossy
        try:
            self.log.append(self.file, [("put_meta", ("value", value))], lazy=False)
        except StoreUnavailable:
            return False
        finally:
            client.evalsha = real
        return True


STEPS = st.lists(
    st.tuples(
        st.integers(0, WRITERS - 1),
        st.sampled_from(["claim", "answered", "answered", "lost before", "lost after"]),
    ),
    max_size=40,
)
_NAMES = iter(range(10**9))


@pytest.fixture(autouse=True)
def tries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_log, "RETRY_SECONDS", 0.0)


@given(STEPS)
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.service
def test_of_rival_writers_at_most_one_is_acknowledged(
    shared_server: RedisServer, steps: list[tuple[int, str]]
) -> None:
    name = f"law-{next(_NAMES)}"
    writers = [Writer(shared_server.url, name, number) for number in range(WRITERS)]
    acknowledged: list[int] = []
    doubtful: set[int] = set()
    for value, (number, what) in enumerate(steps):
        writer = writers[number]
        if what == "claim":
            writer.claim()
        elif writer.write(value, what):
            acknowledged.append(value)
            # They were undone, as their callers had been told.
            doubtful -= writer.unanswered
            writer.unanswered = set()
        elif what == "lost after":
            doubtful.add(value)
            writer.unanswered.add(value)
    with shared_server.client() as client:
        entries = client.xrange(f"any-agent:{{{name}}}:log")
    numbers = [int(id.partition(b"-")[0]) for id, _ in entries]
    values = [msgpack.unpackb(fields[b"d"])[-1][1][1] for _, fields in entries]
    # Everything that was acknowledged is there, in its order, once, and nothing was renumbered.
    assert numbers == list(range(1, len(numbers) + 1))
    assert [value for value in values if value in acknowledged] == acknowledged
    # The rest got no answer, and their process no later one.
    rest = [value for value in values if value not in acknowledged]
    assert set(rest) <= doubtful
    for writer in writers:
        writer.close()
        writer.file.close()
