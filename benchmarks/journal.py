"""The cost of the journal: ``python benchmarks/journal.py``.

Interactions of 10 KB (500 prompt ids; 500 output ids with their log-probabilities and versions;
messages) go through the journal's interface, beside raw sqlite3 in the same run and the same
folder: the same pragmas and the same number of bytes a row, as ready-made blobs.

many     64 sessions that write at once, each awaiting its row before its next one. The raw peer
         commits 64 rows at a time, in a loop that does nothing else.
one      a single session: the time from its write to the acknowledgement. The raw peer is a
         transaction of one row; `fsync` appends as many bytes to a file.
redis    both again with the log in a Redis of its own (`appendfsync always`), beside redis-py's
         XADDs of as many bytes: 64 in a pipeline, and one at a time.
episode  the bytes that a session of 200 turns takes on disk, against those of its unique tokens
         (4 a prompt id; 12 an output token: id, log-probability, version) and of its messages as
         JSON.

``--folder`` chooses the disk; the default is the one of temporary files.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import sqlite3
import subprocess
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import redis
from common import finish, machine, median, parser, ratio

from any_agent.rundir import RunDir
from any_agent.runtime.ports import free_port
from any_agent.types import (
    Continuation,
    GenerationHyperparameters,
    Interaction,
    id_array,
    logprob_array,
)
from proxy_ext.journal import Journal, PutInteraction, SQLiteJournal, open_journal

WRITERS = 64
TURNS, TURN_USER, TURN_OUTPUT = 200, 125, 125
_PROMPT = _OUTPUT = 500
_WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "with")
_RAW = """
CREATE TABLE rows (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL,
    data BLOB NOT NULL
) STRICT;
CREATE INDEX rows_by_session ON rows (session_id);
"""
_INSERT = "INSERT INTO rows (id, session_id, data) VALUES (?, ?, ?)"
Row = tuple[str, str, bytes]


class Maker:
    """A maker of interactions, each different."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._numbers = np.random.default_rng(0)

    def interaction(
        self,
        session_id: str,
        parent: Interaction | None = None,
        *,
        prompt: int = _PROMPT,
        output: int = _OUTPUT,
    ) -> Interaction:
        return Interaction(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            session_id=session_id,
            parent_id=parent.id if parent is not None else None,
            prompt_delta_ids=id_array(self._numbers.integers(0, 150_000, prompt)),
            output_ids=id_array(self._numbers.integers(0, 150_000, output)),
            output_logprobs=logprob_array(-self._numbers.exponential(1.0, output)),
            output_versions=id_array(np.full(output, 17)),
            message_delta=[{"role": "user", "content": self._text(prompt)}],
            output_message={"role": "assistant", "content": self._text(output)},
            finish_reason="stop",
            gconfig=GenerationHyperparameters(max_new_tokens=4096, stop_token_ids=(2, 3)),
            model="policy",
            continuation=Continuation.EXACT if parent is not None else Continuation.ROOT,
            request={"overridden": {}, "recorded": {}, "mixed_cache": False},
            created_at=time.time(),
        )

    def key(self) -> bytes:
        return self._random.randbytes(16)

    def _text(self, tokens: int) -> str:
        """Return a text about as long as ``tokens`` tokens of a conversation."""
        return " ".join(self._random.choices(_WORDS, k=max(1, tokens // 3)))


def size_of(interaction: Interaction) -> int:
    """Return the bytes of its tokens and messages."""
    i = interaction
    tokens = 4 * len(i.prompt_delta_ids) + 12 * len(i.output_ids)
    return tokens + len(orjson.dumps([*i.message_delta, i.output_message]))


def raw_connection(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.executescript(_RAW)
    return connection


def raw_rows(count: int, size: int) -> list[Row]:
    ids = (uuid.uuid4().hex for _ in range(count))
    return [(id, f"s-{k % WRITERS}", os.urandom(size)) for k, id in enumerate(ids)]


# -- many ------------------------------------------------------------------------------------------


async def many_through_journal(journal: Journal, maker: Maker, each: int) -> tuple[float, float]:
    """Return seconds and CPU seconds for a row."""
    todo = [[maker.interaction(f"s-{w}") for _ in range(each)] for w in range(WRITERS)]
    keys = [[maker.key() for _ in range(each)] for _ in range(WRITERS)]

    async def write(rows: list[Interaction], keys: list[bytes]) -> None:
        for row, key in zip(rows, keys, strict=True):
            await journal.commit(PutInteraction(row, key))

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(write, todo, keys))
    rows = WRITERS * each
    return (time.perf_counter() - wall) / rows, (time.process_time() - cpu) / rows


def many_raw(raw: sqlite3.Connection, each: int, size: int) -> tuple[float, float]:
    rows = raw_rows(WRITERS * each, size)
    wall, cpu = time.perf_counter(), time.process_time()
    for k in range(0, len(rows), WRITERS):
        raw.execute("BEGIN IMMEDIATE")
        raw.executemany(_INSERT, rows[k : k + WRITERS])
        raw.execute("COMMIT")
    return (time.perf_counter() - wall) / len(rows), (time.process_time() - cpu) / len(rows)


# -- one -------------------------------------------------------------------------------------------


async def one_after_another(
    journal: Journal, raw: sqlite3.Connection, path: Path, maker: Maker, count: int, size: int
) -> dict[str, list[float]]:
    """Return seconds of single writes. The three take turns, because a disk's speed varies."""
    out: dict[str, list[float]] = defaultdict(list)
    appended = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for row in raw_rows(count, size):
        interaction, key = maker.interaction("alone"), maker.key()
        began = time.perf_counter()
        await journal.commit(PutInteraction(interaction, key))
        out["journal"].append(time.perf_counter() - began)
        began = time.perf_counter()
        raw.execute("BEGIN IMMEDIATE")
        raw.execute(_INSERT, row)
        raw.execute("COMMIT")
        out["raw sqlite3"].append(time.perf_counter() - began)
        began = time.perf_counter()
        os.write(appended, row[2])
        os.fsync(appended)
        out["fsync"].append(time.perf_counter() - began)
    os.close(appended)
    return out


# -- redis -----------------------------------------------------------------------------------------


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a server with its files in a folder; gives its URL."""
    port = str(free_port("127.0.0.1"))
    words = f"--port {port} --bind 127.0.0.1 --appendonly yes --appendfsync always --save".split()
    folder.mkdir()
    with (folder / "log").open("wb") as out:
        server = subprocess.Popen(["redis-server", *words, ""], cwd=folder, stdout=out, stderr=out)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        with redis.Redis.from_url(url) as client:
            for _ in range(200):
                with suppress(redis.RedisError):
                    client.ping()
                    break
                time.sleep(0.05)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def many_xadd(client: redis.Redis, each: int, size: int) -> tuple[float, float]:
    rows = raw_rows(WRITERS * each, size)
    wall, cpu = time.perf_counter(), time.process_time()
    for k in range(0, len(rows), WRITERS):
        pipeline = client.pipeline(transaction=False)
        for _, _, data in rows[k : k + WRITERS]:
            pipeline.xadd("raw", {"d": data}, maxlen=2000)
        pipeline.execute()
    return (time.perf_counter() - wall) / len(rows), (time.process_time() - cpu) / len(rows)


async def one_with_redis(
    journal: Journal, client: redis.Redis, maker: Maker, count: int, size: int
) -> dict[str, list[float]]:
    """Return seconds of single writes, in turns."""
    out: dict[str, list[float]] = defaultdict(list)
    for _, _, data in raw_rows(count, size):
        interaction, key = maker.interaction("alone"), maker.key()
        began = time.perf_counter()
        await journal.commit(PutInteraction(interaction, key))
        out["with redis"].append(time.perf_counter() - began)
        began = time.perf_counter()
        client.xadd("raw", {"d": data}, maxlen=2000)
        out["raw xadd"].append(time.perf_counter() - began)
    return out


async def measure_redis(folder: Path, args: argparse.Namespace) -> None:
    if shutil.which("redis-server") is None:
        print("\nredis: left out, because redis-server is not installed")
        return
    maker = Maker()
    size = size_of(maker.interaction("s"))
    timed: dict[str, list[tuple[float, float]]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    run = RunDir.of(folder, "user", "benchmark", "redis")
    with redis_server(folder / "redis") as url, redis.Redis.from_url(url) as client:
        logged = open_journal(
            run.logged_journal_url(0, url, lease=5, durability="always", replicas=0)
        )
        plain = SQLiteJournal(folder / "beside.sqlite")
        for number in range(args.rounds + 1):
            found = {
                "with redis": await many_through_journal(logged, maker, args.rows),
                "sqlite alone": await many_through_journal(plain, maker, args.rows),
                "raw xadd": many_xadd(client, args.rows, size),
            }
            single = await one_with_redis(logged, client, maker, 2 * args.rows, size)
            if number:  # the first one warms up
                for name, pair in found.items():
                    timed[name].append(pair)
                for name, seconds in single.items():
                    alone[name] += seconds
        await logged.close()
        await plain.close()
    wall = {name: median([pair[0] for pair in pairs]) for name, pairs in timed.items()}
    cpu = {name: median([pair[1] for pair in pairs]) for name, pairs in timed.items()}
    show(
        f"with the log in Redis, {WRITERS} sessions that write at once",
        {
            name: f"{1 / wall[name]:>8.0f} rows/s {1e6 * cpu[name]:>6.0f} us CPU a row"
            f"   x raw {wall['raw xadd'] / wall[name]:.2f}"
            for name in wall
        },
    )
    ratio("many with redis / raw xadd", wall["with redis"], wall["raw xadd"])
    ratio("CPU with redis / sqlite alone", cpu["with redis"], cpu["sqlite alone"])
    rows = {name: f"{1e3 * median(seconds):>8.2f} ms" for name, seconds in alone.items()}
    added = median(alone["with redis"]) - median(alone["raw xadd"])
    rows["with redis"] += f"   raw + {1e3 * added:.2f} ms"
    ratio("one with redis / raw xadd", median(alone["with redis"]), median(alone["raw xadd"]))
    show("one session's durable write with the log in Redis, median", rows)


# -- episode ---------------------------------------------------------------------------------------


async def episode(folder: Path, maker: Maker, turns: int) -> tuple[int, int]:
    """Return the bytes that it takes on disk, and those of its tokens and messages."""
    path = folder / "episode.sqlite"
    empty = await _written(path, [])
    told: list[Interaction] = []
    for _ in range(turns):
        parent = told[-1] if told else None
        told.append(maker.interaction("talk", parent, prompt=TURN_USER, output=TURN_OUTPUT))
    return await _written(path, told) - empty, sum(map(size_of, told))


async def _written(path: Path, rows: list[Interaction]) -> int:
    """Return the file's size with these added and an empty log."""
    maker = Maker()
    journal = SQLiteJournal(path)
    for row in rows:
        await journal.commit(PutInteraction(row, maker.key()))
    await journal.close()
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


# -- the tables ------------------------------------------------------------------------------------


def show(title: str, rows: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, text in rows.items():
        print(f"{name:<14} {text}")


async def measure(folder: Path, args: argparse.Namespace) -> None:
    maker = Maker()
    size = size_of(maker.interaction("s"))
    journal, raw = SQLiteJournal(folder / "ours.sqlite"), raw_connection(folder / "raw.sqlite")
    walls: dict[str, list[float]] = defaultdict(list)
    cpus: dict[str, list[float]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    for number in range(args.rounds + 1):
        timed = {
            "journal": await many_through_journal(journal, maker, args.rows),
            "raw sqlite3": many_raw(raw, args.rows, size),
        }
        single = await one_after_another(
            journal, raw, folder / "appended", maker, 2 * args.rows, size
        )
        if number:  # the first one warms up
            for name, (wall, cpu) in timed.items():
                walls[name].append(wall)
                cpus[name].append(cpu)
            for name, seconds in single.items():
                alone[name] += seconds
    await journal.close()
    raw.close()
    many = {name: median(seconds) for name, seconds in walls.items()}
    show(
        f"{WRITERS} sessions that write at once, {size} bytes of tokens and messages a row",
        {
            name: f"{1 / wall:>8.0f} rows/s {1e6 * median(cpus[name]):>6.0f} us CPU a row"
            f"   x raw {many['raw sqlite3'] / wall:.2f}"
            for name, wall in many.items()
        },
    )
    ratio("many / raw sqlite3", many["journal"], many["raw sqlite3"])
    raw_s = median(alone["raw sqlite3"])
    added = median(alone["journal"]) - raw_s
    rows = {name: f"{1e3 * median(seconds):>8.2f} ms" for name, seconds in alone.items()}
    rows["journal"] += f"   raw + {1e3 * added:.2f} ms ({median(alone['journal']) / raw_s:.2f} x)"
    ratio("one / raw sqlite3", median(alone["journal"]), raw_s)
    show("one session's durable write, median", rows)
    await measure_redis(folder, args)
    taken, needed = await episode(folder, maker, args.turns)
    ratio("bytes of an episode / needed", taken, needed)
    show(
        f"an episode of {args.turns} turns of {TURN_USER} + {TURN_OUTPUT} tokens",
        {
            "on disk": f"{taken / 1e3:>8.0f} kB   {taken / needed:.2f} x its tokens and messages",
            "needed": f"{needed / 1e3:>8.0f} kB",
        },
    )


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rows", type=int, default=60, help="rows of a session in a round")
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--turns", type=int, default=TURNS, help="turns of the episode")
    flags.add_argument(
        "--folder", type=Path, help="folder to write in (a new folder is made there)"
    )
    args = flags.parse_args()
    if args.quick:
        args.rows, args.rounds = 20, 3
    if args.smoke:
        args.rows, args.rounds, args.turns = 2, 1, 10
    print(f"{machine()}; {args.rows} rows of {WRITERS} sessions x {args.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        asyncio.run(measure(Path(folder), args))
    finish(args)


if __name__ == "__main__":
    main()
