"""Anthropic's Messages API in `/openapi.json`."""

from __future__ import annotations

from typing import Any

from any_agent.completions.params import request_schema

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_REQUEST = request_schema("messages")
_COUNTED = {**_REQUEST, "required": ["messages"]}
_HELLO = [{"role": "user", "content": "Say a number."}]

SCHEMAS: dict[str, Any] = {
    "AnthropicError": {
        "title": "AnthropicError",
        "description": "In Anthropic's shape, so that its SDKs show the message.",
        "type": "object",
        "required": ["type", "error", "request_id"],
        "additionalProperties": False,
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message", "code", "details"],
                "additionalProperties": False,
                "properties": {
                    "type": {
                        "enum": [
                            "invalid_request_error",
                            "authentication_error",
                            "billing_error",
                            "permission_error",
                            "not_found_error",
                            "request_too_large",
                            "rate_limit_error",
                            "timeout_error",
                            "api_error",
                            "overloaded_error",
                        ]
                    },
                    "message": {**_TEXT, "description": "What is wrong and what to do about it."},
                    "code": {**_TEXT, "description": "For programs; the message may change."},
                    "details": {
                        "type": "object",
                        "required": ["error_code"],
                        "properties": {
                            "error_code": {**_TEXT, "description": "The same code."},
                            "param": {**_TEXT, "description": "The field it is about."},
                        },
                    },
                },
            },
            "request_id": _TEXT,
        },
    },
    "MessagesRequest": {
        "title": "MessagesRequest",
        "description": "Anthropic's body. Parameters are honoured, recorded without effect, or "
        "refused by name; in train sessions the run's sampling replaces the agent's.",
        **_REQUEST,
        "examples": [{"model": "policy", "max_tokens": 64, "messages": _HELLO}],
    },
    "CountTokensRequest": {
        "title": "CountTokensRequest",
        "description": "As MessagesRequest; how much may be answered need not be said.",
        **_COUNTED,
        "examples": [{"model": "policy", "messages": _HELLO}],
    },
    "Message": {
        "title": "Message",
        "description": "Anthropic's answer. Its id names the interaction, to reward it by.",
        "type": "object",
        "required": ["id", "type", "role", "model", "content", "stop_reason", "usage"],
        "properties": {
            "id": _TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _TEXT,
            "content": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"enum": ["text", "thinking", "tool_use"]}},
                },
            },
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": {"type": ["string", "null"]},
            "usage": {
                "type": "object",
                "required": ["input_tokens", "output_tokens"],
                "properties": {"input_tokens": _COUNT, "output_tokens": _COUNT},
            },
        },
    },
    "TokenCount": {
        "title": "TokenCount",
        "type": "object",
        "required": ["input_tokens"],
        "additionalProperties": False,
        "properties": {"input_tokens": _COUNT},
    },
}


def bodies(headers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By route, as ``openapi_bodies.BODIES``; ``headers``: of an answer that is an interaction."""
    request_id = {"request-id": {"description": "Of the request.", "schema": _TEXT}}
    events = {**_TEXT, "description": "Events of it."}
    return {
        "POST /v1/messages": {
            "summary": "Messages",
            "description": "Anthropic's API: one model call, recorded like a chat call; both may "
            "take turns in a session. Also at `/messages`, and behind `/{session key}`.",
            "requestBody": {"required": True, "content": _json("MessagesRequest")},
            "responses": {
                "200": {
                    "description": "The message; with `stream` as Anthropic's events.",
                    "headers": {**headers, **request_id},
                    "content": _json("Message") | {"text/event-stream": {"schema": events}},
                }
            },
        },
        "POST /v1/messages/count_tokens": {
            "summary": "Count Tokens",
            "description": "The prompt tokens that a request with this body would have now. Also "
            "at `/messages/count_tokens`, and behind `/{session key}`.",
            "requestBody": {"required": True, "content": _json("CountTokensRequest")},
            "responses": {
                "200": {
                    "description": "How many.",
                    "headers": request_id,
                    "content": _json("TokenCount"),
                }
            },
        },
    }


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
