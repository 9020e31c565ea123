"""The engine behind every gateway: canned answers in SGLang's form and in OpenAI's."""

from __future__ import annotations

import argparse
import asyncio
import functools
from pathlib import Path
from typing import Any

import orjson
import uvloop
from aiohttp import web

CONTEXT = 1_000_000
PROMPT = 1000
_TOLD = b'"prompt_tokens":%d' % PROMPT


class CannedEngine:
    """Answers of any length up to the canned ids', in SGLang's form and in OpenAI's."""

    def __init__(self, canned: dict[str, Any], gap: float) -> None:
        self._ids: list[int] = canned["ids"]
        self._texts: list[str] = canned["texts"]
        self._end: int = canned["end"]
        self._vocabulary: int = canned["vocabulary"]
        self._logprobs = [-0.01 * (k % 97) - 0.001234 for k in range(len(self._ids) + 1)]
        self._gap = gap
        # An answer is the same bytes every time, so that the engine takes little of the machine.
        self._sglang_answer = functools.cache(self._sglang_answer)  # type: ignore[method-assign]
        self._openai_answer = functools.cache(self._openai_answer)  # type: ignore[method-assign]
        self._responses_answer = functools.cache(  # type: ignore[method-assign]
            self._responses_answer
        )

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"context_length": CONTEXT, "weight_version": "0"})

    async def control(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        sampling = body["sampling_params"]
        if any(int(token) >= self._vocabulary for token in sampling.get("logit_bias") or ()):
            raise web.HTTPBadRequest(text="logit_bias names a token id beyond the vocabulary")
        size = min(len(self._ids), sampling["max_new_tokens"])
        told = b'"prompt_tokens":%d' % len(body["input_ids"])
        parts = self._sglang_answer(size, body.get("stream", False))
        return await self._send(request, [part.replace(_TOLD, told) for part in parts])

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        size = min(len(self._ids), body.get("max_tokens") or len(self._ids))
        return await self._send(request, self._openai_answer(size, bool(body.get("stream"))))

    async def responses(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        size = min(len(self._ids), body.get("max_output_tokens") or len(self._ids))
        return await self._send(request, self._responses_answer(size, bool(body.get("stream"))))

    async def _send(self, request: web.Request, parts: list[bytes]) -> web.StreamResponse:
        if len(parts) == 1:
            return web.Response(body=parts[0], content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(self._gap)
        return response

    def _sglang_answer(self, size: int, stream: bool) -> list[bytes]:
        ids = [*self._ids[: size - 1], self._end]
        if not stream:
            return [orjson.dumps(self._sglang(ids, 0, size))]
        events = [_event(self._sglang(ids, k, k + 1)) for k in range(size)]
        return [*events, b"data: [DONE]\n\n"]

    def _sglang(self, ids: list[int], start: int, end: int) -> dict[str, Any]:
        fresh = zip(self._logprobs[start:end], ids[start:end], strict=True)
        done = {"type": "stop", "matched": self._end} if end == len(ids) else None
        meta = {
            "id": "canned",
            "finish_reason": done,
            "prompt_tokens": PROMPT,
            "completion_tokens": end,
            "cached_tokens": 0,
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": end}],
            "output_token_logprobs": [[logprob, i, None] for logprob, i in fresh],
        }
        text = "".join(self._texts[start : min(end, len(ids) - 1)])
        return {"text": text, "output_ids": ids[start:end], "meta_info": meta}

    def _openai_answer(self, size: int, stream: bool) -> list[bytes]:
        entries = [self._entry(k, size) for k in range(size)]
        text = "".join(self._texts[: size - 1])
        usage = {"prompt_tokens": PROMPT, "completion_tokens": size, "total_tokens": PROMPT + size}
        base = {"id": "chatcmpl-canned", "created": 1, "model": "policy"}
        if not stream:
            choice: dict[str, Any] = {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
                "logprobs": {"content": entries},
            }
            whole = {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
            return [orjson.dumps(whole)]
        events = []
        for k, entry in enumerate(entries):
            last = k == size - 1
            choice = {
                "index": 0,
                "delta": {} if last else {"content": self._texts[k]},
                "finish_reason": "stop" if last else None,
                "logprobs": {"content": [entry]},
            }
            events.append(_event({**base, "object": "chat.completion.chunk", "choices": [choice]}))
        return [*events, b"data: [DONE]\n\n"]

    def _responses_answer(self, size: int, stream: bool) -> list[bytes]:
        texts = self._texts[: size - 1]
        part = {"type": "output_text", "text": "".join(texts), "annotations": [], "logprobs": []}
        item = {
            "type": "message",
            "id": "msg_canned",
            "status": "completed",
            "role": "assistant",
            "content": [part],
        }
        whole = {**_RESPONSE, "status": "completed", "output": [item], "usage": _usage(size)}
        if not stream:
            return [orjson.dumps(whole)]
        begun = {**_RESPONSE, "status": "in_progress", "output": [], "usage": None}
        at = {"item_id": "msg_canned", "output_index": 0, "content_index": 0}
        opened = {**item, "status": "in_progress", "content": []}
        events: list[tuple[str, dict[str, Any]]] = [
            ("created", {"response": begun}),
            ("in_progress", {"response": begun}),
            ("output_item.added", {"output_index": 0, "item": opened}),
            ("content_part.added", {**at, "part": {**part, "text": ""}}),
            *(("output_text.delta", {**at, "delta": text, "logprobs": []}) for text in texts),
            ("output_text.done", {**at, "text": part["text"], "logprobs": []}),
            ("content_part.done", {**at, "part": part}),
            ("output_item.done", {"output_index": 0, "item": item}),
            ("completed", {"response": whole}),
        ]
        return [
            b"event: response.%b\n%b"
            % (
                name.encode(),
                _event({"type": f"response.{name}", "sequence_number": k, **data}),
            )
            for k, (name, data) in enumerate(events)
        ]

    def _entry(self, k: int, size: int) -> dict[str, Any]:
        text = "<|im_end|>" if k == size - 1 else self._texts[k]
        return {
            "token": text,
            "logprob": self._logprobs[k],
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }


_RESPONSE = {
    "id": "resp_canned",
    "object": "response",
    "created_at": 1,
    "model": "policy",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}


def _usage(size: int) -> dict[str, Any]:
    return {
        "input_tokens": PROMPT,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": size,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": PROMPT + size,
    }


def _event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--canned", type=Path, required=True)
    parser.add_argument("--gap", type=float, default=1.0, help="ms between a stream's tokens")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    engine = CannedEngine(orjson.loads(args.canned.read_bytes()), args.gap / 1000)
    app = web.Application(client_max_size=2**30)
    app.router.add_get("/get_model_info", engine.info)
    for name in ("pause_generation", "continue_generation", "abort_request"):
        app.router.add_post(f"/{name}", engine.control)
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/v1/chat/completions", engine.chat)
    app.router.add_post("/v1/responses", engine.responses)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=args.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
