"""The answers of providers, one class for each API: the client's part of them, and the record.

The answer's id becomes the interaction's, by which its client may name it; usage that the client
did not request is taken out. Everything else is passed on as it came.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from any_agent.completions.encoders.chat import DONE
from any_agent.errors import AnyAgentError, ProviderError
from any_agent.protocol.error_bodies import anthropic_body
from any_agent.types import Message
from proxy_ext.litellm_streams import Event

_TEXTS = ("content", "reasoning_content", "refusal")
_MESSAGE_FIELDS = ("tool_calls", "reasoning_content", "refusal", "thinking_blocks")
_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")


@dataclass(eq=False)
class ProviderResponse:
    """One answer, whole or event by event."""

    done: ClassVar[bytes] = b""
    """The bytes that close a stream."""
    id: str
    """The interaction's."""
    include_usage: bool = False
    provider_id: str | None = None
    provider_model: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    """The usage in the API's form."""
    finish_reason: str = ""
    begun: bool = False
    """True once anything has come."""

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the client's body of an answer that is not streamed."""
        raise NotImplementedError

    def event(self, event: Event) -> tuple[bytes, bool]:
        """Return the client's bytes of an event, and True for the answer's end and what follows."""
        raise NotImplementedError

    def message(self) -> Message:
        """Return the answer so far in the API's own form, for the record."""
        raise NotImplementedError

    def estimate_usage(self, prompt: int, output: int) -> None:
        """Set a usage that the provider did not report."""
        self.usage = {"input_tokens": prompt, "output_tokens": output}

    def failed(self, error: AnyAgentError) -> bytes:
        """Return the event that ends a stream which cannot go on."""
        return _data(error.body())

    def tokens(self) -> tuple[int, int]:
        """Return the tokens of the prompt and of the answer by the provider's count."""
        u = self.usage
        prompt = u.get("input_tokens", u.get("prompt_tokens"))
        output = u.get("output_tokens", u.get("completion_tokens"))
        return _number(prompt), _number(output)

    def reports_prompt(self) -> bool:
        """Return True if the usage counts any of the prompt: no prompt is empty.

        Anthropic's API counts cached tokens beside the others.
        """
        return bool(self.tokens()[0]) or any(_number(self.usage.get(name)) for name in _CACHED)

    def _take_head(self, body: dict[str, Any]) -> None:
        """Keep the provider's id and model of a body or an event, and replace the id by ours."""
        self.begun = True
        if self.provider_id is None and isinstance(body.get("id"), str):
            self.provider_id = body["id"]
        if self.provider_model is None and isinstance(body.get("model"), str):
            self.provider_model = body["model"]
        body["id"] = self.id


