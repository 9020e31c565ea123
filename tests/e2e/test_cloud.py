"""Two accounts, each with a key and nothing else, train their own models on one place by turns."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from any_agent.config.load import load_config
from any_agent.record import InteractionTree
from any_agent.rundir.layout import RunDir
from any_agent.runtime.ports import free_port
from tests.support.e2e import audit
from tests.support.e2e.live_run import read_records, steps_of
from tests.support.taught_models import copy_model
from tests.support.waiting import until

ADMIN = "the-operators-key-of-this-test"
STEPS = 4
ACCOUNTS = ("alice", "bob")
PAGE = Path(__file__).parents[2] / "docs/tutorials/with-a-key.md"
"""It has the agent, as the documents' second phase has it; it prints the sessions."""
_SHORT = "1 / (1 + len(text))"
"""The page's reward of an answer."""


@contextmanager
def cloud(config: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environ = os.environ | {"ANY_AGENT_SERVER__ADMIN_KEY": ADMIN}
    with open(log, "ab") as out:
        command = [sys.executable, "-m", "any_agent.cli", "cloud", "--config", str(config)]
        process = subprocess.Popen(command, env=environ, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def write_config(path: Path, model: Path, port: int) -> None:
    settings = {
        "root": str(path.parent / "runs"),
        "server": {"port": port},
        "models": {"tiny": {"model": {"path": str(model)}, "server": {"ranks": 1}}},
        "presets": {
            "short": {
                "model.enable_thinking": False,
                "sampling.max_new_tokens": 16,
                "sessions.group_size": 4,
                "rollout": {"batch_size": 8, "max_concurrent": 16},
                "train": {"steps": STEPS, "lr": 1e-3, "checkpoint_every": 1, "keep_weights": 1000},
            }
        },
        "default": {"model": "tiny", "preset": "short"},
        "quiet_after": 2,
        "turn": 15,
        "hold": 40,
    }
    path.write_text(yaml.safe_dump(settings))


async def test_accounts_take_turns_on_one_place_and_a_killed_cloud_loses_nothing(
    tmp_path: Path, record_property: Any
) -> None:
    model, config, log = tmp_path / "model", tmp_path / "cloud.yaml", tmp_path / "log"
    copy_model(model)
    port = free_port("127.0.0.1")
    write_config(config, model, port)
    url = f"http://127.0.0.1:{port}"
    keys: dict[str, str] = {}

    async def ask(path: str, key: str) -> Any:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            return (await http.get(path, headers={"Authorization": f"Bearer {key}"})).json()

    async def steps(account: str) -> int:
        with_runs = await ask("/rl/v1/runs", keys[account])
        return int(sum(run["steps"] for run in with_runs["runs"]))

    with cloud(config, log) as first:
        await until(lambda: _up(url), "the cloud")
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            for name in ACCOUNTS:
                made = await http.post(
                    "/rl/v1/accounts",
                    headers={"Authorization": f"Bearer {ADMIN}"},
                    json={"name": name},
                )
                keys[name] = made.json()["api_key"]
        agents = {name: _agent(tmp_path, name, url, keys[name]) for name in ACCOUNTS}
        await until(lambda: steps("alice"), "a step of alice's", within=600)
        first.kill()
        first.wait()
    with cloud(config, log) as second:
        await until(lambda: _up(url), "the cloud again")
        for name, agent in agents.items():
            code = await asyncio.to_thread(agent.wait, 900)
            assert code in (0, 1), (tmp_path / f"{name}.err").read_text()
            said = (tmp_path / f"{name}.err").read_text()
            assert "training has ended in default/trial-1" in said, said
        done = {name: (await ask("/rl/v1/runs", keys[name]))["runs"] for name in ACCOUNTS}
        assert {name: runs[0]["steps"] for name, runs in done.items()} == dict.fromkeys(
            ACCOUNTS, STEPS
        )
        # It answers after training, too, at a URL of its own.
        path = "/runs/default/trial-1/rl/v1/start_session"
        opened = await _started(url, path, keys["alice"], {"mode": "eval"})
        assert opened.json()["mode"] == "eval"
        # A start publishes the weights again, as another version.
        assert opened.json()["version"] >= STEPS
        # Calls need no session then, and may name the run as their model.
        talk = [{"role": "user", "content": "count from 3"}]
        call = {"model": "bob/default/trial-1", "messages": talk}
        answered = await _started(url, "/v1/chat/completions", keys["bob"], call)
        assert answered.headers["x-any-agent-experiment"] == "default"
        await _use_up_a_budget(url, keys["bob"], call)
        billed = {each["account"]: each for each in (await ask("/rl/v1/usage", ADMIN))["accounts"]}
        assert second.poll() is None
    starts = log.read_text().count(" starts")
    for name in ACCOUNTS:
        lines = (tmp_path / f"{name}.out").read_text().splitlines()
        told = {id for id, state, _ in map(str.split, lines) if state == "finalized"}
        await asyncio.to_thread(_audit, tmp_path, name, told, record_property)
        last = [answered.json()] if name == "bob" else []
        await asyncio.to_thread(_require_bill, tmp_path, name, billed[name], last)
    record_property("figure", f"{starts} starts of 2 runs on one place, one kill of the cloud")
    assert starts > len(ACCOUNTS)


async def _use_up_a_budget(url: str, key: str, call: Any) -> None:
    """A used-up budget ends bob's calls and stops his run, and without it both go on."""
    path = "/rl/v1/accounts/bob/budget"
    operator, account = ({"Authorization": f"Bearer {one}"} for one in (ADMIN, key))
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        budget = {"steps": STEPS, "per": "total"}
        view = (await http.put(path, headers=operator, json=budget)).json()
        assert (view["used"], view["exhausted"]) == ({"steps": STEPS}, "steps")
        refused = await http.post("/v1/chat/completions", headers=account, json=call)
        assert refused.status_code == 402, refused.text
        assert refused.json()["error"]["code"] == "budget_exhausted"

        async def stopped() -> bool:
            runs = (await http.get("/rl/v1/runs", headers=account)).json()["runs"]
            return bool(runs[0]["state"] == "stopped" and "is used up" in runs[0]["reason"])

        await until(stopped, "the run's end")
        dropped = await http.delete(path, headers=operator)
        assert (dropped.status_code, dropped.json()) == (200, None)
    await _started(url, "/v1/models", key, None, "GET")


async def _started(
    url: str, path: str, key: str, body: Any, method: str = "POST"
) -> httpx.Response:
    """The answer of a run, once it is started."""
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        while True:
            answer = await http.request(method, path, headers=headers, json=body)
            if "x-any-agent-run-state" not in answer.headers:
                assert answer.status_code == 200, answer.text
                return answer


def _block() -> str:
    found = re.search(r"<!-- test: account -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    # The tiny model would satisfy the page's reward at once, and learn nothing from then on.
    assert _SHORT in found[1]
    return found[1].replace(_SHORT, "(sum(map(ord, text)) % 101) / 100")


def _agent(folder: Path, name: str, url: str, key: str) -> subprocess.Popen[bytes]:
    program = folder / f"{name}.py"
    program.write_text(_block())
    environ = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    with open(folder / f"{name}.out", "wb") as out, open(folder / f"{name}.err", "wb") as err:
        return subprocess.Popen([sys.executable, str(program)], env=environ, stdout=out, stderr=err)


def _audit(folder: Path, name: str, told: set[str], record_property: Any) -> None:
    """Everything that the agent was told is kept, nothing is trained on twice, and each
    log-probability is that of a fresh forward pass of its version."""
    run = RunDir.of(folder / "runs", name, "default", "trial-1")
    records = read_records(run, 1)
    assert told and told <= set(records), told - set(records)
    assert [line["step"] for line in steps_of(run)] == [*range(1, STEPS + 1)]
    settings = load_config(run.path / "config.yaml", environ={})
    checks = audit.sample_checks(settings, records, set(), 100, random.Random(0))
    worst = audit.worst_error(checks)
    record_property("figure", f"{name}: worst error {worst:.1e} of {len(checks)} interactions")
    assert checks
    assert worst < 1e-4


def _require_bill(
    folder: Path, name: str, bill: dict[str, Any], answers: list[dict[str, Any]]
) -> None:
    """Each number of the bill is that of the tokens on disk, over the kill of everything, and of
    the answers that belong to no session."""
    run = RunDir.of(folder / "runs", name, "default", "trial-1")
    records = read_records(run, 1).values()
    sampled = prompts = calls = 0
    for record in records:
        tree = InteractionTree.from_interactions(record.interactions)
        sampled += sum(len(one.output_ids) for one in record.interactions)
        prompts += sum(len(tree.prompt_ids(one.id)) for one in record.interactions)
        calls += len(record.interactions)
    known = {one.id for record in records for one in record.interactions}
    for answer in answers:
        if answer["id"] not in known:
            sampled += answer["usage"]["completion_tokens"]
            prompts += answer["usage"]["prompt_tokens"]
            calls += 1
    steps = steps_of(run)
    want = {
        "sampled_tokens": sampled,
        "prompt_tokens": prompts,
        "calls": calls,
        "sessions": len(records),
        "steps": STEPS,
        "trained_tokens": sum(line["tokens"] for line in steps),
    }
    assert {key: bill["total"][key] for key in want} == want
    assert bill["total"]["place_seconds"] > 0
    assert sum(day["calls"] for each in bill["runs"] for day in each["days"]) == calls


def _up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


pytestmark = pytest.mark.timeout(1200)
