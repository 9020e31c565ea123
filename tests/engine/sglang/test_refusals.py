"""An engine's errors, in the shapes that engines give them."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.engine.sglang.requests import refusal
from any_agent.engine.sglang.responses import ChunkReader
from any_agent.errors import AnyAgentError, EngineMismatch, EngineUnavailable, InvalidRequest
from tests.support.engine.sglang import request


@pytest.mark.parametrize(
    ("status", "told", "kind", "message", "param"),
    [
        (400, {"message": "no"}, InvalidRequest, "the engine refused the request: no", None),
        (400, {"message": "no", "param": "top_p"}, InvalidRequest, ": no", "top_p"),
        (400, "Invalid grammar request", InvalidRequest, ": Invalid grammar", "grammar"),
        (400, {"detail": "gone"}, InvalidRequest, ": gone", None),
        (400, None, InvalidRequest, ": None", None),
        (400, ["odd"], InvalidRequest, "odd", None),
        (400, {"message": "x" * 9000, "param": "y" * 900}, InvalidRequest, "x" * 500, "y" * 64),
        (500, {"message": "m", "code": "engine_mismatch"}, EngineMismatch, "m", None),
        (500, {"message": "m"}, EngineUnavailable, "the engine answered 500: m", None),
        (503, {"message": "full"}, EngineUnavailable, "the engine answered 503: full", None),
    ],
)
def test_refusals(
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
def test_errors_amid_a_stream(error: Any, kind: type[AnyAgentError]) -> None:
    with pytest.raises(kind, match="m"):
        ChunkReader(request()).read({"error": error})
