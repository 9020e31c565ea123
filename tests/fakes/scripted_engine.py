"""An engine that speaks SGLang's native contract and does what a test tells it to.

It samples nothing: tokens come from a formula or from what the test queued by `say`. Faults are
queued by `fail`, and a generation can be held at a token by `hold`. `die` is a kill -9, `revive` a
new process on the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

from tests.fakes.scripted_run import Fault, FaultKind, Running

_SAMPLING = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "sampling_seed",
}

Hold = tuple[int, asyncio.Event] | None


class ScriptedEngine:
    """See the module. ``decode`` is for the answers' text and for stop strings."""

    def __init__(
        self,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        incremental: bool = False,
        context_length: int = 2048,
        pace: float = 0.0,
        slots: int | None = None,
    ) -> None:
        self.decode = decode or (lambda ids: "".join(chr(97 + i % 26) for i in ids))
        self.incremental = incremental
        self.context_length = context_length
        self.like_sglang = False
        self.ill = False
        """The server lives and its loop does not: `/health` says so."""
        self.pace = pace
        self.slots = slots
        """Sampled at once; the other requests wait. None: all are, and it is not told."""
        self._free = asyncio.Semaphore(slots or 1 << 30)
        self.most_running = 0
        """Requests at once, those that waited for a slot included."""
        self.weight_version = "0"
        self.requests: list[dict[str, Any]] = []
        """Bodies of `/generate`, in the order of their arrival."""
        self.aborted: list[str] = []
        """What `/abort_request` was asked for."""
        self.cancelled: list[str] = []
        """Requests whose client hung up."""
        self.pauses: list[str] = []
        self.running: dict[str, Running] = {}
        self._scripts: deque[list[int]] = deque()
        self._faults: deque[Fault] = deque()
        self._holds: deque[tuple[int, asyncio.Event]] = deque()
        self._going = asyncio.Event()
        self._going.set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    # -- what a test says ----------------------------------------------------------------------

    def say(self, ids: Sequence[int]) -> None:
        """The next generation's tokens; the last one ends it if it is a stop token."""
        self._scripts.append(list(ids))

    def fail(self, kind: FaultKind, *, after: int = 0, status: int = 500) -> None:
        """The next generation fails so, after some tokens."""
        self._faults.append(Fault(kind, after, status))

    def hold(self, at: int) -> asyncio.Event:
        """The next generation waits before its token ``at`` (or for an abort) for the event."""
        event = asyncio.Event()
        self._holds.append((at, event))
        return event

    async def die(self) -> None:
        """Nobody listens any more, and every connection breaks."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()
        self.cut()

    def cut(self) -> None:
        """Every connection breaks; the engine lives."""
        assert self._runner is not None and self._runner.server is not None
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def revive(self, weight_version: str | None = None) -> None:
        """A new process on the same port: nothing runs, and it is not paused."""
        assert self._runner is not None
        self._going.set()
        self.weight_version = weight_version or self.weight_version
        await self._listen(int(self.url.rpartition(":")[2]))

    # -- the server ----------------------------------------------------------------------------

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Its URL."""
        app = web.Application(client_max_size=1 << 30)
        routes = {
            "/generate": self._generate,
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/flush_cache": self._ok,
        }
        for path, handler in routes.items():
            app.router.add_post(path, handler)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health_generate", self._health_generate)
        app.router.add_get("/get_model_info", self._info)
        app.router.add_get("/get_server_info", self._server_info)
        runner = self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01
        )
        await runner.setup()
        await self._listen(port)
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self.url
        finally:
            for run in self.running.values():
                run.aborted.set()
            await runner.cleanup()

    async def _listen(self, port: int) -> None:
        assert self._runner is not None
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()

    async def _ok(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.ill else 200)

    async def _health_generate(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._going.is_set() else 503)

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": "scripted",
                "weight_version": self.weight_version,
                # A real SGLang has no such field here.
                **({} if self.like_sglang else {"context_length": self.context_length}),
            }
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        told = {"context_length": None, "max_req_input_len": 2042}
        return web.json_response({**told, "max_running_requests": self.slots})

    async def _abort_request(self, http: web.Request) -> web.Response:
        rid = (await http.json()).get("rid")
        self.aborted.append(rid)
        for running in self.running.values():
            if running.rid.startswith(rid):  # as SGLang does
                running.aborted.set()
        return web.Response()

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await http.json())["mode"]
        self.pauses.append(mode)
        self._going.clear()
        if mode == "abort":
            for run in self.running.values():
                run.aborted.set()
        return web.json_response({"status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self._going.set()
        return web.json_response({"status": "ok"})

    async def _update(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body["model_path"].startswith("/no/"):
            return web.json_response(
                {"success": False, "message": "no such checkpoint"}, status=400
            )
        self.weight_version = str(body["weight_version"])
        answer = {"success": True, "message": "ok", "num_paused_requests": len(self.running)}
        return web.json_response(answer)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = orjson.loads(await http.read())
        self.requests.append(body)
        problem = self._problem(body)
        if problem:
            return web.json_response({"error": {"message": problem}}, status=400)
        fault = self._faults.popleft() if self._faults else None
        if fault is not None and fault.kind == "status":
            return web.json_response({"error": {"message": "scripted"}}, status=fault.status)
        run = Running(
            rid=body.get("rid", "anonymous"),
            prompt=body["input_ids"],
            params=body["sampling_params"],
            script=self._scripts.popleft() if self._scripts else None,
            fault=fault,
        )
        hold = self._holds.popleft() if self._holds else None
        self.running[run.rid] = run
        self.most_running = max(self.most_running, len(self.running))
        try:
            async with self._free:
                return await self._sampled(http, body, run, hold)
        except asyncio.CancelledError:
            self.cancelled.append(run.rid)
            raise
        finally:
            self.running.pop(run.rid, None)

    async def _sampled(
        self, http: web.Request, body: dict[str, Any], run: Running, hold: Hold
    ) -> web.StreamResponse:
        if body.get("stream"):
            return await self._stream(http, body, run, hold)
        async for _ in self._tokens(run, hold):
            pass
        if self._broken(run):
            return self._break(http, run)
        return web.Response(body=self._event(body, run, 0), content_type="application/json")

    def _problem(self, body: dict[str, Any]) -> str | None:
        params = body["sampling_params"]
        unknown = set(params) - _SAMPLING
        if unknown:
            return f"unknown parameters {unknown}"
        if not isinstance(params.get("sampling_seed", 0), int):
            return "bad sampling_seed"
        if params.get("temperature", 1) < 0 or not 0 < params.get("top_p", 1) <= 1:
            return "bad temperature or top_p"
        if params.get("top_k", -1) < -1:
            return "bad top_k"
        if len(body["input_ids"]) >= self.context_length:
            return "the prompt is longer than the context"
        return None

    async def _stream(
        self, http: web.Request, body: dict[str, Any], run: Running, hold: Hold
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        sent = 0
        async for _ in self._tokens(run, hold):
            if self._broken(run) and len(run.ids) == sent:
                if run.fault is not None and run.fault.kind == "error_event":
                    await response.write(b'data: {"error": {"message": "scripted"}}\n\n')
                elif run.fault is not None and run.fault.kind == "no_end":
                    await response.write_eof()
                    return response
                else:
                    return self._break(http, run)
                break
            await response.write(b"data: " + self._event(body, run, sent) + b"\n\n")
            sent = len(run.ids)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    @staticmethod
    def _broken(run: Running) -> bool:
        kinds = ("die", "error_event", "no_end")
        return run.fault is not None and run.fault.kind in kinds and len(run.ids) >= run.fault.after

    @staticmethod
    def _break(http: web.Request, run: Running) -> web.Response:
        if http.transport is not None:
            http.transport.abort()
        return web.Response()

    async def _tokens(self, run: Running, hold: Hold) -> AsyncIterator[None]:
        """One more token, and the end, at each step."""
        limit = int(run.params.get("max_new_tokens", 128))
        stops = run.params.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        stop_ids = set(run.params.get("stop_token_ids") or ())
        while run.finish is None:
            if self._broken(run):
                yield
                return
            if hold is not None and len(run.ids) == hold[0]:
                await self._either(hold[1], run.aborted)
            if not run.aborted.is_set():
                await self._either(self._going, run.aborted)
            if run.aborted.is_set():
                run.finish = {"type": "abort", "message": "aborted"}
                yield
                return
            token = self._next(run)
            run.ids.append(token)
            run.logprobs.append(-0.5 - (token % 7) / 8)
            run.versions.append(self.weight_version)
            text = self.decode(run.ids)
            matched = next((s for s in stops if s in text), None)
            ended = run.script is not None and len(run.ids) == len(run.script)
            if self._broken(run):
                pass  # before it can say that this was the last one
            elif token in stop_ids:
                run.finish = {"type": "stop", "matched": token}
            elif matched is not None:
                run.finish = {"type": "stop", "matched": matched}
            elif len(run.ids) >= limit:
                run.finish = {"type": "length", "length": len(run.ids)}
            elif ended:
                run.finish = {"type": "stop", "matched": None}
            yield
            await asyncio.sleep(self.pace)

    @staticmethod
    async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
        if one.is_set():
            return
        waits = [asyncio.ensure_future(e.wait()) for e in (one, other)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await wait

    @staticmethod
    def _next(run: Running) -> int:
        k = len(run.ids)
        if run.script is not None:
            return run.script[k]
        # Of the whole context, so that a resumed request goes on as if it had not been cut.
        return 20 + (7 * (len(run.prompt) + k)) % 60

    def _event(self, body: dict[str, Any], run: Running, sent: int) -> bytes:
        start = sent if self.incremental else 0
        ids = run.ids[start:]
        logprobs: list[Any] = list(run.logprobs[start:])
        text = self.decode(run.ids)
        matched = (run.finish or {}).get("matched")
        if isinstance(matched, str):
            text = text[: text.index(matched)]
        fault = run.fault.kind if run.fault and len(run.ids) > run.fault.after else None
        entries = [[p, i, None] for p, i in zip(logprobs, ids, strict=True)]
        if fault == "disagree" and entries:
            entries[-1][1] += 1
        if fault == "null" and entries:
            entries[-1][0] = None
        spans = self._spans(run)
        if fault == "spans":
            spans = [{"version": "0", "start": 0, "end": 0}]
        meta: dict[str, Any] = {
            "id": run.rid,
            "finish_reason": run.finish,
            "prompt_tokens": len(run.prompt),
            "completion_tokens": len(run.ids),
            "cached_tokens": 0,
            "weight_version": run.versions[-1] if run.versions else self.weight_version,
            "weight_versions": spans,
            "e2e_latency": 0.001,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = entries
        event = orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})
        if fault == "nan":
            # As Python's json would write it.
            event = event.replace(str(run.logprobs[-1]).encode(), b"NaN")
        if fault == "garbage":
            event = b'{"meta_info": {}}'
        return event

    @staticmethod
    def _spans(run: Running) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for k, version in enumerate(run.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = k + 1
            else:
                spans.append({"version": version, "start": k, "end": k + 1})
        return spans or [{"version": "0", "start": 0, "end": 0}]
