"""Where sessions are opened, over ranks that have slots or have none."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from types import SimpleNamespace
from urllib.parse import parse_qsl

import pytest

from any_agent.protocol.rl import Abort
from router import open_session, upstream
from router.affinity import home_of
from tests.router.conftest import StartLab
from tests.support.proxy import until
from tests.support.router import FakeRank, Lab, Received, never, refusal, refuses

START = "/rl/v1/start_session"
NO_SLOT = {"error": {"code": "no_capacity"}}


def slots(rank: FakeRank, count: int = 0) -> Callable[[int], None]:
    """Have a rank open so many sessions, and more when the result is called; the rest waits."""
    free = asyncio.Semaphore(count)

    async def handler(received: Received) -> None:
        wait = float((received.json if received.body else {}).get("wait", 0))
        try:
            if wait or not free.locked():
                async with asyncio.timeout(wait or None):
                    await free.acquire()
                await received.answer({"rank": rank.number})
                return
        except TimeoutError:
            pass
        await received.answer(NO_SLOT, status=429, headers={"Retry-After": "2"})

    rank.handler = handler

    def more(number: int = 1) -> None:
        for _ in range(number):
            free.release()

    return more


def opened(lab: Lab) -> list[int]:
    return [len(rank.received) for rank in lab.ranks]


async def test_groups_and_tasks_go_home(start_lab: StartLab) -> None:
    lab = await start_lab(ranks=3)
    for k in range(12):
        for fields in ({"group_id": f"g{k}"}, {"group_id": f"g{k}", "task_id": "t"}):
            await lab.post(START, fields)
        await lab.post(START, {"task_id": f"t{k}"})
        await lab.get(f"{START}?group_id=g{k}&task_id=t")
    for rank in lab.ranks:
        for received in rank.received:
            query = received.target.partition("?")[2]
            fields = received.json if received.body else dict(parse_qsl(query))
            assert home_of(fields.get("group_id") or fields["task_id"], range(3)) == rank.number


async def test_the_home_of_a_group_or_key_is_waited_for(pair: Lab) -> None:
    """Another rank would be another group, and would know nothing of the key."""
    key = {"Idempotency-Key": "k"}
    for named, body, headers in (("g", {"group_id": "g"}, {}), ("key k", {}, key)):
        home = pair.ranks[home_of(named, range(2))]
        await home.kill()
        call = asyncio.create_task(pair.post(START, body, **headers))
        await until(lambda: pair.router.ranks.waiting == 1, "the open waits")
        await pair.restart(home)
        assert (await call).status_code == 200
        assert home.received.pop().json == body
    # A group binds more than a key.
    for k in range(8):
        await pair.post(START, {"group_id": "g"}, **{"Idempotency-Key": f"k{k}"})
    assert len(pair.ranks[home_of("g", range(2))].received) == 8


async def test_an_idempotency_key_has_one_home(start_lab: StartLab) -> None:
    """It may have a slot or none: what another rank answered before, it does not know."""
    lab = await start_lab(ranks=3)
    for rank in lab.ranks:
        slots(rank, 1)
    answers = [
        await lab.post(START, {"wait": 0}, **{"Idempotency-Key": f"k{k % 10}"}) for k in range(20)
    ]
    assert opened(lab) != [0, 0, 0]
    for rank in lab.ranks:
        for received in rank.received:
            (key,) = received.values("idempotency-key")
            assert home_of(f"key {key}", range(3)) == rank.number
            assert received.json == {"wait": 0}
    assert sum(opened(lab)) == 20
    assert {answer.status_code for answer in answers} == {200, 429}


async def test_an_earlier_key_goes_to_its_rank_unless_the_group_has_another(pair: Lab) -> None:
    for _ in range(3):
        await pair.post(START, {"api_key": pair.key(1)})
    assert opened(pair) == [0, 3]
    key = pair.key(1 - home_of("g", range(2)))
    response = await pair.post(START, {"api_key": key, "group_id": "g"})
    assert refusal(response) == (409, "lane_on_other_rank")
    assert key not in response.text


async def test_eval_sessions_of_a_task_go_anywhere(pair: Lab) -> None:
    for _ in range(4):
        await pair.post(START, {"mode": "eval", "task_id": "t", "group_id": "g"})
        await pair.post(f"{START}?task_id=t&mode=eval", b"")
    assert opened(pair) == [4, 4]


async def test_a_session_that_is_named_beside_a_group_does_not_move_it(pair: Lab) -> None:
    """Else a group opened from inside another session would be split over ranks."""
    home = home_of("g", range(2))
    for query, headers in (
        ("", {"X-Any-Agent-Session": f"ses-{1 - home}-0123456789abcdef"}),
        (f"?session_id=ses-{1 - home}-0123456789abcdef", {}),
    ):
        await pair.post(START + query, {"group_id": "g"}, **headers)
    assert len(pair.ranks[home].received) == 2


async def test_opens_are_spread_evenly(start_lab: StartLab) -> None:
    """Of each kind, whatever the other kind does in between."""
    lab = await start_lab(ranks=3)
    modes = ["train", "eval", "eval"]
    await asyncio.gather(*(lab.post(START, {"mode": modes[k % 3]}) for k in range(30)))
    for mode in set(modes):
        counts = [sum(r.json["mode"] == mode for r in rank.received) for rank in lab.ranks]
        assert max(counts) - min(counts) <= 1, counts


async def test_a_full_or_dead_rank_is_passed_by(pair: Lab) -> None:
    slots(pair.ranks[0])
    slots(pair.ranks[1], 10)
    answers = [await pair.post(START, {"metadata": {"k": k}, "wait": 5}) for k in range(6)]
    assert [a.json() for a in answers] == [{"rank": 1}] * 6
    assert sorted(r.json["metadata"]["k"] for r in pair.ranks[1].received) == [0, 1, 2, 3, 4, 5]
    assert all(r.json["wait"] == 0 for rank in pair.ranks for r in rank.received)
    await pair.ranks[0].kill()
    for _ in range(4):
        assert (await pair.post(START, {})).status_code == 200
    assert len(pair.ranks[1].received) == 10


async def test_a_waiting_open_goes_to_the_rank_where_fewer_wait(pair: Lab) -> None:
    """What the registry says of the queues is up to a second old."""
    more = [slots(rank) for rank in pair.ranks]
    calls = [asyncio.create_task(pair.post(START, {"wait": 14})) for _ in range(4)]
    await until(lambda: sum(opened(pair)) == 12, "all of them wait")
    more[0](2)
    await until(lambda: sum(call.done() for call in calls) == 2, "two are served")
    before = opened(pair)
    calls += [asyncio.create_task(pair.post(START, {"wait": 14})) for _ in range(2)]
    await until(lambda: sum(opened(pair)) == 18, "all of them wait")
    assert [now - then for now, then in zip(opened(pair), before, strict=True)] == [4, 2]
    for release in more:
        release(2)
    await asyncio.gather(*calls)


async def test_without_a_slot_the_last_answer_is_429(pair: Lab) -> None:
    for rank in pair.ranks:
        slots(rank)
    for body in ({}, {"wait": 0}, {"wait": 0.3}):
        response = await pair.post(START, body)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "2"
        assert response.json() == NO_SLOT
    # Without a wait it is asked for once at each, as it came.
    assert pair.ranks[0].received[0].body == b"{}"
    # That a rank has none is heard before that another one is busy.
    pair.ranks[1].handler = refuses("store_busy", 503)
    for _ in range(2):
        assert (await pair.post(START, {})).status_code == 429


async def test_a_get_asks_each_rank_once_and_then_waits(pair: Lab) -> None:
    pair.handle(refuses("no_capacity", 429))
    await pair.get(f"{START}?mode=train&wait=30&metadata=")
    targets = [r.target for rank in pair.ranks for r in rank.received]
    assert len(targets) == 3
    assert sum("wait=0&" in target or target.endswith("wait=0") for target in targets) == 2
    assert all("mode=train" in target and "metadata=" in target for target in targets)


async def test_an_opener_that_leaves_waits_no_more(pair: Lab) -> None:
    for rank in pair.ranks:
        slots(rank)
    wire = await pair.raw(f"POST {START}", body=b'{"wait": 60}')
    await until(lambda: sum(opened(pair)) == 3, "it waits")
    wire.close()
    await until(lambda: any(rank.left.is_set() for rank in pair.ranks), "the rank is told")


@pytest.mark.parametrize(
    ("code", "status", "tried"),
    [
        ("run_finished", 409, 1),
        # The session may be there all the same; a second one would be nobody's.
        ("store_unavailable", 503, 1),
        ("store_busy", 503, 2),
        ("too_many_connections", 503, 2),
        ("too_many_requests", 503, 2),
        ("too_many_bytes", 503, 2),
    ],
)
async def test_other_refusals_of_a_rank_are_passed_on(
    pair: Lab, code: str, status: int, tried: int
) -> None:
    pair.handle(refuses(code, status))
    assert (await pair.post(START, {"wait": 1})).status_code == status
    assert sum(opened(pair)) == tried


async def test_an_open_waits_only_where_a_slot_can_be_had(pair: Lab) -> None:
    """Whoever was asked last, and wherever fewer seem to wait."""
    more = slots(pair.ranks[0])
    pair.ranks[1].handler = refuses("store_busy", 503)
    calls = [asyncio.create_task(pair.post(START, {"wait": 14})) for _ in range(2)]
    await until(lambda: opened(pair) == [4, 2], "both of them wait")
    more(2)
    assert [(await call).json() for call in calls] == [{"rank": 0}] * 2
    assert opened(pair) == [4, 2]


@pytest.mark.parametrize("body", [b"{", b"[]", b"7", b'{"wait": "soon"}', b'{"wait": -1}'])
async def test_malformed_opens_are_a_ranks_business(pair: Lab, body: bytes) -> None:
    await pair.post(START, body)
    assert [r.body for rank in pair.ranks for r in rank.received] == [body]


async def test_a_wait_by_query_is_waited_in_slices(pair: Lab) -> None:
    async def full(received: Received) -> None:
        wait = received.json["wait"]
        await received.answer({"waited": wait} if wait else NO_SLOT, status=200 if wait else 429)

    pair.handle(full)
    answer = (await pair.post(f"{START}?wait=30&ttl=9", {"metadata": {"a": 1}})).json()
    assert 0 < answer["waited"] <= 30
    told = [r for rank in pair.ranks for r in rank.received]
    assert {r.target for r in told} == {f"{START}?ttl=9"}
    assert {r.json["wait"] for r in told} == {0, answer["waited"]}
    assert all(r.json["metadata"] == {"a": 1} for r in told)


async def test_a_wait_that_differs_is_refused(pair: Lab) -> None:
    for wait in (30, 30.0):
        response = await pair.post(f"{START}?wait=9", {"wait": wait})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "wait"
    assert opened(pair) == [0, 0]
    assert (await pair.post(f"{START}?wait=9", {"wait": 9.0})).status_code == 200


async def test_the_query_of_an_open_is_bounded(pair: Lab) -> None:
    response = await pair.post(f"{START}?{'a=1&' * 3000}", b"")
    assert response.status_code == 400
    assert opened(pair) == [0, 0]


def stall(lab: Lab, rank: FakeRank) -> None:
    rank.handler = never
    lab.silent.add(rank.number)


async def test_an_open_goes_elsewhere_when_its_rank_stalls(pair: Lab) -> None:
    stall(pair, pair.ranks[0])
    slots(pair.ranks[1], 10)
    answers = await asyncio.gather(*(pair.post(START, {}) for _ in range(4)))
    assert [answer.json()["rank"] for answer in answers] == [1] * 4
    assert len(pair.ranks[0].received) == 2, "ranks take turns"
    # It still takes connections, and gets no further opens.
    assert [(await pair.post(START, {})).json() for _ in range(4)] == [{"rank": 1}] * 4
    assert len(pair.ranks[0].received) == 2


async def test_an_open_that_waits_for_a_slot_leaves_a_rank_that_stalls(pair: Lab) -> None:
    for rank in pair.ranks:
        slots(rank)
    call = asyncio.create_task(pair.post(START, {"wait": 60}))
    await until(lambda: sum(opened(pair)) == 3, "it waits at a rank")
    waits = max(pair.ranks, key=lambda rank: len(rank.received))
    pair.silent.add(waits.number)
    slots(pair.ranks[1 - waits.number], 1)
    assert (await call).json() == {"rank": 1 - waits.number}


@pytest.mark.parametrize("judge", ["", "its own", "the operator's alone"])
async def test_a_session_that_a_stalled_rank_opens_after_all_is_aborted(
    pair: Lab, judge: str
) -> None:
    """Where the operator's judge alone rewards a tenant's sessions, by its opener's key."""
    late, other = pair.ranks
    go_on = asyncio.Event()
    keys = {"api_key": "sk-agents" if judge == "its own" else "sk-late"}
    if judge == "its own":
        keys["judge_key"] = "sk-late"

    async def wake_up_later(received: Received) -> None:
        if received.target == START:
            await go_on.wait()
            await received.answer({"session_id": "ses-0-late", **keys})
        elif judge == "the operator's alone" and received.values("authorization") == [LATE]:
            await received.answer({"error": {"code": "judge_only"}}, status=403)
        else:
            await received.answer({"state": "aborted"})

    late.handler = wake_up_later
    pair.silent.add(0)
    slots(other, 10)
    for _ in range(2):
        answer = await pair.post(START, {}, Authorization="Bearer sk-openers")
        assert answer.json() == {"rank": 1}
    assert [received.target for received in late.received] == [START]
    go_on.set()
    tried = [LATE, "Bearer sk-openers"] if judge == "the operator's alone" else [LATE]
    await until(lambda: len(late.received) == 1 + len(tried), "the session is aborted")
    for aborted, key in zip(late.received[1:], tried, strict=True):
        assert (aborted.method, aborted.target) == ("POST", "/rl/v1/sessions/ses-0-late/abort")
        assert Abort.model_validate_json(aborted.body).keep_place, "its opener tries again"
        assert aborted.values("authorization") == [key]


