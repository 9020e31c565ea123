"""Parses request bodies to JSON of a size and a depth that every later step can handle."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import orjson

from any_agent.errors import InvalidRequest, PayloadTooLarge

MAX_DEPTH = 64
MAX_VALUES = 500_000  # values of a body: parsing them stops everything else for a fifth of a second
_LONG = 1 << 20
_PARSERS_DEPTH = "depth limit exceeded"  # orjson's message for more than 1024 levels


async def json_of(body: bytes) -> Any:
    """Return the body's JSON; InvalidRequest for anything else (NaN and Infinity are not JSON).

    PayloadTooLarge for so many values that reading them would stop every stream.
    """
    if len(body) > MAX_VALUES:
        await asyncio.to_thread(_require_few_values, body)
    try:
        data = _loaded(body)
    except orjson.JSONDecodeError as error:
        if error.msg == _PARSERS_DEPTH:
            raise _too_deep() from None
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if len(body) > _LONG:
        # The most values possible take a second: too long for the event loop.
        deep = await asyncio.to_thread(is_deeper, data, MAX_DEPTH)
    else:
        deep = is_deeper(data, MAX_DEPTH)
    if deep:
        raise _too_deep()
    return data


def _loaded(body: bytes) -> Any:
    if len(body) <= _LONG or not gc.isenabled():
        return orjson.loads(body)
    # The collector would visit the values again and again: that takes three times as long.
    gc.disable()
    try:
        return orjson.loads(body)
    finally:
        gc.enable()


def _require_few_values(body: bytes) -> None:
    """Raise PayloadTooLarge for too many values; commas in strings count as well."""
    data = np.frombuffer(body, np.uint8)
    if sum(int(np.count_nonzero(data == sign)) for sign in b",[{") > MAX_VALUES:
        raise PayloadTooLarge(
            f"the body has more than {MAX_VALUES} values (commas and brackets are counted); "
            "send less at once",
            code="too_many_values",
        )


def is_deeper(data: Any, limit: int) -> bool:
    """Return True for JSON whose objects and lists are nested deeper than so many levels."""
    level = [data]
    for _ in range(limit):
        below: list[Any] = []
        for item in level:
            below += item.values() if type(item) is dict else item if type(item) is list else ()
        # orjson makes no other containers; this loop sees every call's whole conversation.
        level = [item for item in below if type(item) is dict or type(item) is list]
        if not level:
            return False
    return True


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels", code="too_deep")
