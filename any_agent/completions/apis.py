"""The APIs of model calls: one descriptor each, which every part of any-agent reads.

The router and the SDK import this module, so it stays light: what an API needs beyond its
descriptor is imported at its first call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from any_agent.errors import AnyAgentError, ConfigError, InvalidRequest, NotFound, NoWebSocket
from any_agent.protocol.error_bodies import REQUEST_ID, anthropic_body

if TYPE_CHECKING:
    from any_agent.completions.params.parameter import Parameter
    from any_agent.completions.parsed_request import ParseContext, ParsedRequest

_PATH = re.compile(r"(/[a-z0-9_.-]+)+")
NO_WEBSOCKET = "this service has no WebSockets: send a POST, with stream: true for a stream"
_AZURE_PREFIXES = ("/openai/", "/deployments/", "/v1/deployments/")
_OF_DEPLOYMENT = re.compile(
    r"(?:/openai|/v1)?/deployments/(?P<model>.+?)"
    r"(?P<path>/chat/completions|/completions|/embeddings)"
)
_OF_OPENAI = re.compile(
    r"/openai(?:/v1)?"
    r"(?P<path>/chat/completions|/completions|/embeddings|/responses(?:/.+)?|/models(?:/.+)?)"
)


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """The JSON in which an API reports errors."""

    schema: str
    """The name of its schema in `/openapi.json`."""
    body: Callable[[AnyAgentError, int | None], dict[str, Any]]
    """Build the body of an error; the status is the error's own where it is None."""
    has_request_id: bool = False
    """True if answers carry the header `request-id`, as Anthropic's SDK expects."""

    def headers(self, error: AnyAgentError, body: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers of an error with this body."""
        more = {REQUEST_ID: body["request_id"]} if self.has_request_id else {}
        return {**error.headers(), **more}


OPENAI_ERRORS = ErrorFormat("Error", lambda error, status: error.body())
ANTHROPIC_ERRORS = ErrorFormat("AnthropicError", anthropic_body, has_request_id=True)


@dataclass(frozen=True, slots=True)
class Api:
    """One API of model calls: where it is served, and how its bodies are read and answered."""

    name: str
    """The API's name in the tables of parameters and in records."""
    path: str
    """The path of its calls, such as `/chat/completions`; each is served under `/v1`, too."""
    parse: Callable[[Any, ParseContext], ParsedRequest]
    """Check a body, and return the call with the encoder of its answer.

    Raises InvalidRequest, UnsupportedParameter or NotFound, naming the parameter.
    """
    parameters: Callable[[], Mapping[str, Parameter]] = dict
    """Return the parameters by name; the request schema in `/openapi.json` is made of them."""
    required: tuple[str, ...] = ()
    """The parameters that no request leaves out."""
    errors: ErrorFormat = OPENAI_ERRORS
    conversation: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda body: body
    """Return what identifies a body's conversation: its `messages` or `input`, and its `system` or
    `instructions`. It distinguishes agents that open no sessions."""
    by_policy: bool = True
    """False if only frozen models answer it."""
    summary: str = ""
    """The title of its route in `/openapi.json`."""
    response_schema: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schema of an answer that is not streamed."""
    ping: bytes = b": ping\n\n"
    """The event for a stream's client that gets nothing else for a while; its SDK ignores it."""

    def owns(self, path: str) -> bool:
        """Return True for the API's path and the paths below it, also behind a session prefix."""
        return re.match(rf"(?:/[^/]*)?(?:/v1)?{re.escape(self.path)}(?:/|$)", path) is not None


APIS: dict[str, Api] = {}


def register_api(api: Api) -> None:
    """Serve an API from now on: call it before the proxy's app is made.

    Raises ConfigError for a path that is none, and for a name or a path that is taken.
    """
    if not _PATH.fullmatch(api.path):
        raise ConfigError(f"the path {api.path!r} of the API {api.name} is not like /my/calls")
    for other in APIS.values():
        if api.name == other.name or api.path == other.path:
            raise ConfigError(f"the API {api.name} at {api.path} is registered already")
    APIS[api.name] = api


def all_apis() -> tuple[Api, ...]:
    """Return the registered APIs, the built-in ones first."""
    return tuple(APIS.values())


def api_at(path: str) -> Api | None:
    """Return the API whose calls are served at this path, with `/v1` or without."""
    path = path.removeprefix("/v1")
    return next((api for api in APIS.values() if api.path == path), None)


def plain_path(path: str, *, litellm: bool = False) -> tuple[str, str | None]:
    """Return a request's path as OpenAI's own client sends it, and the model that Azure's names.

    Azure's clients name the model in the path of a call: `/openai/deployments/MODEL/...` at an
    endpoint, `/deployments/MODEL/...` at a base URL. Their other calls have `/openai` or
    `/openai/v1` before the path; with ``litellm`` these are LiteLLM's, which passes them on to
    OpenAI. The path has no session prefix.
    """
    if not path.startswith(_AZURE_PREFIXES):
        return path, None
    if (found := _OF_DEPLOYMENT.fullmatch(path)) is not None:
        return f"/v1{found['path']}", found["model"]
    if not litellm and (found := _OF_OPENAI.fullmatch(path)) is not None:
        return f"/v1{found['path']}", None
    return path, None


def require_no_websocket(method: str, path: str, upgrade: str | None) -> None:
    """Raise NoWebSocket for a request that asks to call an API through a WebSocket.

    ``upgrade`` is the header of that name.
    """
    if upgrade is None or method != "GET" or upgrade.lower() != "websocket":
        return
    if any(api.owns(path) for api in APIS.values()):
        raise NoWebSocket(NO_WEBSOCKET)


def error_format(path: str) -> ErrorFormat:
    """Return the form of errors at a request's path, which may have a session prefix."""
    found = (a.errors for a in APIS.values() if a.errors is not OPENAI_ERRORS and a.owns(path))
    return next(found, OPENAI_ERRORS)


def encode_error(
    error: AnyAgentError, path: str, status: int | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return an error's body and headers, in the form of the API that the path belongs to.

    ``status``: the one that it is answered with, if it is not the error's own.
    """
    form = error_format(path)
    body = form.body(error, status)
    return body, form.headers(error, body)


# -- the built-in APIs -------------------------------------------------------------------------


def _parse_chat(body: Any, context: ParseContext) -> ParsedRequest:
    from any_agent.completions.encoders.chat import ChatEncoder
    from any_agent.completions.params.parse import parse_chat
    from any_agent.completions.parsed_request import ParsedRequest, token_logprobs

    call, logs = parse_chat(body, context), token_logprobs(context.chat)
    return ParsedRequest(call, lambda head, version: ChatEncoder(call, head, logs, f"v{version}"))


def _parse_text(body: Any, context: ParseContext) -> ParsedRequest:
    from any_agent.completions.encoders.text import TextEncoder
    from any_agent.completions.params.parse import parse_completion
    from any_agent.completions.parsed_request import ParsedRequest, token_logprobs

    call, chat, logs = parse_completion(body, context), context.chat, token_logprobs(context.chat)
    return ParsedRequest(
        call, lambda head, version: TextEncoder(call, head, logs, f"v{version}", chat)
    )


def _parse_responses(body: Any, context: ParseContext) -> ParsedRequest:
    from any_agent.completions.parsed_request import ParsedRequest, token_logprobs
    from any_agent.completions.responses.encoder import ResponsesEncoder
    from any_agent.completions.responses.parse import parse_responses

    chat, logs = context.chat, token_logprobs(context.chat)
    call = parse_responses(body, context, context.tree, context_length=context.context_length)
    return ParsedRequest(call.chat, lambda head, _: ResponsesEncoder(call, head, logs, chat))


def _parse_messages(body: Any, context: ParseContext) -> ParsedRequest:
    from any_agent.completions.messages.encoder import MessagesEncoder
    from any_agent.completions.messages.parse import parse_messages
    from any_agent.completions.parsed_request import ParsedRequest

    call = parse_messages(body, context)
    return ParsedRequest(call.chat, lambda head, _: MessagesEncoder(call, head))


def _refuse_embeddings(body: Any, context: ParseContext) -> ParsedRequest:
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    name = body.get("model")
    if not isinstance(name, str):
        raise InvalidRequest(
            "model is required: the name of a model of the service's frozen.model_list",
            param="model",
        )
    raise NotFound(
        f"the policy makes no embeddings; models of the service's frozen.model_list do, and "
        f"{name[:80]!a} is not one of them",
        code="model_not_found",
        param="model",
    )


def _table(name: str) -> Callable[[], Mapping[str, Parameter]]:
    def rows() -> Mapping[str, Parameter]:
        from any_agent.completions.params.table import TABLE

        return TABLE[name]

    return rows


register_api(Api("chat", "/chat/completions", _parse_chat, _table("chat"), ("messages",)))
register_api(Api("completions", "/completions", _parse_text, _table("completions"), ("prompt",)))
register_api(Api("responses", "/responses", _parse_responses, _table("responses")))
register_api(
    Api(
        "messages",
        "/messages",
        _parse_messages,
        _table("messages"),
        ("messages", "max_tokens"),
        errors=ANTHROPIC_ERRORS,
        ping=b'event: ping\ndata: {"type": "ping"}\n\n',
    )
)
register_api(Api("embeddings", "/embeddings", _refuse_embeddings, by_policy=False))
