"""The proposal: agents of phases 1 and 2, inference of phase 3, the server's excerpts."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml

from any_agent import RemoteSGLangEngine, load_hf_tokenizer
from tests.documents import text
from tests.documents.running import running
from tests.documents.service import (
    EXPERIMENT,
    PYTHON,
    Service,
    run_command,
    run_script,
)
from tests.slurm.jobs import ADMIN
from tests.slurm.jobs import settings as cluster_settings
from tests.slurm.lab import Slurm, slurm

URL = "http://192.168.1.100:8080"
CLOUD = "https://api.areal.ai"
DATASET = "dataset = ['What is 1 + 2?', 'What is 3 + 1?']\n"
GIVEN = "the URL; dataset, which the text leaves to the reader"


def agents_are_recorded(service: Service, code: str, folder: Path, count: int) -> None:
    """Run a script whose agents reward a call by 0.5, and finalize with 1.0; look at the record."""

    def known() -> set[str]:
        return {line["session_id"] for line in service.sessions(limit=500)}

    before = known()
    run_script(PYTHON, code, folder)
    new = known() - before
    assert len(new) == count
    for session in map(service.session, new):
        assert session["state"] in ("finalized", "leased", "trained", "rejected"), session
        assert session["final_reward"] == 1.0
        assert session["interactions"] == 1
        assert list(session["rewards"].values()) == [0.5], session


@pytest.mark.block(4, 50, 95, changes=GIVEN)
def test_an_agent_inside_of_a_session(code: str, service: Service, tmp_path: Path) -> None:
    code = DATASET + code.replace(URL, service.url)
    agents_are_recorded(service, code, tmp_path, 10)


def with_agent(code: str) -> str:
    """The code behind MyAgent of the first block."""
    agent, _, _ = text.renamed(text.cut(4, 50, 95)).partition("from any_agent import AgentSession")
    return DATASET + agent + code


@pytest.mark.block(4, 103, 114, changes=f"{GIVEN}; MyAgent of the block before")
def test_an_agent_on_a_dataset(code: str, service: Service, tmp_path: Path) -> None:
    agents_are_recorded(service, with_agent(code.replace(URL, service.url)), tmp_path, 5 * 2 * 8)


@pytest.mark.block(4, 123, 135, changes=f"{GIVEN} and key; MyAgent of the block before")
def test_the_proposals_runner_with_a_users_key_is_recorded(
    code: str, service: Service, tmp_path: Path
) -> None:
    agents_are_recorded(service, with_agent(code.replace(CLOUD, service.url)), tmp_path, 5 * 2 * 8)


@pytest.mark.block(4, 148, 157)
async def test_inference_by_experiment_and_trial(
    code: str, service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline = time.monotonic() + 600
    while not (service.run / "checkpoints" / "latest").exists():
        assert time.monotonic() < deadline, "the service trains, so there is a checkpoint soon"
        await asyncio.sleep(0.5)
    monkeypatch.chdir(service.folder)
    found = await running(code, {})
    try:
        assert found["engine"].version >= 1
        assert capsys.readouterr().out == f"{found['response'].text}\n"
    finally:
        found["engine"].close()


@pytest.mark.block(
    4, 178, 277, changes="rollout_engine, generate_completion_id, generate_session_id"
)
async def test_step_1_as_it_is_written(code: str, service: Service) -> None:
    """The excerpt runs on LiteLLM's app; its functions are called as FastAPI would."""
    rollout = RemoteSGLangEngine()
    rollout.initialize(url=service.engines[0], key=service.engine_key, tokenizer=str(service.model))
    numbers = iter(range(100))
    try:
        found = await running(
            code,
            {
                "rollout_engine": rollout,
                "generate_completion_id": lambda: f"completion-{next(numbers)}",
                "generate_session_id": lambda: f"session-{next(numbers)}",
            },
        )
        app = found["app"]
        (session_id,) = (await found["start_session"]()).values()
        request = {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "max_tokens": 16}
        answer = await found["chat_completions"](request, session_id)
        assert answer["choices"][0]["message"]["content"].strip()
        completion = app.session_cache[session_id][answer["id"]]
        tokenizer = load_hf_tokenizer(str(service.model))
        said = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert said.strip() == completion.text.strip()
        assert len(completion.token_ids) == len(completion.logprobs) > 0
        success = {"status": "success"}
        assert await found["set_reward"](session_id, answer["id"], 0.5) == success
        assert completion.reward == 0.5
        assert await found["finalize"](session_id, 1.0) == success
    finally:
        rollout.close()


