"""Errors and request ids in the form of Anthropic's API."""

from __future__ import annotations

import uuid
from typing import Any

from any_agent.errors import AnyAgentError

REQUEST_ID = "request-id"  # the header in which Anthropic's SDK looks for a request's id
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
    """Return the id of a request that has no interaction."""
    return f"req_{uuid.uuid4().hex}"


def request_id_of(interaction_id: str) -> dict[str, str]:
    """Return the header with the id of a request that has this interaction."""
    return {REQUEST_ID: "req_" + interaction_id.removeprefix("msg_")}


def anthropic_body(error: AnyAgentError, status: int | None = None) -> dict[str, Any]:
    """Return an error's body; ``status`` replaces the error's own.

    Anthropic's SDK shows ``details.error_code`` as the error's code; ``code`` is the same value at
    the place that every other API uses.
    """
    shown = status or error.status
    details = {"error_code": error.code, **error.details}
    if error.param is not None:
        details["param"] = error.param
    return {
        "type": "error",
        "error": {
            "type": _TYPES.get(shown, "invalid_request_error" if shown < 500 else "api_error"),
            "message": error.message,
            "code": error.code,
            "details": details,
        },
        "request_id": request_id(),
    }
