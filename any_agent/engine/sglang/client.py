"""The client of SGLang's native HTTP contract; the embedded engine speaks it too."""

from __future__ import annotations

import asyncio
import logging
import socket
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakSet

import aiohttp
import numpy as np
import orjson

from any_agent.engine.base import HALF_LOADED, Capabilities, RemoteEngine
from any_agent.engine.model_fingerprint import ModelFingerprint, other_model
from any_agent.engine.pause_gate import Drain, Outage, PauseGate
from any_agent.engine.resumed_stop_strings import ResumedStopMatcher
from any_agent.engine.sglang.requests import (
    JSON_HEADERS,
    EngineBusy,
    SGLangControl,
    bearer,
    capabilities_of,
    failure,
    generate_body,
    slots_of,
    version_number,
)
from any_agent.engine.sglang.responses import ChunkReader, events
from any_agent.engine.sglang.watch import silences
from any_agent.errors import ConfigError, EngineUnavailable
from any_agent.types import GenerationChunk, ModelRequest

log = logging.getLogger(__name__)

_KEEPALIVE = 3.0
"""Seconds; below the 5 after which uvicorn, and so SGLang, closes an idle connection."""
_HEALTH_TIMEOUT = 20.0  # seconds, as SGLang's own: an engine with a long prefill is healthy
_MAX_DRAIN = 20.0
"""Seconds that a weight update waits for calls under a grammar, which cannot be resumed."""
LONG_REPLY = 262_144
"""Bytes from which on a reply is parsed in a thread: megabytes, with many likeliest tokens, take
tenths of a second."""
_MAX_FRUITLESS = 5  # consecutive resubmissions of one call whose engine died before a token came


class _EngineDied(EngineUnavailable):
    """The connection to the engine broke, or could not be made."""


