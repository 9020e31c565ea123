"""OpenAI's Embeddings in `/openapi.json`."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer"}}

SCHEMAS: dict[str, Any] = {
    "EmbeddingsRequest": {
        "title": "EmbeddingsRequest",
        "description": "OpenAI's body.",
        "type": "object",
        "required": ["model", "input"],
        "additionalProperties": False,
        "properties": {
            "model": {**_TEXT, "description": "One of the service's `frozen.model_list`."},
            "input": {
                "anyOf": [
                    {**_TEXT, "minLength": 1},
                    {"type": "array", "minItems": 1, "items": _TEXT},
                    _IDS,
                    {"type": "array", "minItems": 1, "items": _IDS},
                ]
            },
            "dimensions": {"type": ["integer", "null"], "minimum": 1},
            "encoding_format": {"enum": ["float", "base64", None]},
            "user": {"type": ["string", "null"]},
            "metadata": {"type": ["object", "null"], "description": "Recorded, and not sent."},
        },
        "examples": [{"model": "text-embedder", "input": "Say a number."}],
    },
    "Embeddings": {
        "title": "Embeddings",
        "description": "OpenAI's answer.",
        "type": "object",
        "required": ["object", "data", "model", "usage"],
        "properties": {
            "object": {"const": "list"},
            "data": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["object", "index", "embedding"],
                    "properties": {
                        "object": {"const": "embedding"},
                        "index": _COUNT,
                        "embedding": {"type": ["array", "string"], "items": {"type": "number"}},
                    },
                },
            },
            "model": _TEXT,
            "usage": {"type": "object"},
        },
    },
}


def bodies(headers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By route, as ``openapi_bodies.BODIES``; ``headers``: of an answer that is an interaction."""
    ours = ("x-any-agent-interaction", "x-any-agent-session")
    return {
        "POST /v1/embeddings": {
            "summary": "Embeddings",
            "description": "Texts as vectors, by a frozen model; recorded, and never trained on. "
            "Also at `/embeddings`, and behind `/{session key}`.",
            "requestBody": {"required": True, "content": _json("EmbeddingsRequest")},
            "responses": {
                "200": {
                    "description": "The vectors.",
                    "headers": {name: headers[name] for name in ours},
                    "content": _json("Embeddings"),
                }
            },
        }
    }


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
