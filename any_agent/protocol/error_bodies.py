"""Errors in the shape of the API that a request came by: Anthropic's under `/messages`, else
OpenAI's."""

from __future__ import annotations

import re
import uuid
from typing import Any

from any_agent.errors import AnyAgentError

REQUEST_ID = "request-id"
"""The header in which Anthropic's SDK looks for it."""
_MESSAGES = re.compile(r"(?:/[^/]*)?(?:/v1)?/messages(?:/|$)")
"""Behind a session prefix, too."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def request_id() -> str:
    """Of a request that has no interaction."""
    return f"req_{uuid.uuid4().hex}"


def is_messages(path: str) -> bool:
    """Whether a request's path is one of Anthropic's Messages API."""
    return _MESSAGES.match(path) is not None


def shaped(
    error: AnyAgentError, path: str, status: int | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """An error's body and headers, for a request of this path.

    ``status``: the one that it is answered with, if it is not the error's own.
    """
    if not is_messages(path):
        return error.body(), error.headers()
    body = anthropic_body(error, status)
    return body, {**error.headers(), REQUEST_ID: body["request_id"]}


def anthropic_body(error: AnyAgentError, status: int | None = None) -> dict[str, Any]:
    """As Anthropic's API writes errors.

    Its SDK shows ``details.error_code`` as the error's code; ``code`` is where every other API of
    ours has the same.
    """
    details = {"error_code": error.code, **error.details}
    if error.param is not None:
        details["param"] = error.param
    return {
        "type": "error",
        "error": {
            "type": _type(status or error.status),
            "message": error.message,
            "code": error.code,
            "details": details,
        },
        "request_id": request_id(),
    }


def _type(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
