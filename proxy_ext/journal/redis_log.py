"""A rank's log in Redis, as the one process sees it that may write it.

Each commit of the journal's file is appended before it is committed, and acknowledged after both.
An append that gets no answer is undone before the next one: what its callers were told, that
nothing was recorded, stays true unless this process ends first.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from any_agent.errors import StartupError, StoreFull, StoreUnavailable
from any_agent.runtime.redis_client import FAILURES, without_password
from proxy_ext.journal import redis_scripts as scripts
from proxy_ext.journal import schema
from proxy_ext.journal.base import JournalStats
from proxy_ext.journal.redis_server import LogOptions, ServerCheck, connect
from proxy_ext.journal.statements import Line, run_lines, set_place

log = logging.getLogger(__name__)

_PREFIX = "any-agent"
RETRY_SECONDS = 1.0  # between tries while the server does not answer
_READ_AT_ONCE = 100  # commits
_REPLICAS_MS = 1000


@dataclass(frozen=True, slots=True)
class Head:
    """The state of a log when this process took its lease."""

    claim: int
    """Number of this claim, higher than any earlier one's."""
    seq: int
    base: int
    """Number of the last commit that the snapshot has."""
    home: str
    run: str
    schema: int
    snapshot: str
    """Each is empty or 0 in a log that nobody has begun."""


@dataclass(frozen=True, slots=True)
class Held:
    """Another process has the lease."""

    owner: str
    seconds: float
    """Until its lease ends, unless it renews it."""


