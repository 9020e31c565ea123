"""A family's real proxy on a scripted engine that tells true log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from any_agent.types import Message
from tests.support.families import Family
from tests.support.laws.apis import CHAT, Api, Asked, Given
from tests.support.other_weights import publish_other
from tests.support.proxy import Proxy, config_for, running_proxy, until
from tests.support.scripted_engine import ScriptedEngine
from tests.support.true_logprobs import TrueModel

TEMPERATURE = 0.8
CONTEXT = 4096


@dataclass
class Lab:
    """One family's service."""

    fam: Family
    engine: ScriptedEngine
    proxy: Proxy
    folder: Path
    weights: dict[int, Path] = field(default_factory=dict)
    """By version."""

    async def open(self) -> Talk:
        # What was said at first is forgotten after a minute, which a slow machine may take.
        await self.proxy.admit(1000)
        return Talk(self, await self.proxy.open())

    async def update(self) -> None:
        """New weights, as the trainer brings them; calls under way are cut and go on."""
        version = max(self.weights) + 1
        path = publish_other(self.fam.weights_dir, self.folder / "weights", version)
        self.weights[version] = path
        await self.proxy.client.pause(ttl=60)
        if self.engine.model is not None:
            self.engine.model.load(path)
        self.engine.weight_version = str(version)
        await self.proxy.client.publish_version(version=version, path=str(path), step=version)
        await self.proxy.client.resume()


@asynccontextmanager
async def lab_of(
    fam: Family, folder: Path, *settings: str, true: bool = True, context: int = CONTEXT
) -> AsyncIterator[Lab]:
    """``true``: the engine's log-probabilities are a model's, not a formula's."""
    engine = ScriptedEngine(
        decode=fam.chat.decode,
        incremental=True,
        context_length=context,
        model=TrueModel(fam.weights_dir) if true else None,
        resumes=True,
    )
    config = config_for(
        folder,
        f"sampling.temperature={TEMPERATURE}",
        f"sampling.max_new_tokens={context}",
        "sessions.group_size=1",
        *settings,
    )
    async with engine.serve() as url, running_proxy(config, fam.chat, engine_url=url) as proxy:
        await proxy.admit(1000)
        yield Lab(fam, engine, proxy, folder, {0: fam.weights_dir})


@dataclass
class Talk:
    """One session's agent; it keeps what it was answered."""

    lab: Lab
    session: dict[str, Any]
    delivered: dict[str, Given] = field(default_factory=dict)
    """The message by interaction, as the client put it together."""
    asked: dict[str, Asked] = field(default_factory=dict)
    """The request by interaction."""

    @property
    def key(self) -> str:
        return str(self.session["api_key"])

    @property
    def id(self) -> str:
        return str(self.session["session_id"])

    async def ask(
        self,
        messages: Sequence[Message],
        *outputs: list[int],
        stream: bool,
        retry: int | None = None,
        api: Api = CHAT,
        previous: bool = False,
        **fields: Any,
    ) -> list[Given]:
        """One call whose choices the engine speaks so; the choices' messages."""
        for output in outputs:
            self.lab.engine.say(output)
        known = {"tools", "max_tokens", "stop"}
        asked = Asked(
            # Callers go on with their list.
            list(messages),
            stream=stream,
            previous=previous,
            fields={k: v for k, v in fields.items() if k not in known},
            **{k: v for k, v in fields.items() if k in known},
        )
        headers = {"authorization": f"Bearer {self.key}"}
        if retry is not None:
            headers["x-stainless-retry-count"] = str(retry)
        request = self.lab.proxy.http.stream(
            "POST", api.path, content=orjson.dumps(api.body(asked)), headers=headers
        )
        async with request as response:
            data = await response.aread()
            assert response.status_code == 200, data
        choices = api.streamed(data) if stream else api.whole(data)
        assert len(choices) == (fields.get("n") or 1)
        for given in choices:
            self.delivered[given.interaction] = given
            self.asked[given.interaction] = asked
        return choices

    async def leave(
        self,
        messages: Sequence[Message],
        output: list[int],
        *,
        stream: bool,
        retry: int | None,
        api: Api = CHAT,
    ) -> None:
        """Ask, and hang up when the engine has sampled some tokens and waits."""
        engine = self.lab.engine
        before = len(engine.requests)
        asked = asyncio.create_task(self.ask(messages, output, stream=stream, retry=retry, api=api))
        await until(lambda: len(engine.requests) > before)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async def end(self, reward: float = 1.0) -> None:
        done = await self.lab.proxy.post("/rl/v1/finalize", {"final_reward": reward}, self.key)
        assert done.status_code == 200, done.text