class SGLangEngine(RemoteEngine):
    """One engine process, reached by URL.

    ``decode`` turns token ids into text; stop strings that begin before a weight update, or the
    engine's death, and end after it need it. Calls wait at most ``update_wait`` seconds for an
    update, and as long for an engine that is away. ``shape`` describes the expected model: token
    ids that it lacks are never sent, and an engine that returns with another model counts as away.
    ``key`` is the key that the engine requires. Open it inside a running event loop; ``close`` it.

    With ``in_place``, SGLang's stream reports the current version: a token that was being sampled
    at the pause gets the version after it. Whole replies, and ``resume``, are exact.
    """

    def __init__(
        self,
        url: str,
        *,
        decode: Callable[[Sequence[int]], str],
        update_mode: Literal["resume", "in_place"] = "resume",
        update_wait: float = 120.0,
        request_timeout: float = 600.0,
        shape: ModelFingerprint | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(url)
        self._shape = shape or ModelFingerprint()
        self._decode = decode
        self._pause_mode = "abort" if update_mode == "resume" else "in_place"
        self._gate = PauseGate("a weight update", max_wait=update_wait)
        self._outage = Outage(self._serves, max_wait=update_wait)
        self._uncuttable = Drain(max_wait=min(_MAX_DRAIN, update_wait / 2))
        self._capabilities: Capabilities | None = None
        self._version = 0
        self._only_silent = False
        """The engine is away only in that it left a question of :meth:`watch` unanswered."""
        self._logged = ""
        """The last logged error of an engine that returned with another model."""
        self._sockets: WeakSet[socket.socket] = WeakSet()
        # No limit on connections: the proxy bounds the running calls, and a full pool would be a
        # hidden queue. No total time-out: a long completion is not an error.
        self._http = aiohttp.ClientSession(
            headers=bearer(key),
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEPALIVE, socket_factory=self._make_socket
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=request_timeout),
            json_serialize=lambda data: orjson.dumps(data).decode(),
        )
        self._control = SGLangControl(self._http, self.url)
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        return self._version

    @property
    def paused(self) -> bool:
        return not self._gate.is_open

    @property
    def away(self) -> bool:
        return not self._outage.gate.is_open

    async def close(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=2)
        await self._outage.close()
        await self._http.close()

    async def watch(self, *, hung_after: float) -> None:
        hung = False
        async with aclosing(silences(self._control)) as silent:
            async for seconds in silent:
                self.silence = seconds or 0.0
                if seconds is None:
                    self._begin_outage()
                elif seconds:
                    self._begin_silence()
                elif self._only_silent and self.away:
                    # The same process answers: it was late, and needs no more proof than that. A
                    # sample would wait behind all the calls that may have made it late.
                    log.info("the engine at %s answers again", self.url)
                    self._outage.end()
                hangs = self.silence >= hung_after
                if hangs and not hung:
                    log.warning("the engine at %s hangs; its calls are cut off", self.url)
                    self._cut_connections()
                hung = hangs

    def _make_socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        made = socket.socket(*info[:3])
        self._sockets.add(made)
        return made

    def _cut_connections(self) -> None:
        """End all requests as the engine's death does; its calls wait like new ones."""
        for each in tuple(self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    async def info(self) -> dict[str, Any]:
        """Return the engine's `/model_info`; EngineUnavailable if it does not answer."""
        data = await self._control.info("model_info")
        if "weight_version" in data:
            try:
                self._version = version_number(data["weight_version"])
            except (TypeError, ValueError):
                self._version = HALF_LOADED
        return data

    async def server_info(self) -> dict[str, Any]:
        """Return the engine's start options; EngineUnavailable if it does not answer."""
        return await self._control.info("server_info")

    async def require_model(self) -> None:
        """Raise ConfigError if the engine serves a model of another shape than the expected one.

        If its weights are half loaded, only its own description is compared.
        """
        info = await self.info()
        self._shape.require_same(info, self.url)
        size = self._shape.vocab_size
        if size is None or info.get("vocab_size") is not None or self._version == HALF_LOADED:
            return
        # SGLang does not report its vocabulary's size, but refuses a bias of an unknown id.
        for token, known in ((size - 1, True), (size, False)):
            if await self._control.knows(token) is not known:
                less = "fewer" if known else "more"
                raise other_model(self.url, f"it knows {less} than {size} token ids")

    async def context_length(self) -> int:
        length = (await self.info()).get("context_length")
        if length is None:
            # SGLang reports only the longest prompt, a few tokens less.
            length = (await self.server_info()).get("max_req_input_len")
        if length is None:
            raise ConfigError(
                f"the engine at {self.url} does not report its context length; "
                "set engine.context_length"
            )
        return int(length)

    async def adapter_names(self) -> frozenset[str]:
        """Return the names of an embedded engine's adapters; SGLang tells none of its own."""
        told = (await self.info()).get("adapters") or ()
        return frozenset(str(each).partition("@")[0] for each in told)

    async def slots(self) -> int | None:
        try:
            return slots_of(await self.server_info())
        except EngineUnavailable:
            return None

    async def capabilities(self) -> Capabilities:
        """Return the engine's features; read once, and again after its death."""
        if self._capabilities is None:
            info = await self.server_info()
            if info.get("incremental_streaming_output") is False:
                log.warning(
                    "the engine at %s sends the whole output again with every token; start it with "
                    "--incremental-streaming-output",
                    self.url,
                )
            self._capabilities = capabilities_of(info)
        return self._capabilities

    async def pause(self) -> None:
        await self.hold()
        await self._control.request("POST", "/pause_generation", {"mode": self._pause_mode})

    async def resume(self, version: int) -> None:
        await self._control.request("POST", "/continue_generation", {})
        self.release(version)

    async def hold(self) -> None:
        """Make calls wait here, while another process pauses the engine for an update.

        Returns once the calls that must not be cut have ended. The others run until the engine
        aborts them, and then wait, too, until :meth:`release`.
        """
        self._gate.close()
        if self._pause_mode == "abort":
            await self._uncuttable.wait_idle()

    def release(self, version: int | None = None) -> None:
        if version is not None:
            self._version = version
        self._gate.open()

    async def generate(
        self, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[GenerationChunk]:
        """Sample a completion, across weight updates and deaths of the engine.

        Tokens sampled before one stay: their log-probabilities are those of their version's weights
        over the whole context. The rest is sampled from prompt + partial output, computed anew.

        A grammar cannot continue an earlier output, so a call under one is not resumed: an update
        waits for it, and if it is cut nevertheless it ends as EngineUnavailable. Penalties count
        the new output only; such a call is never trained on.
        """
        request.require_ids()
        self._shape.require_known(request)
        done = array("i")
        adapter: str | None = None
        attempt = fruitless = 0
        while True:
            await self._ready()
            closings, before = self._gate.closings, len(done)
            part = _remaining_request(request, done, attempt)
            seam = ResumedStopMatcher(done, request.gconfig.stop, self._decode)
            cut = GenerationChunk([], [], [])
            why = "update"
            has_grammar = request.gconfig.grammar is not None
            try:
                async with (
                    self._uncuttable.track(has_grammar),
                    aclosing(self._attempt(part, stream=stream)) as chunks,
                ):
                    async for raw in chunks:
                        chunk = seam.cut(raw)
                        if chunk.output_ids and done and chunk.adapter != adapter:
                            raise EngineUnavailable(
                                f"the engine came back with other files of the adapter "
                                f"{request.adapter}, which cannot continue this call; try again",
                                retry_after=2,
                            )
                        adapter = chunk.adapter if chunk.output_ids else adapter
                        done.extend(chunk.output_ids)
                        self._update_version(chunk, closings)
                        if chunk.stop_reason == "abort":
                            cut = replace(chunk, stop_reason=None)
                            break
                        yield chunk
                        if chunk.stop_reason is not None:
                            return
                if self._gate.closings == closings:
                    raise EngineUnavailable(
                        "the engine aborted the request; try again", retry_after=2
                    )
            except EngineUnavailable as error:
                fruitless = 0 if len(done) > before else fruitless + 1
                if fruitless > _MAX_FRUITLESS:
                    raise
                if await self._has_died(error):
                    why = "death"
                elif self._gate.closings == closings:
                    raise
                # Otherwise an update runs: SGLang reports tokens that it sampled before under the
                # name that the weights have during the update, which is no version.
            if len(done) >= request.gconfig.max_new_tokens:
                yield replace(cut, stop_reason="length")
                return
            if has_grammar and done:
                raise EngineUnavailable(
                    f"the engine's {why} cut a call under a grammar, which cannot be resumed; "
                    "try again",
                    retry_after=2,
                )
            if cut.output_ids:
                yield cut
            attempt += 1
            self.resubmitted[why] += 1

    async def _ready(self) -> None:
        while self.paused or self.away:
            await self._gate.wait_open()
            await self._outage.gate.wait_open()

    async def _has_died(self, error: EngineUnavailable) -> bool:
        """Return True if an attempt failed because the engine is gone; calls then wait for it."""
        # A living engine's refusal (such as a full queue) is an answer for the caller.
        if not isinstance(error, _EngineDied) and await self._outage.is_over():
            return False
        self._begin_outage()
        return True

    def _begin_outage(self) -> None:
        if not self.away:
            log.warning("the engine at %s is gone; calls wait for it", self.url)
        self._outage.begin()
        self._only_silent = False
        self._capabilities = None

    def _begin_silence(self) -> None:
        if not self.away:
            log.warning("the engine at %s does not answer; calls wait for it", self.url)
            self._outage.begin()
            self._only_silent = True

    def _update_version(self, chunk: GenerationChunk, closings: int) -> None:
        """Take the version of a call that no update cut: a restarted engine may have another."""
        if chunk.versions and not self.paused and closings == self._gate.closings:
            self._version = chunk.versions[-1]

    async def _attempt(
        self, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[GenerationChunk]:
        """Send one request to the engine; its last chunk has a stop reason, or it raises."""
        if self._pause_mode == "in_place":
            # The cache survives an update: a call must not use a prefix of another version.
            salt = f"{request.cache_salt or ''}@{self._version}"
            request = replace(request, cache_salt=salt)
        runs = True
        try:
            async with self._http.post(
                f"{self.url}/generate",
                data=generate_body(request, stream=stream),
                headers=JSON_HEADERS,
            ) as response:
                if response.status != 200:
                    runs = False
                    raise await failure(response)
                reader = ChunkReader(request, self._shape.vocab_size)
                if stream:
                    async for event in events(response):
                        chunk = reader.read(event)
                        runs = chunk.stop_reason is None
                        yield chunk
                        if not runs:
                            return
                    runs = False
                    raise _EngineDied(
                        "the engine closed the stream without a finish reason", retry_after=2
                    )
                raw = await response.read()
                if len(raw) > LONG_REPLY:
                    chunk = await asyncio.to_thread(_read_reply, reader, raw)
                else:
                    chunk = _read_reply(reader, raw)
                runs = False
                yield chunk
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            broken = isinstance(error, aiohttp.ClientError) and not _is_silence(error)
            runs = runs and not broken
            kind = _EngineDied if broken else EngineUnavailable
            raise kind(
                f"the inference engine failed ({type(error).__name__}); try again", retry_after=2
            ) from error
        finally:
            if runs and not self.away and not self._http.closed:
                self._abort(request.rid)

    def _abort(self, rid: str) -> None:
        """Tell the engine to abort a request whose caller left; this never blocks or fails."""

        async def send() -> None:
            try:
                await self._control.request("POST", "/abort_request", {"rid": rid})
            except (EngineUnavailable, ConfigError):
                log.debug("cannot abort request %s: the engine is away", rid)

        task = asyncio.get_running_loop().create_task(send())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _serves(self) -> bool:
        """Return True if the engine would take a call; update its version."""
        try:
            if not self.paused:
                # SGLang samples a token for this, which it cannot do while it is paused.
                await self._control.request("GET", "/health", limit=_HEALTH_TIMEOUT)
                with suppress(EngineBusy):  # its own description was right
                    await self.require_model()
                return self._version != HALF_LOADED
            await self.info()
        except EngineUnavailable:
            return False
        except ConfigError as error:
            if error.message != self._logged:
                self._logged = error.message
                log.error("%s", error.message)
            return False
        return True


def _read_reply(reader: ChunkReader, raw: bytes) -> GenerationChunk:
    return reader.read(orjson.loads(raw))


def _remaining_request(request: ModelRequest, done: array[int], attempt: int) -> ModelRequest:
    """Return the request for the output after the tokens ``done``, under a new rid.

    SGLang aborts every request whose rid begins with a given one, so no rid may be the beginning of
    another's, of an attempt or of a request.
    """
    left = request.gconfig.max_new_tokens - len(done)
    ids = request.input_ids
    if isinstance(ids, list):
        ids = ids + done.tolist()
    elif done:
        ids = np.concatenate([ids, np.asarray(done, dtype=ids.dtype)])
    return replace(
        request,
        rid=f"{attempt}-{request.rid};",
        input_ids=ids,
        gconfig=request.gconfig.new(max_new_tokens=left),
    )


def _is_silence(error: Exception) -> bool:
    """Return True if an accepted request got no byte for too long; the engine may still run it."""
    return isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
