"""What comes back from a provider, an API a class: what the client gets of it, and the record.

The answer's id becomes the interaction's, so that it can be named; usage that the client did not
ask for is taken out. Everything else is passed on as it came.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import orjson

from any_agent.errors import AnyAgentError, ProviderError
from any_agent.protocol.error_bodies import anthropic_body
from any_agent.types import Message
from proxy_ext.frozen.provider import Event, FrozenApi


class ProviderResponse:
    """One answer, whole or event by event."""

    done: ClassVar[bytes] = b""
    """What closes a stream."""

    def __init__(self, interaction_id: str, *, include_usage: bool = False) -> None:
        self.id = interaction_id
        self.include_usage = include_usage
        self.provider_id: str | None = None
        self.provider_model: str | None = None
        self.usage: dict[str, Any] = {}
        self.finish_reason = ""
        self.begun = False
        """Whether anything came."""

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body that the client gets."""
        raise NotImplementedError

    def event(self, event: Event) -> tuple[bytes, bool]:
        """What the client gets of an event, and whether that is, or follows, the answer's end."""
        raise NotImplementedError

    def message(self) -> Message:
        """The answer as it is recorded, in the API's own form."""
        raise NotImplementedError

    def said(self) -> str:
        """All text of it so far, to count its tokens by."""
        return text_in(self.message())

    def estimated(self, prompt: int, output: int) -> dict[str, Any]:
        """A usage that nobody told, in the API's form."""
        return {"input_tokens": prompt, "output_tokens": output}

    def failed(self, error: AnyAgentError) -> bytes:
        """What ends a stream that cannot go on."""
        return _data(error.body())

    def tokens(self) -> tuple[int, int]:
        """Of the prompt and of the answer, as the provider counts them."""
        u = self.usage
        prompt = u.get("input_tokens", u.get("prompt_tokens"))
        output = u.get("output_tokens", u.get("completion_tokens"))
        return _number(prompt), _number(output)

    def prompt_told(self) -> bool:
        """Whether the provider counted any of the prompt; no prompt has no tokens. Anthropic's API
        counts what stands in its cache beside the rest."""
        cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
        return bool(self.tokens()[0]) or any(_number(self.usage.get(name)) for name in cached)

    def _head(self, body: dict[str, Any]) -> None:
        """Of the body, or of an event that holds as much."""
        self.begun = True
        if self.provider_id is None and isinstance(body.get("id"), str):
            self.provider_id = body["id"]
        if self.provider_model is None and isinstance(body.get("model"), str):
            self.provider_model = body["model"]
        body["id"] = self.id


class _Choices(ProviderResponse):
    """OpenAI's chat and its legacy completions."""

    done = b"data: [DONE]\n\n"

    def __init__(self, interaction_id: str, *, include_usage: bool = False) -> None:
        super().__init__(interaction_id, include_usage=include_usage)
        self.choices: dict[int, Message] = {}
        self._ended: dict[int, str] = {}

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        self._head(body)
        self.usage = _usage(body.get("usage"))
        for choice in _objects(body.get("choices")):
            index = _number(choice.get("index"))
            self.choices[index] = self._whole_choice(choice)
            self._ended[index] = str(choice.get("finish_reason") or "stop")
        if not self.choices:
            raise ProviderError("the provider's answer has no choices")
        self.finish_reason = self._ended[min(self._ended)]
        return body

    def event(self, event: Event) -> tuple[bytes, bool]:
        self._head(event)
        usage = event.pop("usage", None)
        if isinstance(usage, dict):
            self.usage = _usage(usage)
            if self.include_usage:
                event["usage"] = self.usage
        choices = _objects(event.get("choices"))
        late = [c for c in choices if _number(c.get("index")) in self._ended]
        if usage is not None and all(_says_nothing(c) for c in choices):
            # OpenAI's has no choices.
            event["choices"] = []
            return (_data(event) if self.include_usage else b""), True
        for choice in choices:
            choice.setdefault("finish_reason", None)
            index = _number(choice.get("index"))
            self._add(self.choices.setdefault(index, self._empty()), choice)
            if choice["finish_reason"] is not None:
                self._ended[index] = str(choice["finish_reason"])
                self.finish_reason = self._ended[min(self._ended)]
        ends = any(c["finish_reason"] is not None for c in choices)
        return _data(event), ends or bool(late)

    def message(self) -> Message:
        if len(self.choices) == 1:
            return next(iter(self.choices.values()))
        choices = [self.choices[k] for k in sorted(self.choices)]
        message: Message = {"role": "assistant", "content": None}
        if choices:
            message["choices"] = choices
        return message

    def estimated(self, prompt: int, output: int) -> dict[str, Any]:
        total = prompt + output
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": total}

    def _empty(self) -> Message:
        return {"role": "assistant", "content": ""}

    def _whole_choice(self, choice: dict[str, Any]) -> Message:
        raise NotImplementedError

    def _add(self, message: Message, choice: dict[str, Any]) -> None:
        raise NotImplementedError


