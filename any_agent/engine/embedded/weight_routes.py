"""SGLang's routes for weights that a trainer sends, over the embedded engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from aiohttp import web

from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.engine.embedded.generate_schema import json_object
from any_agent.engine.embedded.weight_updates import WeightUpdater
from any_agent.errors import AnyAgentError, EngineUnavailable, InvalidRequest, PayloadTooLarge

T = TypeVar("T")
Body = dict[str, Any]

_MAX_BUCKET = 8 * 2**30
"""Bytes of one body with weights."""


class WeightRoutes:
    """One instance per engine; `close` it with the server."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self.updates = WeightUpdater(engine)

    def add_to(self, app: web.Application) -> None:
        """Register the routes; leaves all groups when the server ends."""
        routes: dict[str, Callable[[Body], Awaitable[Body | None]]] = {
            "/update_weights_from_disk": self._from_disk,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": self._from_distributed,
            "/update_weights_from_tensor": self._from_tensor,
            "/end_weight_update": self._end,
            "/update_weight_version": self._rename,
            "/weights_checker": self._check,
        }
        for path, work in routes.items():
            app.router.add_post(path, _answering(work))
        app.on_cleanup.append(self._close)

    async def _close(self, app: web.Application) -> None:
        self.updates.close()

    async def _from_disk(self, body: Body) -> Body:
        kept = await self._engine.update_weights(
            _text(body, "model_path"), _version(body), abort_all=_aborts(body)
        )
        return {"message": "Succeeded to update model weights.", "num_paused_requests": kept}

    async def _join(self, body: Body) -> None:
        await self.updates.join(
            _text(body, "group_name"),
            _text(body, "master_address"),
            _value(body, "master_port", int),
            rank=_value(body, "rank_offset", int),
            size=_value(body, "world_size", int),
            backend=_text(body, "backend"),
        )

    async def _leave(self, body: Body) -> None:
        self.updates.leave(_text(body, "group_name"))

    async def _begin(self, body: Body) -> None:
        self.updates.begin()

    async def _from_distributed(self, body: Body) -> None:
        if body.get("load_format") is not None:
            raise InvalidRequest(
                "weights come tensor by tensor: no load_format", param="load_format"
            )
        await self.updates.receive(
            _text(body, "group_name"),
            _listed(body, "names", lambda v: type(v) is str),
            _listed(body, "dtypes", lambda v: type(v) is str),
            _listed(body, "shapes", _is_shape),
        )
        self.updates.name_version(_version(body), abort_all=_aborts(body))

    async def _from_tensor(self, body: Body) -> None:
        texts = _listed(body, "serialized_named_tensors", lambda v: type(v) is str)
        if len(texts) != 1:
            raise InvalidRequest(
                "there must be one text of tensors", param="serialized_named_tensors"
            )
        await self.updates.take(_text(body, "load_format"), texts[0])
        self.updates.name_version(_version(body), abort_all=_aborts(body))

    async def _end(self, body: Body) -> None:
        await self.updates.end()

    async def _rename(self, body: Body) -> Body:
        version = _text(body, "new_version")
        await self._engine.rename(version)
        return {"new_version": version}

    async def _check(self, body: Body) -> Body:
        if body.get("action", "checksum") != "checksum":
            raise InvalidRequest("the only action is checksum", param="action")
        sums = await self.updates.checksums()
        return {"ranks": [{"checksums": sums, "parallelism_info": {"tp_rank": 0, "tp_size": 1}}]}


def _answering(
    work: Callable[[Body], Awaitable[Body | None]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """As SGLang answers: ``success`` and ``message``, 400 for what is refused."""

    async def handle(http: web.Request) -> web.Response:
        status = 200
        answer: Body = {"success": True, "message": "Success"}
        try:
            answer |= await work(json_object(await _read(http))) or {}
        except AnyAgentError as error:
            status = 503 if isinstance(error, EngineUnavailable) else 400
            answer = {"success": False, "message": error.message, "num_paused_requests": 0}
        return web.Response(
            body=orjson.dumps(answer), status=status, content_type="application/json"
        )

    return handle


async def _read(http: web.Request) -> bytes:
    """A body that may hold weights: longer than other bodies may be."""
    parts: list[bytes] = []
    size = 0
    async for part in http.content.iter_any():
        size += len(part)
        if size > _MAX_BUCKET:
            raise PayloadTooLarge(f"a body of weights may have {_MAX_BUCKET} bytes")
        parts.append(part)
    return b"".join(parts)


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


def _listed(body: Body, name: str, good: Callable[[Any], bool]) -> list[Any]:
    values: list[Any] = _value(body, name, list)
    if not all(map(good, values)):
        raise InvalidRequest(f"{name} holds what it cannot", param=name)
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
