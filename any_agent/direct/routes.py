"""The routes of a direct client."""

from __future__ import annotations

from typing import Any

import orjson

from any_agent.completions.apis import OPENAI_ERRORS, Api, all_apis
from any_agent.completions.parsed_request import token_logprobs
from any_agent.completions.responses.stored_response import (
    answer_of,
    deleted_record,
    response_again,
)
from any_agent.direct.record import DirectSession
from any_agent.errors import NotFound, UnsupportedParameter


def model_calls() -> dict[str, Api]:
    """Return the APIs that OpenAI's client can call, by path: it reads errors in its own form."""
    return {a.path: a for a in all_apis() if a.by_policy and a.errors is OPENAI_ERRORS}


def answer_request(session: DirectSession, method: str, path: str, query: str) -> bytes:
    """Return the answer to a request that is no model call; NotFound without a route."""
    _, kind, *rest = f"{path}/".split("/")
    if method == "GET" and kind == "models" and len(rest) <= 2:
        return orjson.dumps(_models(session.model, rest[0]))
    if method == "DELETE" and kind == "responses" and len(rest) == 2:
        interaction = answer_of(rest[0], session.tree)
        interaction.request = deleted_record(interaction)
        return orjson.dumps({"id": interaction.id, "object": "response", "deleted": True})
    if method == "GET" and kind == "responses" and len(rest) == 2:
        if "stream=true" in query:
            raise UnsupportedParameter(
                "a stored answer is not streamed: leave stream out", param="stream"
            )
        interaction = answer_of(rest[0], session.tree)
        logprobs = token_logprobs(session.chat)
        return response_again(interaction, session.tree, logprobs, session.chat)
    raise NotFound(
        f"there is no route {method} {path[:80]}: an engine in this process has "
        f"{', '.join(sorted(model_calls()))} and /models"
    )


def _models(own: str, name: str) -> dict[str, Any]:
    model = {"id": own, "object": "model", "created": 0, "owned_by": "any-agent"}
    if not name:
        return {"object": "list", "data": [model]}
    if name != own:
        raise NotFound(
            f"there is no model {name[:80]!a}; the policy is called {own!a}",
            code="model_not_found",
            param="model",
        )
    return model