@dataclass(eq=False)
class ChatResponse(ProviderResponse):
    """An answer of `/chat/completions`."""

    done = DONE
    choices: dict[int, Message] = field(default_factory=dict)
    _ended: dict[int, str] = field(default_factory=dict)
    """The finish reasons of choices that have ended."""

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        self._take_head(body)
        self.usage = _usage(body.get("usage"))
        for choice in _objects(body.get("choices")):
            self.choices[_index(choice)] = self._message(choice)
            self._end(choice, choice.get("finish_reason") or "stop")
        if not self.choices:
            raise ProviderError("the provider's answer has no choices")
        return body

    def event(self, event: Event) -> tuple[bytes, bool]:
        self._take_head(event)
        usage = event.pop("usage", None)
        if isinstance(usage, dict):
            self.usage = _usage(usage)
            if self.include_usage:
                event["usage"] = self.usage
        choices = _objects(event.get("choices"))
        ends = any(_index(choice) in self._ended for choice in choices)
        if usage is not None and all(map(_is_empty, choices)):
            # OpenAI's usage event has no choices.
            event["choices"] = []
            return (_data(event) if self.include_usage else b""), True
        for choice in choices:
            reason = choice.setdefault("finish_reason", None)
            empty: Message = {"role": "assistant", "content": ""}
            self._add(self.choices.setdefault(_index(choice), empty), choice)
            if reason is not None:
                self._end(choice, reason)
                ends = True
        return _data(event), ends

    def message(self) -> Message:
        choices = [self.choices[k] for k in sorted(self.choices)]
        if len(choices) == 1:
            return choices[0]
        return {"role": "assistant", "content": None, **({"choices": choices} if choices else {})}

    def estimate_usage(self, prompt: int, output: int) -> None:
        self.usage = {"prompt_tokens": prompt, "completion_tokens": output}
        self.usage["total_tokens"] = prompt + output

    def _end(self, choice: dict[str, Any], reason: object) -> None:
        self._ended[_index(choice)] = str(reason)
        self.finish_reason = self._ended[min(self._ended)]

    def _message(self, choice: dict[str, Any]) -> Message:
        """Return a whole choice's message as it is recorded."""
        message = choice.get("message")
        if not isinstance(message, dict):
            raise ProviderError("a choice of the provider's answer has no message")
        message.setdefault("role", "assistant")
        message.setdefault("content", None)
        kept = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
        return {"role": message["role"], "content": message["content"], **kept}

    def _add(self, message: Message, choice: dict[str, Any]) -> None:
        """Add an event's choice to the message so far."""
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return
        _append_texts(message, delta, _TEXTS)
        for part in _objects(delta.get("tool_calls")):
            calls: list[dict[str, Any]] = message.setdefault("tool_calls", [])
            call = next((c for c in calls if c["index"] == _index(part)), None)
            if call is None:
                call = {"index": _index(part), "id": None, "type": "function", "function": {}}
                calls.append(call)
            call["id"] = part.get("id") or call["id"]
            if isinstance(part.get("function"), dict):
                _append_texts(call["function"], part["function"], ("name", "arguments"))


@dataclass(eq=False)
class TextResponse(ChatResponse):
    """An answer of `/completions`."""

    def _message(self, choice: dict[str, Any]) -> Message:
        return {"role": "assistant", "content": str(choice.get("text") or "")}

    def _add(self, message: Message, choice: dict[str, Any]) -> None:
        if isinstance(choice.setdefault("text", ""), str):
            message["content"] += choice["text"]


@dataclass(eq=False)
class ResponsesResponse(ProviderResponse):
    """An answer of `/responses`."""

    _texts: list[str] = field(default_factory=list)
    _output: list[Any] = field(default_factory=list)
    _events: int = 0
    """The number of events so far."""
    _response: dict[str, Any] = field(default_factory=dict)
    """The response as the last event with one shows it."""

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        self._take_head(body)
        self._finish(body)
        return body

    def event(self, event: Event) -> tuple[bytes, bool]:
        kind = event.get("type")
        self.begun = True
        response = event.get("response")
        if isinstance(response, dict):
            self._take_head(response)
            self._response = response
        if kind == "response.output_text.delta" and isinstance(event.get("delta"), str):
            self._texts.append(event["delta"])
        if kind in ("response.output_text.delta", "response.output_text.done"):
            event.setdefault("logprobs", [])
        # LiteLLM numbers only some events of a provider that speaks another API.
        event["sequence_number"] = self._events
        self._events += 1
        ends = kind in ("response.completed", "response.incomplete", "response.failed")
        if ends and isinstance(response, dict):
            self._finish(response)
        return _named(event), ends

    def message(self) -> Message:
        return {"role": "assistant", "content": "".join(self._texts), "output": self._output}

    def failed(self, error: AnyAgentError) -> bytes:
        fields = {"code": error.code, "message": error.message}
        event: Event = {"type": "error", **fields, "param": error.param}
        if self._response:
            response = {**self._response, "status": "failed", "error": fields}
            event = {"type": "response.failed", "response": response}
        return _named({**event, "sequence_number": self._events})

    def _finish(self, response: dict[str, Any]) -> None:
        response["usage"] = self.usage = _usage(response.get("usage"))
        self.finish_reason = str(response.get("status") or "completed")
        output = response.get("output")
        self._output = output if isinstance(output, list) else []
        parts = [p for item in _objects(self._output) for p in _objects(item.get("content"))]
        self._texts = [p["text"] for p in parts if isinstance(p.get("text"), str)]


