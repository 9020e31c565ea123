"""The routes that the documents name, in the order and with the bodies that they show."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import numpy as np
import pytest

from any_agent import InteractionWithTokenLogpReward
from any_agent.workflow.proxy_client import exported_interactions
from tests.documents import text
from tests.documents.service import Service

_POST = re.compile(r"^\s*POST (\S+)", re.M)
_BODY = re.compile(r"^\s*Body: (\{.*?\})", re.M)
ASK = {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "model": "default"}
CALLS: dict[str, dict[str, Any]] = {
    "/chat/completions": ASK,
    "/responses": {"input": "What is 1 + 2?", "model": "default"},
    "/messages": ASK | {"max_tokens": 16},
}


class Episode:
    """One session under the documents' routes: each path and body is sent as it is written."""

    def __init__(self, service: Service) -> None:
        self.client = httpx.Client(base_url=service.url, timeout=120)
        self.session_id = ""
        self.interaction_id = ""

    def post(self, path: str, body: str | None = None) -> Any:
        """Send one request; ``{session_id}`` and "..." stand for what is known by then."""
        path = path.replace("{session_id}", self.session_id)
        call = next((given for end, given in CALLS.items() if path.endswith(end)), None)
        sent: dict[str, Any] | None = call
        if body is not None:
            sent = json.loads(body)
            for name, value in (sent or {}).items():
                if value == "...":
                    assert sent is not None
                    sent[name] = getattr(self, name)
        answer = self.client.post(path, json=sent) if sent else self.client.post(path)
        assert answer.status_code == 200, (path, sent, answer.text)
        found = answer.json()
        if path == "/rl/start_session":
            self.session_id = found["session_id"]
        if call is not None:
            self.interaction_id = found["id"]
        return found


def run_all(code: str, episode: Episode) -> dict[str, Any]:
    """Every request of the code, in its order; the last answer by path."""
    answers = {}
    for part in re.split(r"(?=^\s*POST )", code, flags=re.M):
        posted = _POST.search(part)
        if posted is None:
            continue
        for body in _BODY.findall(part) or [None]:
            answers[posted[1]] = episode.post(posted[1], body)
    return answers


@pytest.mark.block(0, 378, 402)
def test_the_documented_lifecycle_of_a_session_exports_its_reward(
    code: str, service: Service
) -> None:
    episode = Episode(service)
    export = "POST /export_trajectories\n"
    code = code.replace(export, f'{export}Body: {{"session_id": "..."}}\n')
    answers = run_all(code, episode)
    assert re.fullmatch(r"task-\d-\d+", episode.session_id), episode.session_id
    assert answers["/{session_id}/rl/end_session"]["interaction_count"] == 1
    (exported,) = exported_interactions(answers["/export_trajectories"]).values()
    assert isinstance(exported, InteractionWithTokenLogpReward)
    assert exported.reward == 0.5, "the second body names the same, last completion"
    response = exported.model_response
    assert response is not None
    assert exported.completion is not None
    assert exported.messages == ASK["messages"]
    row = exported.row
    assert row["input_ids"].tolist() == response.input_tokens + response.output_tokens
    assert np.flatnonzero(row["loss_mask"]).size == response.output_len


@pytest.mark.block(0, 342, 370)
def test_every_endpoint_of_the_table(code: str, service: Service) -> None:
    episode = Episode(service)
    bodies = {
        "/{session_id}/rl/set_reward": '{"reward": 1.0}',
        "/export_trajectories": '{"session_id": "...", "discount": 0.9, "style": "individual"}',
    }
    for path in _POST.findall(code):
        answer = episode.post(path, bodies.get(path))
    assert len(answer["interactions"]) == 3


@pytest.mark.block(1, 455, 456)
@pytest.mark.block(1, 467, 472)
@pytest.mark.block(1, 484, 486)
@pytest.mark.block(1, 497, 501)
def test_the_guides_request_flow(service: Service) -> None:
    code = "".join(
        text.cut(1, *lines) for lines in ((455, 456), (467, 472), (484, 486), (497, 501))
    )
    answers = run_all(code, Episode(service))
    (interaction,) = answers["/export_trajectories"]["interactions"].values()
    assert interaction["reward"] == 0.5


@pytest.mark.block(0, 483, 484)
@pytest.mark.block(0, 466, 472)
@pytest.mark.block(1, 533, 533)
@pytest.mark.block(1, 519, 521)
@pytest.mark.block(0, 414, 416)
@pytest.mark.block(0, 611, 613)
@pytest.mark.block(1, 545, 547)
def test_rewards_run_back_along_three_turns(service: Service) -> None:
    """A, B and C of the text: each turn's messages begin with all of the one before."""
    shown = [
        float(x)
        for x in re.findall(r"= (?:[\d.]+ \+ .* = )?([\d.]+)$", text.cut(0, 466, 472), re.M)
    ]
    assert shown == [1.0, 0.9, 0.81]
    episode = Episode(service)
    episode.post("/grant_capacity")
    episode.post("/rl/start_session")
    messages = list(ASK["messages"])
    for _ in range(3):
        path = f"/{episode.session_id}/v1/chat/completions"
        answer = episode.client.post(path, json={"messages": messages, "model": "default"}).json()
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
    episode.post("/{session_id}/rl/set_reward", '{"reward": 1.0}')
    episode.post("/{session_id}/rl/end_session")
    body = text.cut(0, 483, 484).partition("Body: ")[2]
    turns = list(exported_interactions(episode.post("/export_trajectories", body)).values())
    assert [turn.reward for turn in turns] == pytest.approx(shown[::-1])
    assert [len(turn.messages) for turn in turns] == [1, 3, 5]
    assert [turn.parent for turn in turns] == [None, turns[0], turns[1]]
    one = [float(turn.to_tensor_dict()["rewards"][0]) for turn in turns]
    assert one == pytest.approx(shown[::-1]), "three tuples, each with its own reward"
