"""kill -9 of the engine under calls: they end as if nothing had been, and every number is exact."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from any_agent.engine import SGLangEngine
from any_agent.engine.embedded.model_loader import LoadedModel, load_model
from any_agent.engine.embedded.stops import StopMatcher
from any_agent.types import GenerationChunk, ModelRequest
from tests.support.engine.embedded import fresh_logprobs, prompt, request, worst
from tests.support.engine.process import EngineProcess
from tests.support.engine.sglang import joined
from tests.support.other_weights import publish_other
from tests.support.waiting import until

pytestmark = pytest.mark.service

BUDGET = 500
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def published(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1: other weights, as a trainer publishes them."""
    return publish_other(tiny_model_dir, tmp_path_factory.mktemp("weights"), 1)


def test_an_engine_serves_what_a_trainer_published(
    published: Path, tiny_model_dir: Path, loaded: LoadedModel
) -> None:
    """All that it knows besides the weights is that of the model that training began with."""
    again = load_model(str(published))
    assert again.eos_ids == loaded.eos_ids
    for name in ("dtype", "vocab_size", "context_length", "cache_layers"):
        assert getattr(again, name) == getattr(loaded, name)
    ids = list(range(loaded.vocab_size))
    for skip in (False, True):
        decode, expected = (m.decoder(skip_special_tokens=skip) for m in (again, loaded))
        assert decode(ids) == expected(ids)


class Call:
    """A call and what of it has come."""

    def __init__(self, request: ModelRequest, *, stream: bool) -> None:
        self.request = request
        self.stream = stream
        self.chunks: list[GenerationChunk] = []

    async def run(self, client: SGLangEngine) -> None:
        async for chunk in client.generate(self.request, stream=self.stream):
            self.chunks.append(chunk)

    @property
    def length(self) -> int:
        return sum(len(chunk.output_ids) for chunk in self.chunks)

    def has(self, length: int) -> bool:
        """So many tokens, or all that it will have."""
        return self.length >= length or (bool(self.chunks) and bool(self.chunks[-1].stop_reason))

    def check(self, models: list[LoadedModel]) -> float:
        """Its end is the right one; the largest error of its log-probabilities."""
        ids, logprobs, versions = joined(self.chunks)
        last = self.chunks[-1]
        assert [c.stop_reason for c in self.chunks if c.stop_reason] == [last.stop_reason]
        matcher = StopMatcher(
            self.request.gconfig.stop or ("\0never\0",),
            models[0].decoder(skip_special_tokens=False),
        )
        matches = [k for k, token in enumerate(ids) if matcher.push(token)]
        if last.stop_reason == "stop":
            assert matches == [len(ids) - 1], "it went on after a stop string"
        else:
            assert (last.stop_reason, len(ids), matches) == ("length", BUDGET, [])
        errors = []
        for version, model in enumerate(models):
            fresh = fresh_logprobs(model.model, self.request.input_ids, ids, TEMPERATURE)
            errors += [
                worst([logprobs[k]], fresh[k]) for k in range(len(ids)) if versions[k] == version
            ]
        assert len(errors) == len(ids)
        return max(errors)


def calls(stops: tuple[str, ...]) -> Iterator[Call]:
    for k in range(16):
        rid, ids = f"call-{k}", prompt(5 + 2 * k, k)
        sampling: dict[str, Any] = {"max_new_tokens": BUDGET, "temperature": TEMPERATURE}
        if k % 4 == 0:
            sampling["stop"] = stops
        if k % 3 == 0:
            sampling["seed"] = k
        yield Call(request(rid, ids, **sampling), stream=k % 2 == 0)


async def under_kills(
    process: EngineProcess, client: SGLangEngine, works: list[Call], lives: list[tuple[Path, str]]
) -> None:
    """Run the calls; before each further life of the engine, it dies."""
    streams = [call for call in works if call.stream]
    async with asyncio.timeout(200), asyncio.TaskGroup() as group:
        for call in works:
            group.create_task(call.run(client))
        for model, version in lives:
            goals = [call.length + 10 for call in streams]
            await until(lambda goals=goals: all(map(Call.has, streams, goals)))
            process.kill()
            await until(lambda: client.away)
            await asyncio.to_thread(process.start, model, "--weight-version", version)


def test_calls_survive_two_kills(
    tmp_path: Path, tiny_model_dir: Path, published: Path, loaded: LoadedModel
) -> None:
    """First it comes back with the same weights, then with newer ones."""

    async def run(process: EngineProcess) -> tuple[list[Call], int]:
        client = SGLangEngine(process.url, decode=loaded.decoder(skip_special_tokens=False))
        works = list(calls(stops=("Q", "Z", "er ", "\n")))
        try:
            lives = [(tiny_model_dir, "0"), (published, "1")]
            await under_kills(process, client, works, lives)
            return works, client.version
        finally:
            await client.close()

    with EngineProcess(tmp_path) as process:
        process.start(tiny_model_dir)
        works, version = asyncio.run(run(process))
    assert version == 1
    models = [loaded, load_model(str(published))]
    error = max(call.check(models) for call in works)
    cut = [c for c in works if len(set(joined(c.chunks)[2])) == 2]
    stopped = [c for c in works if c.chunks[-1].stop_reason == "stop"]
    print(
        f"{len(works)} calls, {len(cut)} with tokens of both versions, {len(stopped)} ended by a "
        f"stop string, worst error {error:.1e}"
    )
    assert error < 1e-4
    assert stopped
    assert len(cut) >= 4
