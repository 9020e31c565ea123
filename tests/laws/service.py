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
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.true_logprobs import TrueModel
from tests.families import Family
from tests.other_weights import publish_other
from tests.proxy_ext.proxy_lab import Proxy, config_for, running_proxy, until

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
        await proxy.admit(100)
        yield Lab(fam, engine, proxy, folder, {0: fam.weights_dir})


@dataclass
class Talk:
    """One session's agent; it keeps what it was answered."""

    lab: Lab
    session: dict[str, Any]
    delivered: dict[str, Message] = field(default_factory=dict)
    """The message by interaction, as the client put it together."""
    finishes: dict[str, str] = field(default_factory=dict)
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The request's body by interaction."""

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
        **fields: Any,
    ) -> list[Message]:
        """One call whose choices the engine speaks so; the choices' messages."""
        for output in outputs:
            self.lab.engine.say(output)
        body = {"model": "m", "messages": list(messages), "stream": stream, **fields}
        headers = {"authorization": f"Bearer {self.key}"}
        if retry is not None:
            headers["x-stainless-retry-count"] = str(retry)
        request = self.lab.proxy.http.stream(
            "POST", "/v1/chat/completions", content=orjson.dumps(body), headers=headers
        )
        async with request as response:
            data = await response.aread()
            assert response.status_code == 200, data
        choices = _streamed(data) if stream else _whole(data)
        count = fields.get("n") or 1
        assert sorted(choices) == list(range(count))
        for index, (id, finish, message) in choices.items():
            name = id if count == 1 else f"{id}.{index}"
            self.delivered[name] = message
            self.finishes[name] = finish
            self.asked[name] = body
        return [choices[index][2] for index in range(count)]

    async def leave(
        self, messages: Sequence[Message], output: list[int], *, stream: bool, retry: int | None
    ) -> None:
        """Ask, and hang up when the engine has sampled some tokens and waits."""
        engine = self.lab.engine
        before = len(engine.requests)
        asked = asyncio.create_task(self.ask(messages, output, stream=stream, retry=retry))
        await until(lambda: len(engine.requests) > before)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async def end(self, reward: float = 1.0) -> None:
        done = await self.lab.proxy.post("/rl/v1/finalize", {"final_reward": reward}, self.key)
        assert done.status_code == 200, done.text


Choices = dict[int, tuple[str, str, Message]]
"""By index: completion id, finish reason, message."""


def _whole(data: bytes) -> Choices:
    body = orjson.loads(data)
    return {c["index"]: (body["id"], c["finish_reason"], c["message"]) for c in body["choices"]}


def _streamed(data: bytes) -> Choices:
    lines = [line.removeprefix(b"data: ") for line in data.splitlines() if line]
    assert lines[-1] == b"[DONE]", lines[-1]
    out: dict[int, tuple[str, str, Message]] = {}
    for event in map(orjson.loads, lines[:-1]):
        for choice in event["choices"]:
            index = choice["index"]
            id, finish, message = out.get(index, (event["id"], "", {"role": "assistant"}))
            assert id == event["id"] and not finish, "nothing follows a choice's end"
            _add(message, choice["delta"])
            out[index] = (id, choice.get("finish_reason") or "", message)
    return out


def _add(message: Message, delta: dict[str, Any]) -> None:
    for key in ("content", "reasoning_content"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    for part in delta.get("tool_calls") or []:
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append(
                {"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}}
            )
        function = calls[part["index"]]["function"]
        for key in ("name", "arguments"):
            function[key] += (part.get("function") or {}).get(key) or ""