@pytest.mark.block(4, 178, 277, changes="the service's own routes, called by the same signatures")
def test_step_1_on_the_real_routes(service: Service) -> None:
    with httpx.Client(base_url=service.url, timeout=120) as client:
        session_id = (
            client.get("/rl/v1/start_session?wait=60").raise_for_status().json()["session_id"]
        )
        body = {"messages": [{"role": "user", "content": "What is 1 + 2?"}]}
        query = {"session_id": session_id}
        answer = client.post("/v1/chat/completions", params=query, json=body).json()
        rewarded = query | {"completion_id": answer["id"], "reward": 0.5}
        assert client.post("/rl/v1/set_reward", params=rewarded).json()["status"] == "success"
        ending = query | {"final_reward": 1.0}
        assert client.post("/rl/v1/finalize", params=ending).json()["status"] == "success"
    session = service.session(session_id)
    assert (session["final_reward"], session["rewards"]) == (1.0, {answer["id"]: 0.5})


@pytest.mark.block(4, 292, 389, changes="app of step 1")
async def test_step_2_as_it_is_written(code: str, service: Service) -> None:
    engine = object()
    app = SimpleNamespace(engine=engine, session_cache={"one": {"c": "completion"}})
    found = await running(code, {})
    workflow = found["ProxyWorkflow"](app)
    episode = asyncio.ensure_future(workflow.arun_episode(engine, None))
    await asyncio.sleep(0)
    assert not episode.done()
    app.session_cache["one"] |= {"_final_reward": 1.0, "_completed": True}
    assert await episode == {"completions": ["completion"], "final_reward": 1.0}


@pytest.mark.block(4, 404, 463, changes="a port; started in a thread")
async def test_step_3_as_it_is_written(code: str, service: Service) -> None:
    """The excerpt's router before the real service. (Ours is tested in tests/router.)"""
    from aiohttp import ClientSession, web

    found = await running(code, {})
    router = found["ProxyRouter"]([service.url])
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", router.route_request)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        async with ClientSession(f"http://127.0.0.1:{port}") as client:
            answer = await client.get("/rl/v1/run")
            assert (await answer.json())["experiment"] == EXPERIMENT
    finally:
        await runner.cleanup()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    with slurm(tmp_path / "slurm") as made:
        yield made


@pytest.mark.block(4, 34, 34, changes="my-config.yaml made for two pretended nodes")
@pytest.mark.block(4, 40, 40)
def test_the_launchers_line(cluster: Slurm, taught_model: Path, tmp_path: Path) -> None:
    """The command as it stands, in a folder with `my-config.yaml`, on a real Slurm."""
    own = cluster_settings(tmp_path / "run", taught_model, steps=1)
    config = yaml.safe_load(own.read_text())
    (tmp_path / "my-config.yaml").write_text(yaml.safe_dump(config))
    command = text.renamed(text.cut(4, 34, 34)).strip().replace("python3", PYTHON)
    variables = cluster.variables | {"ANY_AGENT_SERVER__ADMIN_KEY": ADMIN}
    said = run_command(command.split(), tmp_path, **variables)
    form = text.cut(4, 40, 40).strip()
    shape = re.compile(
        r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] INFO: .*any-agent server listening at (\S+)$"
    )
    assert shape.match(form)
    assert any(shape.match(line) for line in said.splitlines()), said
