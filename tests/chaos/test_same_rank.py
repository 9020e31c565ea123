"""Two processes that both believe they carry one rank, each stopped again and again for longer than
its lease: at most one is acknowledged, ever."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.conftest import Figure
from tests.support.redis_journal import Machine, ids
from tests.support.redis_server import RedisServer

LEASE = 0.3
LIVES = 5
ROOT = Path(__file__).parents[2]


class Claimant:
    """A process of `tests.support.chaos.claimant`, and what it prints, in a file."""

    def __init__(self, folder: Path, url: str, name: str) -> None:
        self._said = folder / f"{name}.txt"
        command = [sys.executable, "-m", "tests.support.chaos.claimant"]
        with self._said.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, str(folder), url, name, str(LEASE)], stdout=out, cwd=ROOT
            )

    def pause(self, seconds: float) -> None:
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(20)

    def said(self) -> list[list[str]]:
        assert self._process.poll() in (None, -signal.SIGKILL)
        # The last line may not be whole.
        return [line.split() for line in self._said.read_text().split("\n")[:-1]]


@pytest.mark.timeout(1800)
def test_only_one_of_two_processes_of_a_rank_has_its_writes_acknowledged(
    tmp_path: Path, long: bool, figure: Figure
) -> None:
    wanted = 10_000 if long else 300
    rng = random.Random(0)
    with RedisServer(tmp_path / "redis") as server, ExitStack() as stack:
        pair = [Claimant(tmp_path, server.url, name) for name in ("one", "two")]
        for process in pair:
            stack.callback(process.kill)
        pauses = 0
        while written_by(pair) < wanted or lives_of(pair) < LIVES:
            time.sleep(rng.uniform(0, 2 * LEASE))
            rng.choice(pair).pause(rng.uniform(0, 3 * LEASE))
            pauses += 1
        for process in pair:
            process.kill()
        said = [line for process in pair for line in process.said()]
        journal = Machine(tmp_path, server.url, "three").open(lease=LEASE)
        found = asyncio.run(ids(journal))
        asyncio.run(journal.close())
    acknowledged = sorted((int(line[0]), line[1]) for line in said if line[0].isdigit())
    lives = lives_of(pair)
    refused = {line[1] for line in said if line[0] == "refused"}
    names = {name for _, name in acknowledged}
    others = [name for name in found if name not in names]
    figure(
        f"{len(acknowledged)} writes acknowledged over {pauses} pauses, {lives} lives of the rank; "
        f"{len(names.difference(found))} lost; {len(others)} recorded without an answer, "
        f"{len(refused.intersection(found))} of them refused"
    )
    numbers = [number for number, _ in acknowledged]
    assert len(set(numbers)) == len(numbers)
    # All of them are there, in the order of their numbers.
    assert [name for name in found if name in names] == [name for _, name in acknowledged]
    # The last write of a life may have arrived without its answer.
    assert len(others) <= lives


def written_by(pair: list[Claimant]) -> int:
    return sum(line[0].isdigit() for process in pair for line in process.said())


def lives_of(pair: list[Claimant]) -> int:
    return sum(line[0] == "begun" for process in pair for line in process.said())
