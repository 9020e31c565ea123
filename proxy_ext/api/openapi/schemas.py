"""What no model of ours describes in `/openapi.json`: errors, OpenAI's bodies, examples."""

from __future__ import annotations

from typing import Any

from any_agent.completions.params import request_schema
from proxy_ext.api.openapi import (
    embeddings as openapi_embeddings,
)
from proxy_ext.api.openapi import (
    messages as openapi_messages,
)
from proxy_ext.api.openapi import (
    responses as openapi_responses,
)

_TEXT = {"type": "string"}
_LIST_OF_OBJECTS = {"type": "array", "items": {"type": "object"}}
_PARAMETERS = (
    "OpenAI's body, and what SGLang's and vLLM's clients add. Parameters are honoured, recorded "
    "without effect, or refused by name; in train sessions the run's sampling replaces the agent's."
)


def _answer(title: str, kind: str, description: str) -> dict[str, Any]:
    return {
        "title": title,
        "description": f"{description} Its id names the interaction, to reward it by.",
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": _TEXT,
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": _TEXT,
            "choices": {**_LIST_OF_OBJECTS, "minItems": 1},
            "usage": {"type": "object"},
        },
    }


SCHEMAS: dict[str, Any] = {
    "Error": {
        "title": "Error",
        "description": "In OpenAI's shape, so that its SDKs show the message. An error may carry "
        "more fields beside these.",
        "type": "object",
        "required": ["error"],
        "additionalProperties": False,
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {**_TEXT, "description": "What is wrong and what to do about it."},
                    "type": {
                        "enum": [
                            "invalid_request_error",
                            "authentication_error",
                            "permission_error",
                            "rate_limit_error",
                            "server_error",
                        ]
                    },
                    "param": {"type": ["string", "null"], "description": "The field it is about."},
                    "code": {**_TEXT, "description": "For programs; the message may change."},
                },
            }
        },
        "examples": [
            {
                "error": {
                    "message": "the session has no completion to reward yet",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "no_interactions",
                }
            }
        ],
    },
    "ChatRequest": {
        "title": "ChatRequest",
        "description": _PARAMETERS,
        **request_schema("chat"),
        "examples": [
            {"model": "policy", "messages": [{"role": "user", "content": "Say a number."}]}
        ],
    },
    "CompletionRequest": {
        "title": "CompletionRequest",
        "description": _PARAMETERS,
        **request_schema("completions"),
        "examples": [{"model": "policy", "prompt": "1 + 1 =", "max_tokens": 4}],
    },
    **openapi_responses.SCHEMAS,
    **openapi_messages.SCHEMAS,
    **openapi_embeddings.SCHEMAS,
    "ChatCompletion": _answer("ChatCompletion", "chat.completion", "OpenAI's answer."),
    "Completion": _answer("Completion", "text_completion", "OpenAI's legacy answer."),
    "Model": {
        "title": "Model",
        "type": "object",
        "required": ["id", "object", "created", "owned_by"],
        "properties": {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": _TEXT,
            "context_length": {"type": "integer", "description": "The policy's."},
        },
    },
    "ModelList": {
        "title": "ModelList",
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"const": "list"}, "data": _LIST_OF_OBJECTS},
    },
}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


_INTERACTION_HEADERS = {
    "x-any-agent-interaction": {
        "description": "The interaction, if the answer has one choice.",
        "schema": _TEXT,
    },
    "x-any-agent-session": {"description": "Its session.", "schema": _TEXT},
    "x-any-agent-version": {"description": "The newest weights of its tokens.", "schema": _TEXT},
    "x-any-agent-overrides": {"description": "What the run replaced, as JSON.", "schema": _TEXT},
    "x-any-agent-ignored": {
        "description": "Names of parameters that had no effect, separated by commas.",
        "schema": _TEXT,
    },
}


def _model_call(asked: str, answered: str) -> dict[str, Any]:
    return {
        "requestBody": {"required": True, "content": _json(asked)},
        "responses": {
            "200": {
                "description": "The completion; with `stream` as OpenAI's events.",
                "headers": _INTERACTION_HEADERS,
                "content": _json(answered)
                | {"text/event-stream": {"schema": {**_TEXT, "description": "Chunks of it."}}},
            }
        },
    }


BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {
        "summary": "Chat Completions",
        "description": "One model call, recorded token by token. Also at `/chat/completions`, and "
        "behind `/{session key}`.",
        **_model_call("ChatRequest", "ChatCompletion"),
    },
    "POST /v1/completions": {
        "summary": "Completions",
        "description": "A text that the model goes on with, recorded like a chat call; a prompt "
        "that begins with a recorded one and its output continues that exactly. Also at "
        "`/completions`, and behind `/{session key}`.",
        **_model_call("CompletionRequest", "Completion"),
    },
    **openapi_responses.bodies(_INTERACTION_HEADERS),
    **openapi_messages.bodies(_INTERACTION_HEADERS),
    **openapi_embeddings.bodies(_INTERACTION_HEADERS),
    "GET /v1/models": {
        "summary": "Models",
        "description": "The policy, then the frozen models. Also at `/models`.",
        "responses": {"200": {"description": "All of them.", "content": _json("ModelList")}},
    },
    "GET /v1/models/{model}": {
        "summary": "Model",
        "description": "One of them, by its name. Also at `/models/{model}`.",
        "responses": {"200": {"description": "The model.", "content": _json("Model")}},
    },
    "GET /metrics": {
        "responses": {
            "200": {
                "description": "Prometheus' text format.",
                "content": {"text/plain": {"schema": _TEXT}},
            }
        }
    },
    "POST /rl/v1/lease": {
        "responses": {
            "200": {
                "description": "Trajectories as msgpack, see `any_agent.record.codec`.",
                "content": {
                    "application/x-msgpack": {"schema": {"type": "string", "format": "binary"}}
                },
            },
            "204": {"description": "None came in time."},
        }
    },
}
"""By route: what replaces parts of FastAPI's description of it."""

PAGES = "^([0-9]{1,4}:[0-9]{1,15}(,[0-9]{1,4}:[0-9]{1,15})*)?$"
"""Where a list goes on."""

_NULL = {"type": "null"}
_GIVEN = {"not": _NULL}
_NOTHING = {"completion_id": _NULL, "interaction_id": _NULL}
RULES_BETWEEN: dict[str, dict[str, Any]] = {
    "SetReward": {
        "oneOf": [
            {
                "required": ["reward"],
                "properties": {"reward": _GIVEN, "final_reward": _NULL},
            },
            {
                "required": ["final_reward"],
                "properties": {"final_reward": _GIVEN, "reward": _NULL, **_NOTHING},
            },
        ]
    },
    "StartSession": {
        "anyOf": [
            {"properties": {"version": _NULL}},
            {"required": ["mode"], "properties": {"mode": {"const": "eval"}}},
        ]
    },
    "Finalize": {
        "anyOf": [
            {"properties": {"deadline": _NULL}},
            {"required": ["await_reward"], "properties": {"await_reward": {"const": True}}},
        ]
    },
    "Lease": {
        "anyOf": [
            {"properties": {"replay": {"const": False}}},
            {"required": ["session_ids"], "properties": {"session_ids": _GIVEN}},
        ]
    },
}
"""By model: which fields go together."""

EXAMPLES: dict[str, dict[str, Any]] = {
    "StartSession": {"task_id": "task-17", "group_size": 8, "metadata": {"split": "train"}},
    "SetReward": {"reward": {"correct": 1, "format": 0.2}},
    "Finalize": {"final_reward": 1.0},
    "Abort": {"reason": "the sandbox died"},
    "Veto": {"reason": "it holds personal data"},
    "SetCapacity": {"limit": 64, "ttl": 15, "owner": "me"},
    "Lease": {"owner": "me", "wait": 0.1},
    "Ack": {"owner": "me", "trained": ["ses-0-0123456789abcdef"]},
    "ExportTrajectories": {"session_ids": ["ses-0-0123456789abcdef"], "discount": 0.9},
    "Pause": {"ttl": 30},
    "PublishedVersion": {"version": 3, "path": "weights/v00000003", "step": 2},
    "SetRun": {"state": "training", "step": 2},
    "ArealGrant": {"task_id": "task-0"},
    "ArealStart": {"task_id": "task-0"},
    "ArealReward": {"reward": 1.0},
    "ArealExport": {"session_id": "task-0-0", "discount": 0.9, "style": "individual"},
}
"""By model; those of bodies are valid ones."""
