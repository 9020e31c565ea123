"""An engine that hangs: a real process that is stopped, with its sockets open."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from any_agent.engine import SGLangEngine
from any_agent.engine.sglang.requests import SGLangControl
from any_agent.engine.sglang.watch import silences
from tests.support.engine.process import EngineProcess
from tests.support.engine.sglang import all_of, joined, request
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import meanwhile, until

pytestmark = pytest.mark.service

HUNG_AFTER = 6.0
LENGTH = 1200
"""Tokens, more than the engine samples before it is stopped."""


@pytest.fixture(scope="module")
def process(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path_factory.mktemp("engine")) as process:
        process.start(tiny_model_dir)
        yield process


@pytest.fixture(autouse=True)
def goes_on(process: EngineProcess) -> Iterator[None]:
    yield
    process.signal(signal.SIGCONT)


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[SGLangEngine]:
    client = SGLangEngine(url, decode=lambda ids: " ".join(map(str, ids)), update_wait=60.0)
    async with meanwhile(client.watch(hung_after=HUNG_AFTER)):
        yield client
    await client.close()


async def test_calls_of_a_hung_engine_are_cut_off_and_go_on_when_it_wakes(
    process: EngineProcess, stream: bool
) -> None:
    """Nothing that came is sampled again, and nothing is missing; it comes back by itself."""
    # The engine may still run the request of the other case.
    wanted = request(f"r{stream}", max_new_tokens=LENGTH, temperature=1.0, ignore_eos=True)
    async with watching(process.url) as client:
        call = asyncio.create_task(all_of(client, wanted, stream=stream))
        await asyncio.sleep(0.5)
        assert (client.away, client.silence) == (False, 0.0)
        process.signal(signal.SIGSTOP)
        assert not call.done()
        await until(lambda: client.away)
        await until(lambda: client.silence >= HUNG_AFTER)
        process.signal(signal.SIGCONT)
        ids, logprobs, versions = joined(await asyncio.wait_for(call, 100))
        assert (len(ids), len(logprobs), len(versions)) == (LENGTH,) * 3
        assert client.resubmitted == {"death": 1}
        await until(lambda: not client.away and client.silence == 0.0)


async def test_a_late_answer_ends_the_silence_without_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sample waits behind all the calls that keep a busy engine from answering in time."""
    monkeypatch.setattr("any_agent.engine.sglang.watch.INTERVAL", 0.05)
    scripted = ScriptedEngine()
    async with scripted.serve(), watching(scripted.url) as client:
        answers, late = SGLangControl.answers, True

        async def answer(control: SGLangControl, path: str, *, within: float) -> bool:
            return not late and await answers(control, path, within=within)

        monkeypatch.setattr(SGLangControl, "answers", answer)
        scripted.ill = True
        await until(lambda: client.away)
        late = False
        await asyncio.sleep(0.5)
        assert not client.away
        # A death behind the silence is one all the same.
        late = True
        await until(lambda: client.away)
        await scripted.die()
        late = False
        await asyncio.sleep(0.2)
        await scripted.revive()
        await asyncio.sleep(0.5)
        assert client.away
        scripted.ill = False
        await until(lambda: not client.away)


async def test_an_answer_of_any_status_or_a_hung_watcher_is_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that is sick, or wants a key, has a living HTTP process."""
    monkeypatch.setattr("any_agent.engine.sglang.watch.INTERVAL", 0.01)
    monkeypatch.setattr("any_agent.engine.sglang.watch.ANSWER_WITHIN", 0.2)
    monkeypatch.setattr("any_agent.engine.sglang.watch.LATE", 0.1)

    class Control(SGLangControl):
        def __init__(self) -> None:
            self.hangs = False

        async def answers(self, path: str, *, within: float) -> bool:
            if self.hangs:
                # A step of this very process, in which the limit passed unseen.
                time.sleep(within + 0.2)  # noqa: ASYNC251
            return False

    control = Control()
    seen = []
    async for silence in silences(control):
        seen.append(silence)
        control.hangs = True
        if len(seen) == 4:
            break
    assert seen[0]
    assert seen == [seen[0]] * 4
