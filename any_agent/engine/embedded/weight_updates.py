"""Weights that a trainer sends while the engine runs: SGLang's routes over the embedded engine.

As in SGLang a trainer opens a session, sends buckets, and closes it. This engine only stages the
buckets and uses them at the end, all or none: if the trainer dies half-way, the old weights are
still complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
import torch
from aiohttp import web
from torch import Tensor

from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.engine.embedded.generate_schema import json_object
from any_agent.engine.embedded.weight_loading import fit_weights
from any_agent.engine.weight_process_group import WeightGroup
from any_agent.engine.weight_serialization import dtype_of, unpack
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    EngineUnavailable,
    InvalidRequest,
)
from any_agent.runtime.bounded_server import read_body

T = TypeVar("T")
Body = dict[str, Any]

_MAX_BODY = 8 * 2**30  # bytes of one body with weights
ADAPTER_PREFIX = "/adapters/{adapter}"
"""The path before the routes of one live adapter."""
BODY_TIMEOUT = 1500.0  # seconds, the longest `engine.load_timeout`
_GROUP_TIMEOUT = 600.0  # seconds that an operation waits for a member of a group


class WeightRoutes:
    """The sessions, groups and routes of one engine; its event loop calls them.

    An adapter has the routes of :data:`_ANY_ENGINE` alone.
    """

    def __init__(
        self, engine: EmbeddedEngine, engine_of: Callable[[web.Request], EmbeddedEngine]
    ) -> None:
        """``engine_of`` returns the engine, or the adapter of it, that a request's path names."""
        self._engine = engine
        self._engine_of = engine_of
        self._groups: dict[str, WeightGroup] = {}
        self._staged: dict[str, Tensor] | None = None
        self._version: str | None = None
        self._abort_all = False
        self._lock = asyncio.Lock()

    def add_to(self, app: web.Application) -> None:
        """Register the routes; the engine leaves all groups when the server ends."""
        routes: dict[str, Callable[[Body], Awaitable[Body | None]]] = {
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": self._receive_from_group,
            "/update_weights_from_tensor": self._receive_from_body,
            "/end_weight_update": self._end,
        }
        for path, work in routes.items():
            app.router.add_post(path, _handler(work))
        for path, of_engine in _ANY_ENGINE.items():
            for prefix in ("", ADAPTER_PREFIX):
                app.router.add_post(prefix + path, _handler(of_engine, self._engine_of))
        app.on_cleanup.append(self._close)

    async def _close(self, app: web.Application | None = None) -> None:
        while self._groups:
            self._groups.popitem()[1].close()

    async def _join(self, body: Body) -> None:
        """Join a group, and return once it is complete; EngineUnavailable if it fails."""
        name, host = _text(body, "group_name"), _text(body, "master_address")
        port, rank = _value(body, "master_port", int), _value(body, "rank_offset", int)
        size, backend = _value(body, "world_size", int), _text(body, "backend")
        if name in self._groups:
            raise Conflict(f"this engine is already in the group {name!r}")
        if backend not in ("gloo", "nccl"):
            raise InvalidRequest(f"backend must be gloo or nccl, not {backend!r}", param="backend")
        if not 0 < rank < size:
            raise InvalidRequest(f"rank_offset must be 1 to {size - 1}", param="rank_offset")
        if backend == "nccl" and self._engine.loaded.device.type != "cuda":
            raise InvalidRequest("this engine has no GPU: use gloo", param="backend")
        # There is one trainer: any other group is left over from one that died or dropped it.
        await self._close()
        try:
            self._groups[name] = await asyncio.to_thread(
                WeightGroup.join,
                host,
                port,
                rank=rank,
                size=size,
                name=name,
                backend="nccl" if backend == "nccl" else "gloo",
                timeout=_GROUP_TIMEOUT,
            )
        except RuntimeError as error:
            raise EngineUnavailable(f"cannot join the group {name!r}: {error}") from error

    async def _leave(self, body: Body) -> None:
        """Leave a group; an operation that waits in it fails at once."""
        name = _text(body, "group_name")
        self._group(name).close()
        del self._groups[name]

    async def _begin(self, body: Body) -> None:
        """Open a session; Conflict while one is open."""
        if self._staged is not None:
            raise Conflict(
                "a weight-update session is already open; call end_weight_update() first"
            )
        self._staged, self._version, self._abort_all = {}, None, False

    async def _receive_from_group(self, body: Body) -> None:
        """Stage the next bucket, as described, from rank 0 of a group."""
        if body.get("load_format") is not None:
            raise InvalidRequest(
                "tensors are received one by one: load_format must be left out", param="load_format"
            )
        group = _text(body, "group_name")
        names = _list(body, "names", lambda v: type(v) is str)
        dtypes = _list(body, "dtypes", lambda v: type(v) is str)
        shapes = _list(body, "shapes", _is_shape)
        session, member = self._session(), self._group(group)
        if not len(names) == len(dtypes) == len(shapes):
            raise InvalidRequest("names, dtypes and shapes must have equal lengths")
        device = self._engine.loaded.device if member.backend == "nccl" else torch.device("cpu")
        try:
            tensors = [
                torch.empty(shape, dtype=dtype_of(dtype), device=device)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            async with self._lock:
                await asyncio.to_thread(member.broadcast, tensors)
        except (RuntimeError, TypeError) as error:
            self._groups.pop(group, None)
            member.close()
            raise EngineUnavailable(f"no weights came over {group!r}: {error}") from error
        self._stage(body, session, dict(zip(names, tensors, strict=True)))

    async def _receive_from_body(self, body: Body) -> None:
        texts = _list(body, "serialized_named_tensors", lambda v: type(v) is str)
        if len(texts) != 1:
            raise InvalidRequest(
                "serialized_named_tensors must have one text", param="serialized_named_tensors"
            )
        how, session = _text(body, "load_format"), self._session()
        self._stage(body, session, await asyncio.to_thread(unpack, how, texts[0]))

    async def _end(self, body: Body) -> None:
        """Use the staged weights, and end the session in any case.

        Raises InvalidRequest, the old weights untouched, unless they are all of the model's.
        """
        staged, self._staged = self._session(), None
        weights = await asyncio.to_thread(fit_weights, self._engine.loaded.model, staged)
        await self._engine.apply_weights(weights, self._version, abort_all=self._abort_all)

    def _stage(self, body: Body, session: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        if session is not self._staged:
            raise Conflict("the session of these weights was closed before they arrived")
        session.update(tensors)
        version = _version(body)
        self._version = version if version is not None else self._version
        self._abort_all |= _aborts(body)

    def _session(self) -> dict[str, Tensor]:
        if self._staged is None:
            raise InvalidRequest(
                "weights come between begin_weight_update() and end_weight_update()"
            )
        return self._staged

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise InvalidRequest(f"there is no group {name!r}; call init_weights_update_group")
        return self._groups[name]


async def _load_from_disk(engine: EmbeddedEngine, body: Body) -> Body:
    kept = await engine.update_weights(
        _text(body, "model_path"), _version(body), abort_all=_aborts(body)
    )
    return {"message": "Succeeded to update model weights.", "num_paused_requests": kept}


async def _rename(engine: EmbeddedEngine, body: Body) -> Body:
    version = _text(body, "new_version")
    await engine.rename(version)
    return {"new_version": version}


async def _checksums(engine: EmbeddedEngine, body: Body) -> Body:
    if body.get("action", "checksum") != "checksum":
        raise InvalidRequest("the only action is checksum", param="action")
    sums = await engine.checksums()
    return {"ranks": [{"checksums": sums, "parallelism_info": {"tp_rank": 0, "tp_size": 1}}]}


_ANY_ENGINE: dict[str, Callable[[EmbeddedEngine, Body], Awaitable[Body]]] = {
    "/update_weights_from_disk": _load_from_disk,
    "/update_weight_version": _rename,
    "/weights_checker": _checksums,
}
"""The routes of an engine and of each of its adapters."""


def _handler(
    work: Callable[..., Awaitable[Body | None]],
    engine_of: Callable[[web.Request], EmbeddedEngine] | None = None,
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that replies like SGLang: ``success`` and ``message``, 400 for refusals.

    ``work`` gets the body, after the engine of the path if it wants that.
    """

    async def handle(http: web.Request) -> web.Response:
        status = 200
        reply: Body = {"success": True, "message": "Success"}
        try:
            body = json_object(await read_body(http, _MAX_BODY, BODY_TIMEOUT))
            engines = () if engine_of is None else (engine_of(http),)
            reply |= await work(*engines, body) or {}
        except AnyAgentError as error:
            status = 503 if isinstance(error, EngineUnavailable) else 400
            reply = {"success": False, "message": error.message, "num_paused_requests": 0}
        return web.Response(
            body=orjson.dumps(reply), status=status, content_type="application/json"
        )

    return handle


def _value(body: Body, name: str, kind: type[T]) -> T:
    value = body.get(name)
    if type(value) is not kind:
        raise InvalidRequest(f"{name} must be of type {kind.__name__}", param=name)
    return value


def _text(body: Body, name: str) -> str:
    value = _value(body, name, str)
    if not value:
        raise InvalidRequest(f"{name} must not be empty", param=name)
    return value


def _list(body: Body, name: str, is_valid: Callable[[Any], bool]) -> list[Any]:
    values: list[Any] = _value(body, name, list)
    if not all(map(is_valid, values)):
        raise InvalidRequest(f"{name} has a value of a wrong type", param=name)
    return values


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _version(body: Body) -> str | None:
    version = body.get("weight_version")
    if version is not None and type(version) not in (str, int):
        raise InvalidRequest("weight_version must be a string", param="weight_version")
    return None if version is None else str(version)


def _aborts(body: Body) -> bool:
    return body.get("abort_all_requests") is True
