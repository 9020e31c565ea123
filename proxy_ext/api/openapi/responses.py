"""OpenAI's Responses API in `/openapi.json`."""

from __future__ import annotations

from typing import Any

from any_agent.completions.params import request_schema

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_ITEM_ID = "^[a-z]{2,3}_in[0-9a-f]{32}_[0-9]{1,6}$"
_ITEMS = {"type": "array", "items": {"type": "object", "required": ["type"]}}

SCHEMAS: dict[str, Any] = {
    "ResponsesRequest": {
        "title": "ResponsesRequest",
        "description": "OpenAI's body, and sampling as SGLang's and vLLM's clients add it. "
        "Parameters are honoured, recorded without effect, or refused by name; in train sessions "
        "the run's sampling replaces the agent's.",
        **request_schema("responses"),
        "examples": [{"model": "policy", "input": "Say a number."}],
    },
    "Response": {
        "title": "Response",
        "description": "OpenAI's answer. Its id names the interaction, to reward it by, and to go "
        "on from.",
        "type": "object",
        "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
        "properties": {
            "id": _TEXT,
            "object": {"const": "response"},
            "created_at": {"type": "integer"},
            "status": {"enum": ["completed", "incomplete", "failed", "in_progress"]},
            "error": {"type": ["object", "null"]},
            "incomplete_details": {"type": ["object", "null"]},
            "model": _TEXT,
            "output": {**_ITEMS, "description": "Reasoning, messages and function calls."},
            "usage": {
                "type": ["object", "null"],
                "required": ["input_tokens", "output_tokens", "total_tokens"],
                "properties": {
                    "input_tokens": _COUNT,
                    "input_tokens_details": {"type": "object"},
                    "output_tokens": _COUNT,
                    "output_tokens_details": {"type": "object"},
                    "total_tokens": _COUNT,
                },
            },
        },
    },
    "DeletedResponse": {
        "title": "DeletedResponse",
        "type": "object",
        "required": ["id", "object", "deleted"],
        "properties": {
            "id": _TEXT,
            "object": {"const": "response"},
            "deleted": {"const": True},
        },
    },
    "ResponseItems": {
        "title": "ResponseItems",
        "type": "object",
        "required": ["object", "data", "first_id", "last_id", "has_more"],
        "properties": {
            "object": {"const": "list"},
            "data": _ITEMS,
            "first_id": {"type": ["string", "null"]},
            "last_id": {"type": ["string", "null"]},
            "has_more": {"type": "boolean"},
        },
    },
}


def bodies(headers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By route; ``headers`` are those of every recorded answer."""
    return {
        "POST /v1/responses": {
            "summary": "Responses",
            "description": "One model call, recorded token by token. Also at `/responses`, and "
            "behind `/{session key}`.",
            "requestBody": {"required": True, "content": _json("ResponsesRequest")},
            "responses": {
                "200": {
                    "description": "The response; with `stream` as OpenAI's events.",
                    "headers": headers,
                    "content": _json("Response")
                    | {"text/event-stream": {"schema": {**_TEXT, "description": "Its events."}}},
                }
            },
        },
        "GET /v1/responses/{response_id}": {
            "summary": "Response",
            "description": "An answer of the session once more. Also at "
            "`/responses/{response_id}`.",
            "responses": {"200": {"description": "The response.", "content": _json("Response")}},
        },
        "DELETE /v1/responses/{response_id}": {
            "summary": "Delete a response",
            "description": "It cannot be had again, nor be gone on from by its id. What the open "
            "session recorded stays. Also at `/responses/{response_id}`.",
            "responses": {
                "200": {"description": "It is deleted.", "content": _json("DeletedResponse")}
            },
        },
        "GET /v1/responses/{response_id}/input_items": {
            "summary": "Input items",
            "description": "What it is an answer to. Also at "
            "`/responses/{response_id}/input_items`.",
            "parameters": [
                {"name": "response_id", "in": "path", "required": True, "schema": _TEXT},
                _parameter("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "20."),
                _parameter("order", {"enum": ["asc", "desc"]}, "`desc`: the latest first."),
                _parameter(
                    "after", {**_TEXT, "pattern": _ITEM_ID}, "The item that the page comes after."
                ),
            ],
            "responses": {"200": {"description": "Items.", "content": _json("ResponseItems")}},
        },
    }


def _parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": dict(schema), "description": description}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
