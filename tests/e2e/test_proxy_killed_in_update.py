"""kill -9 of the proxy in the middle of weight updates: no token is the less exact."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx

from any_agent.client.rl_client import RLClient
from any_agent.config import Config
from any_agent.rundir.layout import RunDir
from any_agent.runtime.ports import reserve
from tests.support.e2e.live_run import live_config, recompute, recorded
from tests.support.engine.process import EngineProcess
from tests.support.other_weights import publish_other
from tests.support.proxy import until
from tests.support.real_parts import proxy_process, write_config

AGENTS = 6


class Rank:
    """A real engine, a real proxy that dies, and agents who do not mind."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path, config: Config) -> None:
        self.engine = stack.enter_context(EngineProcess(folder))
        self.engine.start(model)
        self._stack = stack
        self._config = write_config(folder, model, **_sections(config))
        self._port = stack.enter_context(reserve("127.0.0.1", 0)).getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._proxy: subprocess.Popen[bytes] | None = None
        self.answered = 0
        self.start_proxy()

    def start_proxy(self) -> None:
        started = proxy_process(self._config, self.engine.url, self._port)
        self._proxy, _ = self._stack.enter_context(started)

    async def kill_proxy(self) -> None:
        assert self._proxy is not None
        self._proxy.kill()
        await asyncio.to_thread(self._proxy.wait)

    async def back(self) -> None:
        """Start the proxy again, and let agents come to it."""
        await asyncio.to_thread(self.start_proxy)
        await self.calls()

    async def calls(self) -> None:
        """Until so many calls are answered that most of them began after now."""
        enough = self.answered + 2 * AGENTS
        await until(lambda: self.answered >= enough, "calls")

    async def load(self, path: Path, version: int) -> None:
        """What the trainer asks of the engine, whoever of the others lives."""
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": True}
        async with httpx.AsyncClient(timeout=120) as http:
            response = await http.post(f"{self.engine.url}/update_weights_from_disk", json=body)
        assert response.json()["success"], response.text

    async def agent(self, number: int) -> None:
        """Calls without end, long ones, over sessions that outlive the proxy."""
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            opened = await http.post("/rl/v1/start_session", json={"mode": "eval"})
            headers = {"Authorization": f"Bearer {opened.json()['api_key']}"}
            talk = [{"role": "user", "content": f"count from {number}"}]
            while True:
                body = {"messages": talk, "max_tokens": 150, "stream": number % 2 == 0}
                try:
                    answer = await http.post("/v1/chat/completions", json=body, headers=headers)
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
                    continue
                assert answer.status_code == 200, answer.text
                self.answered += 1


def _sections(config: Config) -> dict[str, object]:
    names = ("experiment", "trial", "user")
    return {"root": str(config.root)} | {name: getattr(config, name) for name in names}


async def updates(rank: Rank, weights: dict[int, Path]) -> None:
    """Three updates, in each of which the proxy dies; the trainer goes on with each."""
    async with RLClient(rank.url, retry_for=120) as trainer:

        async def publish(version: int) -> None:
            path = str(weights[version])
            await trainer.publish_version(version=version, path=path, step=version)
            await trainer.resume()
            await rank.calls()
            assert (await trainer.run_info()).version == version

        # Before the load: the new proxy resumes the engine, whose calls then meet the load.
        await trainer.pause(ttl=600)
        await rank.kill_proxy()
        await rank.back()
        await rank.load(weights[1], 1)
        await publish(1)
        # In the load.
        await trainer.pause(ttl=600)
        await asyncio.gather(rank.load(weights[2], 2), rank.kill_proxy())
        await rank.back()
        await publish(2)
        # After the load: the new proxy is told of what its calls are sampled with already.
        await trainer.pause(ttl=600)
        await rank.load(weights[3], 3)
        await rank.kill_proxy()
        await rank.back()
        await publish(3)


async def scenario(rank: Rank, weights: dict[int, Path]) -> None:
    agents = [asyncio.create_task(rank.agent(k)) for k in range(AGENTS)]
    try:
        await rank.calls()
        await updates(rank, weights)
        assert not any(agent.done() for agent in agents)
    finally:
        for agent in agents:
            agent.cancel()
        await asyncio.gather(*agents, return_exceptions=True)


def test_every_logprob_is_right_although_a_proxy_is_killed_in_updates(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = live_config(tmp_path / "runs", tiny_model_dir, **{"server.ranks": 1})
    run = RunDir.of(config.root, config.user, config.experiment, config.trial)
    run.create()
    weights = {v: publish_other(tiny_model_dir, run.weights, v) for v in range(1, 4)}
    with ExitStack() as stack:
        rank = Rank(stack, tmp_path, tiny_model_dir, config)
        asyncio.run(scenario(rank, weights))
    checks = recompute(config, recorded(config))
    versions = {int(v) for c in checks for v in c.interaction.output_versions}
    worst = max(c.error for c in checks)
    print(f"{len(checks)} interactions, versions {sorted(versions)}, worst error {worst:.1e}")
    assert versions == {0, 1, 2, 3}
    assert worst < 1e-4
