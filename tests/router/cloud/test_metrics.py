"""`/metrics` of a cloud: what became of its runs and of the requests that waited for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from any_agent.runtime.metrics import CONTENT_TYPE
from router.cloud.metrics import METRICS
from tests.router.cloud.conftest import ADMIN, Client, Opening
from tests.support.waiting import until

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scraped(cloud: Client) -> Samples:
    answer = await cloud.ask("GET", "/metrics", ADMIN)
    assert (answer.status_code, answer.headers["content-type"]) == (200, CONTENT_TYPE)
    return {
        (sample.name.removeprefix("any_agent_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, labels: Mapping[str, str] | None = None) -> float:
    return samples[name, frozenset((labels or {}).items())]


async def test_runs_places_queue_and_requests_are_shown_as_they_are(opening: Opening) -> None:
    async with opening(places=1, hold=60.0, quiet_after=1000.0) as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        await cloud.run(alice, "never-asked")
        stopped = await cloud.run(alice, "stopped")
        await cloud.ask("POST", f"/rl/v1/runs/{stopped['id']}/stop", alice)
        running = await cloud.run(alice, "running")
        assert (await cloud.ask("GET", "/rl/v1/run", alice)).is_success
        waiting = [asyncio.create_task(cloud.ask("GET", "/rl/v1/run", bob)) for _ in range(3)]

        async def held() -> bool:
            samples = await scraped(cloud)
            return value(samples, "cloud_requests_held") == 3 and bool(
                value(samples, "cloud_queued")
            )

        await until(held, "bob's requests")
        samples = await scraped(cloud)
        by_state = {"idle": 1, "stopped": 1, "running": 1, "queued": 1}
        for state in ("idle", "queued", "running", "starting", "stopped", "failed", "deleting"):
            shown = value(samples, "cloud_runs", {"state": state})
            assert shown == by_state.get(state, 0), state
        assert value(samples, "cloud_places") == value(samples, "cloud_places_taken") == 1
        assert value(samples, "cloud_starts_total") == 1
        await cloud.ask("POST", f"/rl/v1/runs/{running['id']}/stop", alice)
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
        samples = await scraped(cloud)
        assert value(samples, "cloud_starts_total") == 2
        assert value(samples, "cloud_ends_total", {"reason": "stopped"}) == 1
        assert value(samples, "cloud_wait_seconds_count", {"outcome": "answered"}) == 4
        assert value(samples, "cloud_requests_held") == 0


async def test_refusals_and_ends_are_counted_by_code_and_reason(opening: Opening) -> None:
    async with opening(places=1, hold=0.05, quiet_after=0.2) as cloud:
        alice, bob = await cloud.account("alice"), await cloud.account("bob")
        run = await cloud.run(alice)
        (cloud.folder(run)).mkdir(parents=True, mode=0o700)
        (cloud.folder(run) / "fails").touch()
        refused = await cloud.ask("GET", "/rl/v1/run", alice)
        code = refused.json()["error"]["code"]
        assert code in ("run_queued", "run_starting"), "by how far it has come meanwhile"

        async def counted(reason: str) -> bool:
            samples = await scraped(cloud)
            key = ("cloud_ends_total", frozenset({("reason", reason)}))
            return samples.get(key, 0) >= 1

        await until(lambda: counted("failed"), "the failure")
        await cloud.ask("DELETE", f"/rl/v1/runs/{run['id']}", alice)
        await until(lambda: _answers(cloud, bob), "bob's run")
        await cloud.ask("GET", "/rl/v1/run", alice)
        await until(lambda: counted("quiet"), "the end of bob's")
        assert (await cloud.ask("GET", "/rl/v1/run", "sk-wrong")).status_code == 401
        samples = await scraped(cloud)
        assert value(samples, "router_refusals_total", {"code": code}) >= 1
        assert value(samples, "router_refusals_total", {"code": "invalid_api_key"}) == 1
        assert value(samples, "cloud_wait_seconds_count", {"outcome": "refused"}) >= 1


async def _answers(cloud: Client, key: str) -> bool:
    return (await cloud.ask("GET", "/rl/v1/run", key)).is_success


async def test_every_metric_of_the_table_is_shown_to_the_operator_alone(opening: Opening) -> None:
    async with opening() as cloud:
        alice = await cloud.account("alice")
        assert (await cloud.ask("GET", "/metrics", alice)).status_code == 403
        assert (await cloud.ask("GET", "/metrics")).status_code == 401
        names = {name for name, _ in await scraped(cloud)}
        shown = (await cloud.ask("GET", "/metrics", ADMIN)).text
        assert all(f"# TYPE {metric.name}" in shown for metric in METRICS)
        assert "router_requests_total" in names
        assert "alice" not in shown
