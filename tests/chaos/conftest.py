"""The proofs' options and figures.

``pytest`` runs each proof in its short form (seconds), ``make chaos`` or ``pytest tests/chaos
--long`` in its long one; with ``--journal redis`` ranks have a log in Redis. A proof takes ``long``
to choose how much it does and says what it measured by ``figure("killed 100 times, 0 lost")``: the
lines stand at the end of pytest's output (tests/conftest.py writes them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.redis_server import JOURNAL, RedisServer

Figure = Callable[[str], None]


EITHER_JOURNAL = pytest.mark.parametrize("journal", ["file", "redis"], indirect=True)
"""Marks a proof that the short form, too, runs with each journal."""


@pytest.fixture(scope="session")
def journal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), "--databases", "10000") as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def usual_journal(request: pytest.FixtureRequest) -> None:
    """Choose the journal of the option, also of what several tests share."""
    choose_journal(request, request.config.getoption("--journal"))


@pytest.fixture(autouse=True)
def journal(request: pytest.FixtureRequest, usual_journal: None) -> Iterator[str]:
    """Choose the journal of a test's proxies, if the test is run with each; give its kind."""
    usual = request.config.getoption("--journal")
    kind = getattr(request, "param", usual)
    choose_journal(request, kind)
    yield kind
    choose_journal(request, usual)


def choose_journal(request: pytest.FixtureRequest, kind: str) -> None:
    JOURNAL.server = request.getfixturevalue("journal_server") if kind == "redis" else None
