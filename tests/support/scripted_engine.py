"""An engine that speaks SGLang's native contract and does what a test tells it to.

It samples nothing: tokens come from a formula or from what the test queued by `say`. Their
log-probabilities come from a formula, too, or, given a `model`, from its forward pass over the
prompt and the chosen tokens. Faults are queued by `fail`, lasting ones are `planted`, and a
generation can be held at a token by `hold`, or at each by `step`. `die` is a kill -9, `revive` a
new process on the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from any_agent.errors import InvalidRequest
from tests.support.scripted_answers import answer, problem
from tests.support.scripted_run import Fault, FaultKind, Plant, Running, Wait

if TYPE_CHECKING:
    from tests.support.true_logprobs import TrueModel

VOCABULARY = 380
"""Of the tests' tiny model."""
_TRUNCATING = ("truncates", "truncates_unsaid")


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
        model: TrueModel | None = None,
        resumes: bool = False,
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
        self.model = model
        self.resumes = resumes
        """Whether a script goes on where an update or a death has cut it; else each attempt takes
        what comes next."""
        self.vocabulary = VOCABULARY
        """Ids that it knows, those of the tests' model: a bias of another one is refused, as by
        SGLang."""
        self.planted: set[Plant] = set()
        self.told: dict[str, Any] = {}
        """More for `/server_info`, over what it says."""
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
        self._waits: deque[Wait] = deque()
        self._begun: dict[str, tuple[int, list[int]]] = {}
        """The scripts of requests by rid, with the lengths of their prompts."""
        self._going = asyncio.Event()
        self._going.set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    # -- what a test says ----------------------------------------------------------------------

    def say(self, ids: Sequence[int]) -> None:
        """The next generation's tokens; the last one ends it if it is a stop token."""
        self._scripts.append(list(ids))

    def hush(self) -> None:
        """Forget what was to be said and nobody asked for."""
        self._scripts.clear()

    def fail(self, kind: FaultKind, *, after: int = 0, status: int = 500) -> None:
        """The next generation fails so, after some tokens."""
        self._faults.append(Fault(kind, after, status))

    def hold(self, at: int) -> asyncio.Event:
        """The next generation waits before its token ``at`` (or for an abort) for the event."""
        self._waits.append(Wait(at))
        return self._waits[-1].event

    def step(self) -> asyncio.Semaphore:
        """The next generation waits before each token (or for an abort) for a release."""
        steps = asyncio.Semaphore(0)
        self._waits.append(Wait(steps=steps))
        return steps

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

    @property
    def paused(self) -> bool:
        return not self._going.is_set()

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
        for prefix in ("/", "/get_"):
            app.router.add_get(f"{prefix}model_info", self._info)
            app.router.add_get(f"{prefix}server_info", self._server_info)
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
                "model_path": str(self.model.folder) if self.model else "scripted",
                "weight_version": self.weight_version,
                # A real SGLang has no such field here.
                **({} if self.like_sglang else {"context_length": self.context_length}),
            }
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        told: dict[str, Any] = {"context_length": None, "max_req_input_len": 2042}
        told |= {"max_running_requests": self.slots, "grammar_backend": "xgrammar"}
        told |= {"enable_deterministic_inference": True}
        return web.json_response(told | self.told)

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
        if self.model is not None and "stale_weights" not in self.planted:
            try:
                self.model.load(Path(body["model_path"]))
            except InvalidRequest as error:
                return web.json_response({"success": False, "message": str(error)}, status=400)
        if "stale_version" not in self.planted:
            self.weight_version = str(body["weight_version"])
        answer = {"success": True, "message": "ok", "num_paused_requests": len(self.running)}
        return web.json_response(answer)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = orjson.loads(await http.read())
        self.requests.append(body)
        refusal = problem(body, self.context_length) or self._unknown_bias(body)
        if refusal:
            return web.json_response({"error": {"message": refusal}}, status=400)
        fault = self._faults.popleft() if self._faults else None
        if fault is not None and fault.kind == "status":
            return web.json_response({"error": {"message": "scripted"}}, status=fault.status)
        run = self._begin(body, fault)
        self.running[run.rid] = run
        self.most_running = max(self.most_running, len(self.running))
        try:
            async with self._free:
                return await self._sampled(http, body, run)
        except asyncio.CancelledError:
            self.cancelled.append(run.rid)
            raise
        finally:
            self.running.pop(run.rid, None)

    def _unknown_bias(self, body: dict[str, Any]) -> str | None:
        known = self.vocabulary
        biased = [int(token) for token in body["sampling_params"].get("logit_bias", ())]
        if all(0 <= token < known for token in biased):
            return None
        return f"logit_bias must has keys in [0, {known - 1}], got {max(biased)}."

    def _begin(self, body: dict[str, Any], fault: Fault | None) -> Running:
        prompt, rid = body["input_ids"], body.get("rid", "anonymous")
        read = prompt[len(prompt) // 2 :] if self.planted & {*_TRUNCATING} else prompt
        return Running(
            rid=rid,
            prompt=read,
            params=body["sampling_params"],
            script=self._script(rid, len(prompt)),
            fault=fault,
            wait=self._waits.popleft() if self._waits else None,
            prompt_tokens=len(prompt if "truncates_unsaid" in self.planted else read),
            top=body.get("top_logprobs_num") or 0,
        )

    def _script(self, rid: str, prompt: int) -> list[int] | None:
        attempt, _, request = rid.partition("-")
        if self.resumes and attempt != "0" and request in self._begun:
            began, begun = self._begun[request]
            return begun[prompt - began :]
        script = self._scripts.popleft() if self._scripts else None
        if self.resumes and script is not None:
            self._begun[request] = (prompt, script)
        return script

    async def _sampled(
        self, http: web.Request, body: dict[str, Any], run: Running
    ) -> web.StreamResponse:
        if body.get("stream"):
            return await self._stream(http, body, run)
        async for _ in self._tokens(run):
            pass
        if self._broken(run):
            return self._break(http, run)
        return web.Response(body=self._event(body, run, 0), content_type="application/json")

    async def _stream(
        self, http: web.Request, body: dict[str, Any], run: Running
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        sent = 0
        async for _ in self._tokens(run):
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

    async def _tokens(self, run: Running) -> AsyncIterator[None]:
        """One more token, and the end, at each step."""
        limit = int(run.params.get("max_new_tokens", 128))
        stops = run.params.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        stop_ids = set(run.params.get("stop_token_ids") or ())
        while run.finish is None:
            if self._broken(run):
                yield
                return
            await self._held(run)
            if not run.aborted.is_set() and not self._going.is_set():
                await self._either(self._going.wait(), run.aborted)
            if run.aborted.is_set():
                run.finish = {"type": "abort", "message": "aborted"}
                yield
                return
            scaled = "unscaled" not in self.planted
            token = run.sample(self.weight_version, self.model, scaled=scaled)
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

    async def _held(self, run: Running) -> None:
        wait = run.wait
        if wait is None:
            return
        if wait.steps is not None:
            await self._either(wait.steps.acquire(), run.aborted)
        elif len(run.ids) == wait.at:
            run.held = True
            await self._either(wait.event.wait(), run.aborted)

    @staticmethod
    async def _either(one: Coroutine[Any, Any, Any], other: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(wait) for wait in (one, other.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await wait

    def _event(self, body: dict[str, Any], run: Running, sent: int) -> bytes:
        ids = [i + 1 for i in run.ids] if "other_text" in self.planted else run.ids
        text = self.decode(ids)
        matched = (run.finish or {}).get("matched")
        if isinstance(matched, str):
            text = text.partition(matched)[0]
        return answer(
            run,
            text,
            start=sent if self.incremental else 0,
            with_logprobs=bool(body.get("return_logprob")),
            weight_version=self.weight_version,
        )
