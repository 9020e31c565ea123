"""The HTTP server of the embedded engine, in SGLang's native contract."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from any_agent.auth.access import require_loopback_client
from any_agent.engine.embedded.engine import EmbeddedEngine, Generation
from any_agent.engine.embedded.generate_schema import AnswerWriter, json_object, parse_generate
from any_agent.engine.embedded.live_adapters import LiveAdapters
from any_agent.engine.embedded.weight_updates import ADAPTER_PREFIX, WeightRoutes
from any_agent.errors import (
    AnyAgentError,
    EngineUnavailable,
    Forbidden,
    InvalidRequest,
    Unauthenticated,
)
from any_agent.keys import SecretHash
from any_agent.runtime.bounded_server import (
    BoundedRunner,
    is_crowded,
    read_body,
    require_room,
)
from any_agent.runtime.ports import reserve
from any_agent.types import GenerationHyperparameters, ModelRequest

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HEALTH_TIMEOUT = 20.0
_MAX_BODY = 32 * 2**20  # bytes
BODY_TIMEOUT = 120.0  # seconds
_LOGGED = 300  # characters of an error that are logged
_DONE = b"data: [DONE]\n\n"
_KEYLESS = {"key": "a key", "do": "start the engine with --key-file"}


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(value), status=status, headers=headers, content_type="application/json"
    )


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await _answer(request, handler)
    if is_crowded(request):
        response.force_close()
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        require_room(request)
        return await handler(request)
    except AnyAgentError as exc:
        return _json(exc.body(), exc.status, exc.headers())
    except web.HTTPException:
        raise
    except ConnectionError:
        # The caller left before its answer; this response goes nowhere.
        return web.Response(status=499)
    except Exception as exc:
        logger.exception("a request of %s failed", request.path)
        return _json(AnyAgentError(f"{type(exc).__name__}: {exc}").body(), 500)


class EngineServer:
    """The HTTP routes of one engine."""

    def __init__(
        self, engine: EmbeddedEngine, *, incremental: bool = False, key: str | None = None
    ) -> None:
        """``key``: the key that every request must carry, except `GET /health`, which only tells
        that the engine lives; None: programs of this machine need none."""
        self.engine = engine
        self.incremental = incremental
        self._key = SecretHash(key) if key is not None else None
        self._live = LiveAdapters(engine)
        self._weights = WeightRoutes(engine, self._engine_of)
        self._health_checks = 0
        self._started = time.time()
        decoder = engine.loaded.decoder
        self._decode = {skip: decoder(skip_special_tokens=skip) for skip in (False, True)}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_errors, self._authorize])
        for prefix in ("", ADAPTER_PREFIX):
            self._add_routes(app.router, prefix)
        app.router.add_delete(ADAPTER_PREFIX, self.remove_adapter)
        self._weights.add_to(app)
        return app

    def _add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Register what the engine, and each of its adapters, does beside changing weights."""
        router.add_post(f"{prefix}/generate", self.generate)
        router.add_post(f"{prefix}/abort_request", self.abort_request)
        router.add_post(f"{prefix}/pause_generation", self.pause_generation)
        router.add_post(f"{prefix}/continue_generation", self.continue_generation)
        for method in ("GET", "POST"):
            router.add_route(method, f"{prefix}/flush_cache", self.flush_cache)
        router.add_get(f"{prefix}/health", self.health)
        router.add_get(f"{prefix}/health_generate", self.health_generate)
        router.add_get(f"{prefix}/get_weight_version", self.weight_version)
        for path in ("/model_info", "/get_model_info"):
            router.add_get(prefix + path, self.model_info)
        for path in ("/server_info", "/get_server_info"):
            router.add_get(prefix + path, self.server_info)

    def _engine_of(self, http: web.Request) -> EmbeddedEngine:
        """Return the engine, or the live adapter that the path names."""
        name = http.match_info.get("adapter")
        return self.engine if name is None else self._live.find(name)

    async def remove_adapter(self, http: web.Request) -> web.Response:
        name = http.match_info["adapter"]
        await self._live.remove(name)
        return _json({"message": f"The adapter {name} was removed.", "status": "ok"})

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = request.headers
        if "Origin" in headers or "Sec-Fetch-Site" in headers:
            raise Forbidden("the engine serves the proxy, never a web page: call the service")
        if self._key is None:
            hosts = headers.getall("Host", ())
            require_loopback_client(hosts=hosts, origins=(), fetch_sites=(), **_KEYLESS)
        elif request.path != "/health" and not self._key.matches(_bearer(headers)):
            raise Unauthenticated(
                "this engine needs its key (Authorization: Bearer <key>): its own service has it; "
                "for engine.urls set engine.key"
            )
        return await handler(request)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        try:
            return await self._generate(http)
        except AnyAgentError as exc:
            _log_failure(exc)
            raise

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        started = time.perf_counter()
        engine = self._engine_of(http)
        call = parse_generate(await _read(http))
        processor = await engine.make_processor(call.request)
        generation = engine.submit(call.request, stream=call.stream, processor=processor)
        try:
            writer = AnswerWriter(
                call,
                generation.request,
                self._decode[call.skip_special_tokens],
                version=lambda: engine.variant.version,
                started=started,
            )
            if call.stream:
                return await self._stream(http, generation, writer)
            return _json(writer.whole(await generation.finished()))
        finally:
            generation.close()

    async def _stream(
        self, http: web.Request, generation: Generation, writer: AnswerWriter
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
            }
        )
        await response.prepare(http)
        finish = None
        try:
            while finish is None:
                count, finish = await generation.progress()
                event = writer.event(count, finish, incremental=self.incremental)
                await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        except AnyAgentError as exc:
            # The status is sent already: the error is an event, as in SGLang.
            _log_failure(exc)
            await response.write(b"data: " + orjson.dumps(exc.body()) + b"\n\n")
        await response.write(_DONE)
        await response.write_eof()
        return response

    async def abort_request(self, http: web.Request) -> web.Response:
        body = await _read(http)
        rid, everything = body.get("rid"), body.get("abort_all") is True
        if not everything and not isinstance(rid, str):
            raise InvalidRequest("abort_request needs rid, or abort_all: true", param="rid")
        done = self._engine_of(http).abort(None if everything else rid, "aborted by request")
        await asyncio.wrap_future(done)
        return web.Response()

    async def pause_generation(self, http: web.Request) -> web.Response:
        mode = (await _read(http)).get("mode", "abort")
        if mode not in ("abort", "in_place"):
            raise InvalidRequest(f"mode must be abort or in_place, not {mode!r}", param="mode")
        await self._engine_of(http).pause(mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: web.Request) -> web.Response:
        await self._engine_of(http).resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, http: web.Request) -> web.Response:
        flushed = await self._engine_of(http).clear_cache()
        text = "Cache flushed.\n" if flushed else "Not flushed: requests are running.\n"
        return web.Response(text=text, status=200 if flushed else 400)

    async def health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine_of(http).loop.alive else 503)

    async def health_generate(self, http: web.Request) -> web.Response:
        """Generate one token as a health check."""
        engine = self._engine_of(http)
        if engine.variant.paused is not None:
            raise EngineUnavailable("generation is paused; call /continue_generation")
        self._health_checks += 1
        config = GenerationHyperparameters(max_new_tokens=1, temperature=0)
        request = ModelRequest(f"HEALTH_CHECK_{self._health_checks}", [0], config)
        generation = engine.submit(request, stream=False)
        try:
            finish = await asyncio.wait_for(generation.finished(), _HEALTH_TIMEOUT)
        except TimeoutError:
            raise EngineUnavailable(f"no token within {_HEALTH_TIMEOUT:g} s") from None
        finally:
            generation.close()
        return web.Response(status=503 if finish.type == "abort" else 200)

    async def weight_version(self, http: web.Request) -> web.Response:
        return _json({"weight_version": self._engine_of(http).variant.version})

    async def model_info(self, http: web.Request) -> web.Response:
        engine = self._engine_of(http)
        loaded = engine.loaded
        return _json(
            {
                "model_path": engine.model_path,
                "tokenizer_path": loaded.path,
                "is_generation": True,
                "weight_version": engine.variant.version,
                "model_type": loaded.model.config.model_type,
                "architectures": loaded.model.config.architectures,
                "vocab_size": loaded.vocab_size,
                "context_length": loaded.context_length,
                "adapters": list(engine.adapters.values()),
            }
        )

    async def server_info(self, http: web.Request) -> web.Response:
        engine = self._engine_of(http)
        features = await engine.capabilities()
        options, (running, waiting) = engine.options, engine.counts
        return _json(
            {
                "engine": "any-agent embedded",
                "model_path": engine.model_path,
                "tokenizer_path": engine.loaded.path,
                "device": str(engine.loaded.device),
                "dtype": str(engine.loaded.dtype).removeprefix("torch."),
                "context_length": engine.loaded.context_length,
                "max_running_requests": options.max_running_requests,
                "max_queued_requests": options.max_queued_requests,
                "max_total_tokens": options.max_total_tokens,
                "incremental_streaming_output": self.incremental,
                "capabilities": [name for name in features.names() if getattr(features, name)],
                "weight_version": engine.variant.version,
                "paused": engine.variant.paused,
                "startup_time": self._started,
                "num_running_requests": running,
                "num_waiting_requests": waiting,
                "steps": engine.loop.steps,
                "live_adapters": self._live.describe() if engine is self.engine else None,
            }
        )


async def _read(http: web.Request) -> dict[str, Any]:
    return json_object(await read_body(http, _MAX_BODY, BODY_TIMEOUT))


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _log_failure(error: AnyAgentError) -> None:
    """Log an error for the operator, unless the caller may retry, as many may at once."""
    if error.retry_after is None:
        named = "" if error.param is None else f" ({error.param})"
        logger.warning(
            "a request failed with %d%s: %s", error.status, named, error.message[:_LOGGED]
        )


async def listen(server: EngineServer, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Serve on a socket; return the runner to clean up and the real port (for port 0)."""
    runner = BoundedRunner(server.app(), shutdown_timeout=5)
    await runner.setup()
    await web.SockSite(runner, reserve(host, port)).start()
    return runner, int(runner.addresses[0][1])
