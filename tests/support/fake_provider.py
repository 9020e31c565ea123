"""A provider of models that speaks OpenAI's API, and Anthropic's, and fails as it is told to.

Answers count up. Words come from what a test queued by `say`; faults are queued by `fail`, and a
stream can be `held` after its first words.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import orjson
from aiohttp import web

Fault = Literal["500", "429", "401", "400", "context", "hang", "cut", "html", "truncated"]
Made = tuple[dict[str, Any], list[bytes]]
"""A whole answer, and the events of a streamed one."""
Answer = Callable[[dict[str, Any], list[str]], Made]
PROMPT_TOKENS = 7
_ERRORS: dict[str, tuple[int, dict[str, Any]]] = {
    "500": (500, {"message": "the provider broke", "type": "server_error", "code": None}),
    "429": (429, {"message": "slow down", "type": "rate_limit_error", "code": "rate_limit"}),
    "401": (401, {"message": "Incorrect API key provided: KEY", "type": "invalid_request_error"}),
    "400": (400, {"message": "temperature is out of range", "type": "invalid_request_error"}),
    "context": (
        400,
        {
            "message": "This model's maximum context length is 8 tokens.",
            "type": "invalid_request_error",
            "code": "context_length_exceeded",
        },
    ),
}


class Provider:
    """See the module."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        """Path, body and headers, in the order of their arrival."""
        self.left = 0
        """Requests whose client hung up before their end."""
        self.url = ""
        self.tool_call: tuple[str, str] | None = None
        """What every answer calls, if anything: a name, and arguments as JSON."""
        self.said_usage = True
        self._faults: deque[Fault] = deque()
        self._words: deque[list[str]] = deque()
        self._go = asyncio.Event()
        self._go.set()

    def say(self, *words: str) -> None:
        """The next answer's words, one a chunk."""
        self._words.append(list(words))

    def fail(self, *faults: Fault) -> None:
        """How the next requests fail, one each."""
        self._faults.extend(faults)

    def hold(self) -> None:
        """Streams stop after their first word, and images are not made, until `go`."""
        self._go.clear()

    def go(self) -> None:
        self._go.set()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body, _ in self.requests]

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Its base URL, without `/v1`."""
        app = web.Application(client_max_size=64 << 20)
        for path, answer in self._answers().items():
            app.router.add_post(f"/v1/{path}", partial(self._handle, answer))
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self.url
        finally:
            self._go.set()
            await runner.cleanup()

    def _answers(self) -> dict[str, Answer]:
        """By path what makes an answer of a body and words."""
        return {
            "chat/completions": self._chat,
            "completions": self._text,
            "responses": self._responses,
            "messages": self._messages,
            "embeddings": _embeddings,
            "images/generations": _images,
        }

    async def _handle(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append((request.path, body, dict(request.headers)))
        fault = self._faults.popleft() if self._faults else None
        if fault == "hang":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.left += 1
                raise
        words = self._words.popleft() if self._words else ["Good", " enough", "."]
        if fault == "html":
            return web.Response(text="<html>a gateway</html>", content_type="text/html")
        if fault in _ERRORS:
            status, error = _ERRORS[fault]
            key = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
            said = {**error, "message": str(error["message"]).replace("KEY", key.split(" ")[-1])}
            headers = {"retry-after": "7"} if status == 429 else {}
            return web.json_response({"error": said}, status=status, headers=headers)
        whole, events = answer(body, words)
        if body.get("stream"):
            return await self._stream(request, events, fault)
        if answer is _images:
            await self._go.wait()
        return web.json_response(whole)

    async def _stream(
        self, request: web.Request, events: list[bytes], fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number, event in enumerate(events):
                if number == 3:
                    if fault == "cut":
                        assert request.transport is not None
                        request.transport.abort()
                        return response
                    if fault == "truncated":
                        return response
                    await self._go.wait()
                await response.write(event)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left += 1
            raise
        await response.write_eof()
        return response

    def _chat(self, body: dict[str, Any], words: list[str]) -> Made:
        number = len(self.requests)
        head = {"id": f"chatcmpl-{number}", "created": 1700000000, "model": f"{body['model']}-0613"}
        usage = {"usage": _usage(words)} if self.said_usage else {}
        message: dict[str, Any] = {"role": "assistant", "content": "".join(words)}
        deltas: list[dict[str, Any]] = [{"content": word} for word in words]
        reason = "stop"
        if self.tool_call is not None:
            reason, (name, arguments) = "tool_calls", self.tool_call
            function = {"name": name, "arguments": arguments}
            call = {"id": "call_1", "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
            first = {**call, "index": 0, "function": {**function, "arguments": ""}}
            parts = [{"index": 0, "function": {"arguments": part}} for part in arguments]
            deltas = [{"tool_calls": [each]} for each in (first, *parts)]
        choices = [
            {"index": k, "message": message, "finish_reason": reason}
            for k in range(body.get("n") or 1)
        ]
        steps = [({"role": "assistant", "content": ""}, None), *((each, None) for each in deltas)]
        chunks = [
            {"index": 0, "delta": delta, "finish_reason": end}
            for delta, end in (*steps, ({}, reason))
        ]
        events = _chunks(body, {**head, "object": "chat.completion.chunk"}, chunks, usage)
        return {**head, "object": "chat.completion", "choices": choices, **usage}, events

    def _text(self, body: dict[str, Any], words: list[str]) -> Made:
        head = {"id": "cmpl-1", "created": 1700000000, "model": body["model"]}
        head["object"] = "text_completion"
        usage = {"usage": _usage(words)}
        choice = {"index": 0, "text": "".join(words), "finish_reason": "stop", "logprobs": None}
        chunks = [
            {"index": 0, "text": word, "finish_reason": end}
            for word, end in (*((word, None) for word in words), ("", "stop"))
        ]
        return {**head, "choices": [choice], **usage}, _chunks(body, head, chunks, usage)

    def _responses(self, body: dict[str, Any], words: list[str]) -> Made:
        text = "".join(words)
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
        done = {**item, "content": [part]}
        base = {"id": f"resp_{len(self.requests)}", "object": "response", "model": body["model"]}
        base |= {"created_at": 1700000000, "status": "in_progress", "output": [], "tools": []}
        base |= {"parallel_tool_calls": True, "tool_choice": "auto", "metadata": {}}
        base |= {"error": None, "incomplete_details": None, "instructions": None}
        base |= {"temperature": 1.0, "top_p": 1.0}
        spent = _usage(words)
        usage: dict[str, Any] = {"input_tokens": spent["prompt_tokens"]}
        usage["output_tokens"] = spent["completion_tokens"]
        usage["total_tokens"] = spent["total_tokens"]
        usage["input_tokens_details"] = {"cached_tokens": 0}
        usage["output_tokens_details"] = {"reasoning_tokens": 0}
        whole = {**base, "status": "completed", "output": [done], "usage": usage}
        at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        begun = {**item, "status": "in_progress", "content": []}
        plain: list[tuple[str, dict[str, Any]]] = [
            ("created", {"response": base}),
            ("in_progress", {"response": base}),
            ("output_item.added", {"output_index": 0, "item": begun}),
            ("content_part.added", {**at, "part": {**part, "text": ""}}),
            *(("output_text.delta", {**at, "delta": word}) for word in words),
            ("output_text.done", {**at, "text": text}),
            ("content_part.done", {**at, "part": part}),
            ("output_item.done", {"output_index": 0, "item": done}),
            ("completed", {"response": whole}),
        ]
        return whole, [
            _named(f"response.{kind}", {**event, "sequence_number": k})
            for k, (kind, event) in enumerate(plain)
        ]

    def _messages(self, body: dict[str, Any], words: list[str]) -> Made:
        head: dict[str, Any] = {"id": f"msg_{len(self.requests)}", "role": "assistant"}
        head |= {"type": "message", "model": body["model"], "content": []}
        head |= {"stop_reason": None, "stop_sequence": None}
        head["usage"] = {"input_tokens": PROMPT_TOKENS, "output_tokens": 1}
        usage = {"input_tokens": PROMPT_TOKENS, "output_tokens": len(words)}
        ended = {"stop_reason": "end_turn", "stop_sequence": None}
        content = [{"type": "text", "text": "".join(words)}]
        at, deltas = {"index": 0}, [{"type": "text_delta", "text": word} for word in words]
        plain: list[tuple[str, dict[str, Any]]] = [
            ("message_start", {"message": head}),
            ("content_block_start", {**at, "content_block": {"type": "text", "text": ""}}),
            *(("content_block_delta", {**at, "delta": delta}) for delta in deltas),
            ("content_block_stop", at),
            ("message_delta", {"delta": ended, "usage": {"output_tokens": len(words)}}),
            ("message_stop", {}),
        ]
        whole = {**head, "content": content, **ended, "usage": usage}
        return whole, [_named(kind, event) for kind, event in plain]


def _embeddings(body: dict[str, Any], _: list[str]) -> Made:
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    data = [
        {"object": "embedding", "index": k, "embedding": [0.5, -0.25, len(str(text)) / 8]}
        for k, text in enumerate(texts)
    ]
    usage = {"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS}
    return {"object": "list", "data": data, "model": body["model"], "usage": usage}, []


def _images(_: dict[str, Any], __: list[str]) -> Made:
    usage: dict[str, Any] = {"input_tokens": PROMPT_TOKENS, "output_tokens": 4}
    usage["total_tokens"] = PROMPT_TOKENS + 4
    usage["input_tokens_details"] = {"text_tokens": PROMPT_TOKENS, "image_tokens": 0}
    return {"created": 1700000000, "data": [{"b64_json": "aW1hZ2U="}], "usage": usage}, []


def _chunks(
    body: dict[str, Any], head: dict[str, Any], choices: list[Any], usage: dict[str, Any]
) -> list[bytes]:
    """A stream of OpenAI's completions, with its usage if the request asks for it."""
    chunks = [{**head, "choices": [choice]} for choice in choices]
    if usage and (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], **usage})
    return [*map(_data, chunks), b"data: [DONE]\n\n"]


def _usage(words: list[str]) -> dict[str, int]:
    total = PROMPT_TOKENS + len(words)
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": len(words),
        "total_tokens": total,
    }


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _named(kind: str, event: dict[str, Any]) -> bytes:
    return f"event: {kind}\n".encode() + _data({"type": kind, **event})


@asynccontextmanager
async def a_provider() -> AsyncIterator[Provider]:
    """One that serves."""
    provider = Provider()
    async with provider.serve():
        yield provider