LATE = "Bearer sk-late"


async def test_few_late_answers_are_awaited_at_once(
    pair: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds a descriptor for two minutes, and clients try again every few seconds."""
    monkeypatch.setattr(open_session, "MAX_LATE", 3)
    home = pair.ranks[home_of("g", range(2))]
    stall(pair, home)
    calls = [pair.post(START, {"group_id": "g"}) for _ in range(8)]
    assert {answer.status_code for answer in await asyncio.gather(*calls)} == {503}
    await until(lambda: home.open <= 3, "the others are closed")
    assert home.open == 3


@pytest.mark.parametrize("bound", ["group", "key"])
async def test_an_open_that_is_bound_to_a_stalled_rank_is_refused_in_time(
    pair: Lab, bound: str
) -> None:
    """A retry under the key gets the session that the first request may yet open."""
    group = bound == "group"
    home = pair.ranks[home_of("g" if group else "key g", range(2))]
    stall(pair, home)
    body, headers = ({"group_id": "g"}, {}) if group else ({}, {"Idempotency-Key": "g"})
    answer = await pair.post(START, body, **headers)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert f"rank {home.number}" in answer.json()["error"]["message"]
    assert opened(pair)[1 - home.number] == 0
    if not group:
        await asyncio.wait_for(home.left.wait(), 10)


async def test_a_service_whose_ranks_all_stall_refuses_in_time(pair: Lab) -> None:
    for rank in pair.ranks:
        stall(pair, rank)
    answer = await pair.post(START, {"wait": 60})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert opened(pair) == [1, 1], "each one is asked once"


async def test_sessions_are_opened_where_an_engine_is(pair: Lab) -> None:
    for rank in pair.ranks:
        slots(rank, 100)
    pair.ranks[0].engine_up = False
    await until(lambda: pair.router.ranks.fit == [1], "the entry is read")
    for _ in range(4):
        assert (await pair.post(START, {})).json() == {"rank": 1}
    pair.ranks[0].engine_up = True
    await until(lambda: pair.router.ranks.fit == [0, 1], "the entry is read")
    assert {(await pair.post(START, {})).json()["rank"] for _ in range(4)} == {0, 1}
    # Without any engine sessions wait for one, as their calls do.
    for rank in pair.ranks:
        rank.engine_up = False
    await until(lambda: not pair.router.ranks.engine_up(1), "the entry is read")
    assert (await pair.post(START, {})).status_code == 200


async def test_a_router_without_descriptors_refuses_an_open_at_once(
    pair: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are there, so it must not ask them again and again."""
    tries = 0

    async def create_connection(*args: object, **options: object) -> None:
        nonlocal tries
        tries += 1
        if tries > 20:
            await asyncio.Event().wait()
        raise OSError(errno.EMFILE, "Too many open files")

    loop = SimpleNamespace(create_connection=create_connection)
    own = SimpleNamespace(timeout=asyncio.timeout, get_running_loop=lambda: loop)
    monkeypatch.setattr(upstream, "asyncio", own)
    answer = await asyncio.wait_for(pair.post(START, {}), 10)
    assert (answer.status_code, tries) == (503, 1)
    assert answer.json()["error"]["code"] == "too_many_connections"
    assert answer.headers["retry-after"] == "2"
