"""A provider of models that speaks OpenAI's API, and Anthropic's, and fails as it is told to.

Answers count up. Words come from what a test queued by `say`; faults are queued by `fail`, and a
stream can be `held` after its first words.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import orjson
from aiohttp import web

Fault = Literal["500", "429", "401", "400", "context", "hang", "cut", "html", "truncated"]
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
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_post("/v1/images/generations", self._images)
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

    # ------------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request) -> tuple[dict[str, Any], list[str], Fault | None]:
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
        return body, words, fault

    def _failed(self, request: web.Request, fault: Fault | None) -> web.Response | None:
        if fault == "html":
            return web.Response(text="<html>a gateway</html>", content_type="text/html")
        if fault in _ERRORS:
            status, error = _ERRORS[fault]
            key = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
            said = {**error, "message": str(error["message"]).replace("KEY", key.split(" ")[-1])}
            headers = {"retry-after": "7"} if status == 429 else {}
            return web.json_response({"error": said}, status=status, headers=headers)
        return None

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

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, words, fault = await self._begin(request)
        if (failed := self._failed(request, fault)) is not None:
            return failed
        number = len(self.requests)
        head = {"id": f"chatcmpl-{number}", "created": 1700000000, "model": f"{body['model']}-0613"}
        usage = _usage(words)
        calls = self._calls()
        if not body.get("stream"):
            message: dict[str, Any] = {"role": "assistant", "content": "".join(words)}
            if calls:
                message = {"role": "assistant", "content": None, "tool_calls": calls}
            choices = [
                {"index": k, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
                for k in range(body.get("n") or 1)
            ]
            answer = {**head, "object": "chat.completion", "choices": choices}
            if self.said_usage:
                answer["usage"] = usage
            return web.json_response(answer)
        head["object"] = "chat.completion.chunk"

        def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            return _data({**head, "choices": [choice]})

        events = [chunk({"role": "assistant", "content": ""})]
        if calls:
            call = calls[0]
            first = {**call, "index": 0, "function": {**call["function"], "arguments": ""}}
            events.append(chunk({"tool_calls": [first]}))
            for part in call["function"]["arguments"]:
                delta = {"index": 0, "function": {"arguments": part}}
                events.append(chunk({"tool_calls": [delta]}))
            events.append(chunk({}, "tool_calls"))
        else:
            events += [chunk({"content": word}) for word in words]
            events.append(chunk({}, "stop"))
        if (body.get("stream_options") or {}).get("include_usage") and self.said_usage:
            events.append(_data({**head, "choices": [], "usage": usage}))
        events.append(b"data: [DONE]\n\n")
        return await self._stream(request, events, fault)

    def _calls(self) -> list[dict[str, Any]]:
        if self.tool_call is None:
            return []
        name, arguments = self.tool_call
        function = {"name": name, "arguments": arguments}
        return [{"id": "call_1", "type": "function", "function": function}]

    async def _text(self, request: web.Request) -> web.StreamResponse:
        body, words, fault = await self._begin(request)
        if (failed := self._failed(request, fault)) is not None:
            return failed
        head = {"id": "cmpl-1", "created": 1700000000, "model": body["model"]}
        head["object"] = "text_completion"
        if not body.get("stream"):
            choice = {"index": 0, "text": "".join(words), "finish_reason": "stop", "logprobs": None}
            return web.json_response({**head, "choices": [choice], "usage": _usage(words)})
        events = [
            _data({**head, "choices": [{"index": 0, "text": word, "finish_reason": None}]})
            for word in words
        ]
        events.append(
            _data({**head, "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
        )
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(_data({**head, "choices": [], "usage": _usage(words)}))
        events.append(b"data: [DONE]\n\n")
        return await self._stream(request, events, fault)

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        body, _, fault = await self._begin(request)
        if (failed := self._failed(request, fault)) is not None:
            return failed
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [
            {"object": "embedding", "index": k, "embedding": [0.5, -0.25, len(str(text)) / 8]}
            for k, text in enumerate(texts)
        ]
        usage = {"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS}
        return web.json_response(
            {"object": "list", "data": data, "model": body["model"], "usage": usage}
        )

    async def _images(self, request: web.Request) -> web.StreamResponse:
        _, _, fault = await self._begin(request)
        if (failed := self._failed(request, fault)) is not None:
            return failed
        await self._go.wait()
        usage: dict[str, Any] = {"input_tokens": PROMPT_TOKENS, "output_tokens": 4}
        usage["total_tokens"] = PROMPT_TOKENS + 4
        usage["input_tokens_details"] = {"text_tokens": PROMPT_TOKENS, "image_tokens": 0}
        return web.json_response(
            {"created": 1700000000, "data": [{"b64_json": "aW1hZ2U="}], "usage": usage}
        )

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body, words, fault = await self._begin(request)
        if (failed := self._failed(request, fault)) is not None:
            return failed
        number = len(self.requests)
        text = "".join(words)
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
        base = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": 1700000000,
            "model": body["model"],
            "status": "in_progress",
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "temperature": 1.0,
            "top_p": 1.0,
        }
        spent = _usage(words)
        usage = {
            "input_tokens": spent["prompt_tokens"],
            "output_tokens": spent["completion_tokens"],
            "total_tokens": spent["total_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        whole = {**base, "status": "completed", "output": [{**item, "content": [part]}]}
        whole["usage"] = usage
        if not body.get("stream"):
            return web.json_response(whole)
        at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        plain: list[dict[str, Any]] = [
            {"type": "response.created", "response": base},
            {"type": "response.in_progress", "response": base},
            {
                "type": "response.output_item.added",
                "output_index": 0,
                "item": {**item, "status": "in_progress", "content": []},
            },
            {
                "type": "response.content_part.added",
                **at,
                "part": {"type": "output_text", "text": "", "annotations": []},
            },
            *({"type": "response.output_text.delta", **at, "delta": word} for word in words),
            {"type": "response.output_text.done", **at, "text": text},
            {"type": "response.content_part.done", **at, "part": part},
            {
                "type": "response.output_item.done",
                "output_index": 0,
                "item": {**item, "content": [part]},
            },
            {"type": "response.completed", "response": whole},
        ]
        events = [_named({**event, "sequence_number": k}) for k, event in enumerate(plain)]
        return await self._stream(request, events, fault)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body, words, fault = await self._begin(request)
        if (failed := self._failed(request, fault)) is not None:
            return failed
        head = {
            "id": f"msg_{len(self.requests)}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": PROMPT_TOKENS, "output_tokens": 1},
        }
        usage = {"input_tokens": PROMPT_TOKENS, "output_tokens": len(words)}
        if not body.get("stream"):
            content = [{"type": "text", "text": "".join(words)}]
            end = {"content": content, "stop_reason": "end_turn", "usage": usage}
            return web.json_response({**head, **end})
        plain: list[dict[str, Any]] = [
            {"type": "message_start", "message": head},
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            },
            *(
                {
                    "type": "content_block_delta",
                    "index": 0,
                    "delta": {"type": "text_delta", "text": word},
                }
                for word in words
            ),
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": {"output_tokens": len(words)},
            },
            {"type": "message_stop"},
        ]
        return await self._stream(request, [_named(event) for event in plain], fault)


def _usage(words: list[str]) -> dict[str, int]:
    total = PROMPT_TOKENS + len(words)
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": len(words),
        "total_tokens": total,
    }


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _named(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\n".encode() + _data(event)


@contextlib.asynccontextmanager
async def a_provider() -> AsyncIterator[Provider]:
    """One that serves."""
    provider = Provider()
    async with provider.serve():
        yield provider
