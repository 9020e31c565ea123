"""An engine's errors, in the shapes that engines give them."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.engine.sglang.requests import failure, refusal, refused
from any_agent.engine.sglang.responses import ChunkReader
from any_agent.errors import AnyAgentError, EngineMismatch, EngineUnavailable, InvalidRequest
from tests.support.engine.sglang import request
from tests.support.errors import fails_with


@pytest.mark.parametrize(
    ("status", "told", "kind", "message", "param"),
    [
        (400, {"message": "no"}, InvalidRequest, "the engine refused the request: no", None),
        (400, {"message": "no", "param": "top_p"}, InvalidRequest, ": no", "top_p"),
        (400, "Invalid grammar request", InvalidRequest, ": Invalid grammar", "grammar"),
        (400, {"detail": "gone"}, InvalidRequest, ": gone", None),
        (400, None, InvalidRequest, "refused the request: in an unknown form, ", None),
        (400, ["odd"], InvalidRequest, "refused the request: in an unknown form, ", None),
        (401, "Unauthorized", EngineUnavailable, "set engine.key", None),
        (400, {"message": "x" * 9000, "param": "y" * 900}, InvalidRequest, "x" * 500, "y" * 64),
        (500, {"message": "m", "code": "engine_mismatch"}, EngineMismatch, "m", None),
        (500, {"message": "m"}, EngineUnavailable, "the engine answered 500: m", None),
        (503, {"message": "full"}, EngineUnavailable, "the engine answered 503: full", None),
    ],
)
def test_a_refusal_becomes_an_error_of_its_kind(
    status: int, told: Any, kind: type[AnyAgentError], message: str, param: str | None
) -> None:
    error = refusal(status, told)
    assert type(error) is kind
    assert message in error.message and len(error.message) < 600
    assert error.param == param


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "m", "code": 400}, InvalidRequest),
        ({"message": "m", "code": "invalid_request", "param": "grammar"}, InvalidRequest),
        ({"message": "m", "code": "engine_mismatch"}, EngineMismatch),
        ({"message": "m"}, EngineUnavailable),
        ("m", EngineUnavailable),
    ],
)
def test_errors_amid_a_stream_keep_their_kind(error: Any, kind: type[AnyAgentError]) -> None:
    with fails_with(kind, "m"):
        ChunkReader(request()).read({"error": error})


SECRET = "the conversation's own words"


META: dict[str, Any] = {
    "completion_tokens": 1,
    "prompt_tokens": 3,
    "finish_reason": None,
    "output_token_logprobs": [[-1.0, 1, SECRET]],
    "weight_version": SECRET,
}


EVENTS: list[Any] = [
    {"text": SECRET, "output_ids": [1]},
    {"error": SECRET},
    [SECRET],
    SECRET,
    {"text": SECRET, "meta_info": {}},
    {"text": SECRET, "meta_info": {"completion_tokens": SECRET}},
    {"meta_info": {"completion_tokens": 1, "finish_reason": {"type": SECRET}}},
    {"meta_info": {"completion_tokens": 1, "prompt_tokens": SECRET, "finish_reason": None}},
    {"output_ids": [1], "meta_info": META | {"prompt_tokens": SECRET}},
    {"output_ids": [1], "meta_info": META},
]
ANSWERS: list[tuple[int, str]] = [
    (500, SECRET),
    (500, f'["{SECRET}"]'),
    (422, f'{{"detail": [{{"input": "{SECRET}"}}]}}'),
    (400, f'{{"error": {{"input": "{SECRET}"}}}}'),
    (502, f"<html>{SECRET}"),
]


async def test_what_cannot_be_read_of_an_engine_is_quoted_nowhere() -> None:
    class Answer:
        def __init__(self, status: int, told: bytes) -> None:
            self.status, self.told = status, told

        async def read(self) -> bytes:
            return self.told

    errors: list[AnyAgentError] = []
    for event in EVENTS:
        with pytest.raises(AnyAgentError) as caught:
            ChunkReader(request()).read(event)
        errors.append(caught.value)
    for status, text in ANSWERS:
        told = text.encode()
        errors.append(await failure(Answer(status, told)))  # type: ignore[arg-type]
        errors.append(refused(status, "/generate", told))
    for error in errors:
        assert SECRET not in error.message
        assert "sha256" in error.message