class ChatResponse(_Choices):
    """`/chat/completions`."""

    def _whole_choice(self, choice: dict[str, Any]) -> Message:
        message = choice.get("message")
        if not isinstance(message, dict):
            raise ProviderError("a choice of the provider's answer has no message")
        message.setdefault("role", "assistant")
        message.setdefault("content", None)
        told = ("tool_calls", "reasoning_content", "refusal", "thinking_blocks")
        kept = {name: message[name] for name in told if message.get(name) is not None}
        return {"role": message["role"], "content": message["content"], **kept}

    def _add(self, message: Message, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return
        for name in ("content", "reasoning_content", "refusal"):
            if isinstance(delta.get(name), str):
                message[name] = (message.get(name) or "") + delta[name]
        for part in _objects(delta.get("tool_calls")):
            calls: list[dict[str, Any]] = message.setdefault("tool_calls", [])
            index = _number(part.get("index"))
            call = next((c for c in calls if c["index"] == index), None)
            if call is None:
                call = {"index": index, "id": None, "type": "function", "function": {}}
                calls.append(call)
            call["id"] = part.get("id") or call["id"]
            function = part.get("function")
            if isinstance(function, dict):
                for name in ("name", "arguments"):
                    if isinstance(function.get(name), str):
                        before = call["function"].get(name, "")
                        call["function"][name] = before + function[name]


class TextResponse(_Choices):
    """`/completions`."""

    def _whole_choice(self, choice: dict[str, Any]) -> Message:
        return {"role": "assistant", "content": str(choice.get("text") or "")}

    def _add(self, message: Message, choice: dict[str, Any]) -> None:
        if isinstance(choice.setdefault("text", ""), str):
            message["content"] += choice["text"]


class ResponsesResponse(ProviderResponse):
    """`/responses`."""

    def __init__(self, interaction_id: str, *, include_usage: bool = False) -> None:
        super().__init__(interaction_id, include_usage=include_usage)
        self._text: list[str] = []
        self._output: list[Any] = []
        self._number = 0
        self._begun_as: dict[str, Any] = {}

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        self._head(body)
        self._take(body)
        return body

    def event(self, event: Event) -> tuple[bytes, bool]:
        kind = event.get("type")
        self.begun = True
        response = event.get("response")
        if isinstance(response, dict):
            self._head(response)
            self._begun_as = response
        if kind == "response.output_text.delta" and isinstance(event.get("delta"), str):
            self._text.append(event["delta"])
        if kind in ("response.output_text.delta", "response.output_text.done"):
            event.setdefault("logprobs", [])
        # Of a provider that speaks another API LiteLLM counts some of them only.
        event["sequence_number"] = self._number
        self._number += 1
        ends = kind in ("response.completed", "response.incomplete", "response.failed")
        if ends and isinstance(response, dict):
            self._take(response)
        return _named(event), ends

    def message(self) -> Message:
        return {"role": "assistant", "content": "".join(self._text), "output": self._output}

    def failed(self, error: AnyAgentError) -> bytes:
        said = {"code": error.code, "message": error.message}
        event: Event
        if self._begun_as:
            response = {**self._begun_as, "status": "failed", "error": said}
            event = {"type": "response.failed", "response": response}
        else:
            event = {"type": "error", **said, "param": error.param}
        return _named({**event, "sequence_number": self._number})

    def _take(self, response: dict[str, Any]) -> None:
        response["usage"] = self.usage = _usage(response.get("usage"))
        self.finish_reason = str(response.get("status") or "completed")
        output = response.get("output")
        self._output = output if isinstance(output, list) else []
        parts = [p for item in _objects(self._output) for p in _objects(item.get("content"))]
        self._text = [p["text"] for p in parts if isinstance(p.get("text"), str)]


class MessagesResponse(ProviderResponse):
    """Anthropic's `/messages`."""

    def __init__(self, interaction_id: str, *, include_usage: bool = False) -> None:
        super().__init__(interaction_id, include_usage=include_usage)
        self._blocks: dict[int, dict[str, Any]] = {}

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        self._head(body)
        self.usage = _usage(body.get("usage"))
        self.finish_reason = str(body.get("stop_reason") or "end_turn")
        self._blocks = dict(enumerate(_objects(body.get("content"))))
        return body

    def event(self, event: Event) -> tuple[bytes, bool]:
        kind = event.get("type")
        self.begun = True
        index = _number(event.get("index"))
        if kind == "message_start" and isinstance(event.get("message"), dict):
            self._head(event["message"])
            self.usage = _usage(event["message"].get("usage"))
        elif kind == "content_block_start" and isinstance(event.get("content_block"), dict):
            self._blocks[index] = dict(event["content_block"])
        elif kind == "content_block_delta" and isinstance(event.get("delta"), dict):
            self._add(self._blocks.setdefault(index, {"type": "text", "text": ""}), event["delta"])
        elif kind == "message_delta":
            delta = event.get("delta")
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

    @staticmethod
    def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
        for name in ("text", "thinking", "signature", "partial_json"):
            if isinstance(delta.get(name), str):
                block[name] = (block.get(name) or "") + delta[name]


class EmbeddingsResponse(ProviderResponse):
    """`/embeddings`: of the vectors only how many there are is recorded."""

    def __init__(self, interaction_id: str, *, include_usage: bool = False) -> None:
        super().__init__(interaction_id, include_usage=include_usage)
        self._vectors = 0

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        self.begun = True
        self.provider_model = str(body.get("model") or "") or None
        self.usage = _usage(body.get("usage"))
        self.finish_reason = "stop"
        vectors = body.get("data")
        if not isinstance(vectors, list):
            raise ProviderError("the provider's answer holds no embeddings")
        self._vectors = len(vectors)
        return body

    def message(self) -> Message:
        return {"role": "assistant", "content": None, "embeddings": self._vectors}

    def estimated(self, prompt: int, output: int) -> dict[str, Any]:
        return {"prompt_tokens": prompt, "total_tokens": prompt}


ANSWERS: dict[FrozenApi, type[ProviderResponse]] = {
    "chat": ChatResponse,
    "completions": TextResponse,
    "responses": ResponsesResponse,
    "messages": MessagesResponse,
    "embeddings": EmbeddingsResponse,
}


def _usage(usage: Any) -> dict[str, Any]:
    """As the API has it: LiteLLM adds what it reckons."""
    if not isinstance(usage, dict):
        return {}
    return {name: value for name, value in usage.items() if name != "cost"}


def _says_nothing(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice.get("text")
    return not delta and choice.get("finish_reason") is None


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _number(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def text_in(value: Any) -> str:
    """Every text of plain data, without recursion."""
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
    """How many token ids prompts have that are given as such."""
    found = 0
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            ids = part if isinstance(part, list) else [part]
            found += sum(type(one) is int for one in ids)
    return found


def json_bytes(value: dict[str, Any]) -> bytes:
    """JSON of whatever a provider said."""
    try:
        return orjson.dumps(value)
    except TypeError:
        # An integer beyond 64 bits, a lone surrogate.
        return json.dumps(value).encode()


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def _named(event: dict[str, Any]) -> bytes:
    return f"event: {event.get('type')}\n".encode() + _data(event)
