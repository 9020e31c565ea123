"""The registry of a run in the Redis of `server.journal`, beside the one in the run's folder.

::

    any-agent:{RUN}:registry   hash      NAME   time and content of a part's entry
                               channel   the same, after `NAME `, at each write

A reader follows the channel in a thread, and reads the hash whenever it connects. While the server
is away it keeps what it had, and what is in the run's folder counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from redis.backoff import NoBackoff
from redis.retry import Retry

from any_agent.errors import AnyAgentError
from any_agent.rundir.registry import HEARTBEAT, RegistryEntry, Stamp
from any_agent.runtime.redis_client import FAILURES, open_client, without_password

log = logging.getLogger(__name__)

_KEEP_SECONDS = 3600  # after the last write, until all entries go
_ANSWER_SECONDS = 0.5
_RETRY_SECONDS = 2.0  # between tries while the server does not answer
_SILENT_SECONDS = 5 * HEARTBEAT  # without any part's write, after which a connection counts as dead


class RedisEntries:
    """The entries of one run, as a process reads and writes them; safe in several threads."""

    def __init__(self, url: str, run: str) -> None:
        """``run`` is the run's full name."""
        self._url = url
        self._key = f"any-agent:{{{run}}}:registry"
        self._seen: dict[str, Stamp] = {}
        self._reader: threading.Thread | None = None
        self._closed = threading.Event()
        self._writer: Any = None
        self._retry_at = 0.0
        self._said_away = False

    def write(self, entry: RegistryEntry) -> None:
        """Replace an entry and tell the readers; nothing while the server is away."""
        if time.monotonic() < self._retry_at:
            return
        value = b"%d %s" % (time.time_ns(), entry.model_dump_json().encode())
        try:
            if self._writer is None:
                self._writer = self._connect()
            with self._writer.pipeline(transaction=False) as pipeline:
                pipeline.hset(self._key, entry.name, value)
                pipeline.expire(self._key, _KEEP_SECONDS)
                pipeline.execute()
            self._writer.publish(self._key, entry.name.encode() + b" " + value)
        except (*FAILURES, AnyAgentError) as error:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            self._say_away(error)
        else:
            self._say_back()

    def read(self) -> Mapping[str, Stamp]:
        """Return the entries as last heard; the first call begins to listen."""
        if self._reader is None:
            self._reader = threading.Thread(target=self._follow, name="registry", daemon=True)
            self._reader.start()
        return dict(self._seen)

    def forget(self) -> None:
        """Remove the entries of an earlier service."""
        try:
            with self._connect() as client:
                client.delete(self._key)
        except (*FAILURES, AnyAgentError) as error:
            # They count as long as their parts would be silent.
            self._say_away(error)

    def close(self) -> None:
        self._closed.set()
        if self._reader is not None:
            self._reader.join(2 * _ANSWER_SECONDS + 1.0)
        if self._writer is not None:
            self._writer.close()

    # ------------------------------------------------------------------------------------------

    def _connect(self) -> Any:
        seconds = {"socket_timeout": _ANSWER_SECONDS, "socket_connect_timeout": _ANSWER_SECONDS}
        return open_client(self._url, {**seconds, "retry": Retry(NoBackoff(), 0)})

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                self._listen()
            except (*FAILURES, AnyAgentError) as error:
                self._say_away(error)
            self._closed.wait(_RETRY_SECONDS)

    def _listen(self) -> None:
        """Take what is there and each write, until no part has written for a while."""
        with (
            self._connect() as client,
            client.pubsub(ignore_subscribe_messages=True) as channel,
        ):
            channel.subscribe(self._key)
            for name, value in client.hgetall(self._key).items():
                self._take(name, value)
            self._say_back()
            heard = time.monotonic()
            while not self._closed.is_set() and time.monotonic() - heard < _SILENT_SECONDS:
                message = channel.get_message(timeout=_ANSWER_SECONDS)
                if message is not None:
                    heard = time.monotonic()
                    name, _, value = message["data"].partition(b" ")
                    self._take(name, value)

    def _take(self, name: bytes, value: bytes) -> None:
        at, _, content = value.partition(b" ")
        if at.isdigit():
            self._seen[name.decode(errors="replace")] = int(at[:20]), 0, content

    def _say_away(self, error: Exception) -> None:
        if not self._said_away:
            log.warning(
                "the registry in %s is away (%s); the run's folder counts alone",
                without_password(self._url),
                error,
            )
        self._said_away = True

    def _say_back(self) -> None:
        if self._said_away:
            log.info("the registry in %s is back", without_password(self._url))
        self._said_away = False