@dataclass(eq=False)
class MessagesResponse(ProviderResponse):
    """An answer of Anthropic's `/messages`."""

    _blocks: dict[int, dict[str, Any]] = field(default_factory=dict)

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        self._take_head(body)
        self.usage = _usage(body.get("usage"))
        self.finish_reason = str(body.get("stop_reason") or "end_turn")
        self._blocks = dict(enumerate(_objects(body.get("content"))))
        return body

    def event(self, event: Event) -> tuple[bytes, bool]:
        kind, index, delta = event.get("type"), _index(event), event.get("delta")
        self.begun = True
        if kind == "message_start" and isinstance(event.get("message"), dict):
            self._take_head(event["message"])
            self.usage = _usage(event["message"].get("usage"))
        elif kind == "content_block_start" and isinstance(event.get("content_block"), dict):
            self._blocks[index] = dict(event["content_block"])
        elif kind == "content_block_delta" and isinstance(delta, dict):
            block = self._blocks.setdefault(index, {"type": "text", "text": ""})
            _append_texts(block, delta, ("text", "thinking", "signature", "partial_json"))
        elif kind == "message_delta":
            self.finish_reason = str((delta or {}).get("stop_reason") or "end_turn")
            later = _usage(event.get("usage"))
            self.usage |= {k: v for k, v in later.items() if v is not None}
        return _named(event), kind in ("message_delta", "message_stop")

    def message(self) -> Message:
        blocks = [self._blocks[k] for k in sorted(self._blocks)]
        for block in blocks:
            if isinstance(part := block.pop("partial_json", None), str):
                try:
                    block["input"] = orjson.loads(part or b"{}")
                except orjson.JSONDecodeError:
                    block["input"] = part
        return {"role": "assistant", "content": blocks}

    def failed(self, error: AnyAgentError) -> bytes:
        return _named(anthropic_body(error))


@dataclass(eq=False)
class EmbeddingsResponse(ProviderResponse):
    """An answer of `/embeddings`; only the number of its vectors is recorded."""

    _vectors: int = 0

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        self.begun = True
        self.provider_model = str(body.get("model") or "") or None
        self.usage = _usage(body.get("usage"))
        self.finish_reason = "stop"
        vectors = body.get("data")
        if not isinstance(vectors, list):
            raise ProviderError("the provider's answer has no embeddings")
        self._vectors = len(vectors)
        return body

    def message(self) -> Message:
        return {"role": "assistant", "content": None, "embeddings": self._vectors}

    def estimate_usage(self, prompt: int, output: int) -> None:
        self.usage = {"prompt_tokens": prompt, "total_tokens": prompt}


RESPONSES: dict[str, type[ProviderResponse]] = {
    "chat": ChatResponse,
    "completions": TextResponse,
    "responses": ResponsesResponse,
    "messages": MessagesResponse,
    "embeddings": EmbeddingsResponse,
}
"""The classes of answers by the API's name."""


def _usage(usage: Any) -> dict[str, Any]:
    """Return a usage as the API has it, without LiteLLM's own cost."""
    if not isinstance(usage, dict):
        return {}
    return {name: value for name, value in usage.items() if name != "cost"}


def _is_empty(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice.get("text")
    return not delta and choice.get("finish_reason") is None


def _append_texts(to: dict[str, Any], delta: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if isinstance(delta.get(name), str):
            to[name] = (to.get(name) or "") + delta[name]


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _number(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def _index(part: dict[str, Any]) -> int:
    return _number(part.get("index"))


def text_in(value: Any) -> str:
    """Return every text of plain data, joined, without recursion."""
    out: list[str] = []
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            out.append(part)
        elif isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
    return " ".join(out)


def ids_in(messages: list[dict[str, Any]]) -> int:
    """Return the number of token ids in prompts that are given as ids."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    ids = [part if isinstance(part, list) else [part] for part in parts]
    return sum(type(one) is int for each in ids for one in each)


def json_bytes(value: dict[str, Any]) -> bytes:
    """Return the JSON of any data of a provider."""
    try:
        return orjson.dumps(value)
    except TypeError:
        # An integer beyond 64 bits, or a lone surrogate.
        return json.dumps(value).encode()


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def _named(event: dict[str, Any]) -> bytes:
    return f"event: {event.get('type')}\n".encode() + _data(event)
