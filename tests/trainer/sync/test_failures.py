"""What goes wrong with an engine, or with its trainer, is told as it is; no socket, no process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast
from unittest.mock import AsyncMock, Mock

import pytest
import torch

from any_agent.engine.sglang.requests import SGLangControl
from any_agent.errors import AnyAgentError, Conflict, EngineUnavailable, NotFound, TrainingError
from any_agent.rollout import RankClients
from tests.support.errors import fails_with
from trainer.sync import bucketed
from trainer.sync import transports as distributed
from trainer.sync.base import NewWeights
from trainer.sync.bucketed import BucketSync, UpdateAttempt
from trainer.sync.engine_client import EngineClient, EngineInfo
from trainer.sync.transports import GroupTransport

BUCKET = [("a", torch.zeros(2))]


class Told(EngineClient):
    """An engine that does what it is told, and remembers it; or does not begin an update."""

    failure: AnyAgentError | None = None
    hangs = False

    def __init__(self, started: str = "1", *, embedded: bool = False) -> None:
        super().__init__(0, "http://10.0.0.1:1", cast(Any, None), timeout=5)
        self.info = EngineInfo(embedded, True, "bfloat16", 1, started)
        self.posts: list[tuple[str, dict[str, Any]]] = []

    async def fetch_info(self) -> None: ...

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/begin_weight_update" and self.failure is not None:
            raise self.failure
        if path == "/begin_weight_update" and self.hangs:
            await asyncio.Event().wait()
        self.posts.append((path, body))
        return {}

    @property
    def backends(self) -> list[str]:
        """Of the groups that it was told to be in."""
        return [body["backend"] for _, body in self.posts if "backend" in body]


class Meeting:
    port, store = 1, None

    def __init__(self, host: str) -> None:
        pass


class Group:
    """Members of one kind of NCCL, or of two."""

    one_kind = False

    def __init__(self, store: None, *, backend: str, **_: Any) -> None:
        self.backend = backend

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        if self.backend == "nccl" and not self.one_kind:
            raise RuntimeError("NCCL error: invalid usage")

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "Rendezvous", Meeting)
    monkeypatch.setattr(distributed, "WeightGroup", Group)
    monkeypatch.setattr(distributed, "address_towards", lambda urls: "127.0.0.1")


async def test_where_nccl_has_never_worked_weights_go_by_gloo(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As between two environments with other versions of it."""
    caplog.set_level(logging.WARNING)
    way, engine = GroupTransport(timeout=5, cuda=True), Told()
    await way.open([engine])
    with fails_with(EngineUnavailable, "NCCL error"):
        await way.send([engine], BUCKET, "loading-1")
    for _ in range(2):
        await way.open([engine])
        await way.send([engine], BUCKET, "loading-1")
    assert engine.backends == ["nccl", "gloo"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert torch.__version__ in said


async def test_nccl_that_has_worked_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that dies is no reason for another way."""
    monkeypatch.setattr(Group, "one_kind", True)
    way, engine = GroupTransport(timeout=5, cuda=True), Told()
    await way.open([engine])
    await way.send([engine], BUCKET, "loading-1")
    monkeypatch.setattr(Group, "one_kind", False)
    with fails_with(EngineUnavailable, "NCCL error"):
        await way.send([engine], BUCKET, "loading-1")
    await way.open([engine])
    assert engine.backends == ["nccl", "nccl"]


async def test_a_group_is_of_processes_and_ends_what_earlier_ones_left() -> None:
    way, engine = GroupTransport(timeout=5), Told()
    for started in ("1", "1", "2"):
        engine.info = EngineInfo(False, True, "bfloat16", 1, started)
        await way.open([engine])
    # The same process keeps its group; another one at the same URL is not in it.
    wanted = ["/destroy_weights_update_group", "/init_weights_update_group"] * 2
    assert [path for path, _ in engine.posts] == wanted
    # The next trainer's, which knows nothing of this one.
    await GroupTransport(timeout=5).open([engine])
    assert len({body["group_name"] for _, body in engine.posts}) == 1


@pytest.mark.parametrize(
    ("path", "told"),
    [
        *(("/server_info", {"tp_size": size}) for size in ("two", [2])),
        *(("/weights_checker", {"ranks": ranks}) for ranks in ([{}], [1], 7, [{"checksums": 3}])),
    ],
    ids=str,
)
async def test_an_unreadable_answer_of_an_engine_counts_as_unavailable(
    path: str, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: Any, **__: Any) -> dict[str, Any]:
        return told

    monkeypatch.setattr(SGLangControl, "request", answer)
    client = EngineClient(0, "http://10.0.0.1:1", cast(Any, None), timeout=5)
    with fails_with(EngineUnavailable, path):
        await (client.fetch_info() if path == "/server_info" else client.checksums())


class Proxy:
    """A rank's, whose pause may fail."""

    failure: AnyAgentError | None = None

    async def run_info(self) -> Any:
        return SimpleNamespace(version=6)

    async def pause(self, *, ttl: float) -> None:
        if self.failure is not None:
            raise self.failure

    async def resume(self) -> None: ...


Attempt: TypeAlias = Callable[..., UpdateAttempt]


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Make a try of one rank alone."""

    def made(engine: Told, proxy: Proxy | None = None, load_timeout: float = 5) -> UpdateAttempt:
        monkeypatch.setattr(bucketed, "EngineClient", lambda *_, **__: engine)
        monkeypatch.setattr(bucketed, "control_session", lambda key: AsyncMock())
        monkeypatch.setattr(bucketed, "engine_url", lambda *_: engine.url)
        sync = BucketSync(
            lambda work, timeout: asyncio.run(work),
            GroupTransport(timeout=5),
            load_timeout=load_timeout,
            dtype="bfloat16",
        )
        lost = EngineUnavailable("the weights cannot be read")
        new = NewWeights(7, 1, Path("v7"), lambda: None, Mock(side_effect=lost))
        ranks = cast(RankClients, SimpleNamespace(clients={0: proxy or Proxy()}))
        return UpdateAttempt(sync, ranks, new, alone=True)

    return made


def test_a_trainer_that_was_replaced_ends_and_leaves_its_successor_alone(attempt: Attempt) -> None:
    """Its pause is refused; the session that is open in the engine is not its own."""
    engine, proxy = Told(embedded=True), Proxy()
    proxy.failure = Conflict("another trainer has taken over")
    with fails_with(Conflict, "taken over"):
        attempt(engine, proxy).run([0])
    assert engine.posts == []


def test_an_update_that_fails_closes_its_session_on_the_engine(attempt: Attempt) -> None:
    engine = Told(embedded=True)
    with fails_with(EngineUnavailable, "cannot be read"):
        attempt(engine).run([0])
    assert engine.posts[-1][0] == "/end_weight_update"


@pytest.mark.parametrize("error", [NotFound("it has no /begin_weight_update"), TrainingError("no")])
def test_an_engine_that_cannot_take_an_update_refuses_it_for_good(
    error: AnyAgentError, attempt: Attempt
) -> None:
    engine = Told(embedded=True)
    engine.failure = error
    one = attempt(engine)
    one.run([0])
    assert one.refused[0].message == error.message and not one.done


def test_no_stage_of_an_engine_is_endless(attempt: Attempt) -> None:
    engine = Told(embedded=True)
    engine.hangs = True
    one = attempt(engine, load_timeout=0.01)
    one.run([0])
    assert one.why == "it does not answer" and not one.done
