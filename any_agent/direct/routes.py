"""What a direct client finds under which path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import orjson

from any_agent.completions import Completer
from any_agent.completions.parsed_request import (
    ParsedRequest,
    parse_chat_request,
    parse_text_request,
    token_logprobs,
)
from any_agent.completions.responses import (
    answer_of,
    deleted_record,
    parse_responses_request,
    response_again,
)
from any_agent.direct.record import DirectSession
from any_agent.errors import NotFound, UnsupportedParameter

Parse: TypeAlias = Callable[[Any, DirectSession, Completer], ParsedRequest]


def _chat(body: Any, session: DirectSession, completer: Completer) -> ParsedRequest:
    return parse_chat_request(body, session.rules, session.chat)


def _text(body: Any, session: DirectSession, completer: Completer) -> ParsedRequest:
    return parse_text_request(body, session.rules, session.chat)


def _responses(body: Any, session: DirectSession, completer: Completer) -> ParsedRequest:
    return parse_responses_request(
        body,
        session.rules,
        session.chat,
        session.tree,
        context_length=completer.context_length,
    )


CALLS: dict[str, Parse] = {
    "/chat/completions": _chat,
    "/completions": _text,
    "/responses": _responses,
}
"""Model calls."""


def told(session: DirectSession, method: str, path: str, query: str) -> bytes:
    """The answer to what is no model call; NotFound for what is not there."""
    _, kind, *rest = f"{path}/".split("/")
    if method == "GET" and kind == "models" and len(rest) <= 2:
        return orjson.dumps(_models(session.rules.model, rest[0]))
    if method == "DELETE" and kind == "responses" and len(rest) == 2:
        interaction = answer_of(rest[0], session.tree)
        interaction.request = deleted_record(interaction)
        return orjson.dumps({"id": interaction.id, "object": "response", "deleted": True})
    if method == "GET" and kind == "responses" and len(rest) == 2:
        if "stream=true" in query:
            raise UnsupportedParameter(
                "an answer is told again whole: leave stream out", param="stream"
            )
        interaction = answer_of(rest[0], session.tree)
        logprobs = token_logprobs(session.chat)
        return response_again(interaction, session.tree, logprobs, session.chat)
    raise NotFound(
        f"{method} {path[:80]} is not there: to an engine in this process there are "
        f"{', '.join(sorted(CALLS))} and /models"
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