class RedisLog:
    """The log of one rank. Only the journal's thread appends; other threads renew and trim."""

    def __init__(self, options: LogOptions, *, owner: str, home: str) -> None:
        """``owner`` is a name of this process that no other one ever has."""
        self.options = options
        self.owner = owner
        self.home = home
        self.run = ""
        self.seq = 0
        self.stats = JournalStats()
        self.appended_bytes = 0
        """Bytes appended since the start."""
        self.needs_seed = False
        """The server lost commits that the file has; nothing is appended before it has them."""
        self._turn = 0
        self._doubt: int | None = None
        """Number of an append that failed, and may have arrived all the same."""
        self._silent_until = 0.0
        self._held: list[Line] = []
        self._last: list[Line] = []
        """Lazy lines that the last append took along."""
        self.server = ServerCheck(options)
        self.client = connect(options.server, self.server)
        tag = f"{_PREFIX}:{{{options.name}}}"
        self.keys = [f"{tag}:head", f"{tag}:log"]
        register: Callable[[str], Any] = self.client.register_script
        self._claim, self._append = register(scripts.CLAIM), register(scripts.APPEND)
        self._retract, self._renew = register(scripts.RETRACT), register(scripts.RENEW)
        self._snapshot, self._seed = register(scripts.SNAPSHOT), register(scripts.SEED)

    @property
    def where(self) -> str:
        """The server and the log's name, as messages show them."""
        return f"{without_password(self.options.server)} ({self.keys[0]})"

    @property
    def _lease_ms(self) -> int:
        return int(self.options.lease * 1000)

    def claim(self, dead_owner: str = "") -> Head | Held:
        """Take the lease if nobody has it, or only a process known to be dead.

        StartupError if the log's head has what no process of this program writes.
        """
        arguments = [self.owner, dead_owner or "-", self._lease_ms]
        answer = self._claim(keys=self.keys[:1], args=arguments)
        if len(answer) == 2:
            return Held(answer[0].decode(), int(answer[1]) / 1000)
        try:
            fields = {answer[i].decode(): answer[i + 1].decode() for i in range(0, len(answer), 2)}
            self._turn = int(fields["turn"])
            return Head(
                claim=self._turn,
                seq=int(fields.get("seq", 0)),
                base=int(fields.get("base", 0)),
                home=fields.get("home", ""),
                run=fields.get("run", ""),
                schema=int(fields.get("schema", 0)),
                snapshot=fields.get("snapshot", ""),
            )
        except ValueError as error:
            raise StartupError(
                f"the log at {self.where} has a head that no any-agent wrote ({error}): restore "
                "the server from its backup, or choose another --trial"
            ) from error

    def replay(self, connection: sqlite3.Connection, head: Head, seq: int) -> int:
        """Run the commits after ``seq`` on a file; return their number.

        StartupError if one is missing, or not understood.
        """
        done = 0
        for batch in self._read_after(seq):
            connection.execute("BEGIN IMMEDIATE")
            try:
                for number, fields in batch:
                    if number != seq + 1:
                        raise self._gap(seq + 1, number)
                    run_lines(connection, msgpack.unpackb(fields[b"d"], use_list=False))
                    seq, done = number, done + 1
                set_place(connection, head.run, seq)
                connection.execute("COMMIT")
            except (KeyError, TypeError, ValueError, sqlite3.Error) as error:
                raise StartupError(
                    f"the log at {self.where} cannot be replayed at commit {seq + 1}: {error!r}; "
                    "was it written by another version of any-agent? Start that one once, and end "
                    "it normally"
                ) from error
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        if seq != head.seq:
            raise self._gap(seq + 1, head.seq)
        return done

    def _gap(self, wanted: int, found: int) -> StartupError:
        return StartupError(
            f"the log at {self.where} has no commit {wanted}, but {found}: it was trimmed by "
            "something else, or the snapshot is older than it says; nothing was changed. Restore "
            "the server from its backup"
        )

    def _read_after(self, seq: int) -> Iterator[list[tuple[int, dict[bytes, bytes]]]]:
        first = f"({seq}-{2**64 - 1}"
        while True:
            entries: Any = self.client.xrange(self.keys[1], first, "+", count=_READ_AT_ONCE)
            if not entries:
                return
            yield [(int(id.partition(b"-")[0]), fields) for id, fields in entries]
            first = f"({entries[-1][0].decode()}"

    def begin(self, run: str, seq: int) -> None:
        """Continue after this commit, which the file has, too."""
        self.run, self.seq = run, seq

    # -- methods of the journal's thread ---------------------------------------------------------

    def append(self, connection: sqlite3.Connection, lines: Sequence[Line], *, lazy: bool) -> bool:
        """Append the lines of the file's transaction, which the caller then commits.

        Lazy ones wait for the next commit: they need not outlive the machine. Returns whether it
        appended anything.

        Raises:
            StoreFull: the server has no memory or disk left; nothing was appended.
            StoreUnavailable: it did not answer, or refused; also if another process has the rank.
        """
        if lazy:
            self._held.extend(lines)
            return False
        if not lines and not self._held:
            return False
        self.require_ours()
        if self.needs_seed:
            raise self._unavailable("it lost commits, and gets them again")
        if time.monotonic() < self._silent_until:
            raise self._unavailable("it did not answer")
        set_place(connection, self.run, self.seq + 1)
        data = msgpack.packb([*self._held, *lines])
        try:
            if self._doubt is not None:
                self._undo(self._doubt)
            arguments = [self.owner, self._turn, self.seq + 1, self._lease_ms, data]
            self._doubt = self.seq + 1
            self._send(arguments)
        except FAILURES as error:
            self.stats.log_away = True
            raise self._refusal(error) from error
        if self.stats.log_away:
            self.stats.log_away = False
            log.info("the log at %s can be written again", self.where)
        self._doubt = None
        self.seq += 1
        self.appended_bytes += len(data)
        self._last, self._held = self._held, []
        return True

    def withdraw(self) -> None:
        """Undo the last append before the next one, because the file did not commit it."""
        self._doubt, self.seq = self.seq, self.seq - 1
        self._held = self._last

    def _undo(self, number: int) -> None:
        arguments = [self.owner, self._turn, number]
        self._turn = self._check(self._retract(keys=self.keys, args=arguments))
        self._doubt = None

    def _send(self, arguments: list[Any]) -> None:
        wanted = self.options.replicas
        if not wanted:
            self._check(self._append(keys=self.keys, args=arguments))
            return
        # WAIT counts the replicas that have what its own connection wrote.
        with self.client.pipeline(transaction=False) as pipeline:
            self._append(keys=self.keys, args=arguments, client=pipeline)
            pipeline.wait(wanted, _REPLICAS_MS)
            answer, reached = pipeline.execute()
        self._check(answer)
        if reached < wanted:
            raise RedisError(f"{reached} of {wanted} replicas have the commit")

    def _refusal(self, error: Exception) -> StoreUnavailable:
        refused = isinstance(error, ResponseError)
        full = isinstance(error, OutOfMemoryError) or (refused and "MISCONF" in str(error))
        if full:
            return StoreFull(
                "the journal's Redis has no room left; nothing was recorded; try again when it has",
                retry_after=10,
            )
        if not refused:
            self._silent_until = time.monotonic() + RETRY_SECONDS
        return self._unavailable(str(error))

    def _unavailable(self, reason: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"the journal's Redis cannot be written ({reason}); nothing was recorded; try again",
            retry_after=2,
        )

    # -- methods of any thread -------------------------------------------------------------------

    def require_ours(self) -> None:
        """Raise StoreUnavailable once another process has the rank."""
        if self.stats.lost is not None:
            raise StoreUnavailable(self.stats.lost, retry_after=1)

    def renew(self) -> None:
        self._check(self._renew(keys=self.keys[:1], args=[self.owner, self._lease_ms]))

    def release(self) -> None:
        """Let another process have the rank at once."""
        self._renew(keys=self.keys[:1], args=[self.owner, 0])

    def trim(self, seq: int, snapshot: str) -> None:
        """Record a snapshot that has the commits up to ``seq``, and drop these."""
        arguments = [self.owner, seq, snapshot, schema.VERSION, self.home]
        self._check(self._snapshot(keys=self.keys, args=arguments))

    def seed(self, seq: int, snapshot: str) -> None:
        """Begin the log anew after a snapshot, as the server has none, or lost commits."""
        state = [self.owner, seq, snapshot, schema.VERSION, self.home, self.run]
        answer = self._seed(keys=self.keys, args=[*state, self._lease_ms, self._turn])
        self._turn = self._check(answer)
        self.needs_seed = False

    def close(self) -> None:
        self.client.close()

    def _check(self, answer: Any) -> int:
        """Return the second part of a script's answer; RedisError for one that refuses."""
        kind = answer[0].decode()
        if kind == "ok":
            return int(answer[1])
        if kind == "fenced" and self.stats.lost is None:
            self.stats.lost = "another process carries this rank now; this one ends; try again"
            log.critical("another process has claimed the log at %s: this one ends", self.where)
        elif kind == "behind":
            self._turn = int(answer[1])
        if kind != "fenced" and not self.needs_seed:
            self.needs_seed = True
            log.error("the log at %s lost commits; it begins anew with a snapshot", self.where)
        raise RedisError({"fenced": "another process has the rank"}.get(kind, "it lost commits"))
