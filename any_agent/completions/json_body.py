"""A request's body: bytes to JSON that everything behind it can carry."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import orjson

from any_agent.errors import InvalidRequest, PayloadTooLarge

MAX_DEPTH = 64
MAX_VALUES = 500_000
"""Of a body; a fifth of a second, for as long as nothing else runs."""
_LONG = 1 << 20
_PARSERS_DEPTH = "depth limit exceeded"
"""What orjson says of more than 1024 levels."""


async def json_of(body: bytes) -> Any:
    """The body as JSON; InvalidRequest when it is none (NaN and Infinity are none).

    PayloadTooLarge for more values than can be read without stopping every stream meanwhile.
    """
    if len(body) > MAX_VALUES:
        await asyncio.to_thread(_require_few_values, body)
    try:
        data = _loaded(body)
    except orjson.JSONDecodeError as error:
        if error.msg == _PARSERS_DEPTH:
            raise _too_deep(MAX_DEPTH) from None
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if len(body) > _LONG:
        # A second for as many values as there can be: not on the event loop.
        await asyncio.to_thread(require_shallow, data)
    else:
        require_shallow(data)
    return data


def _loaded(body: bytes) -> Any:
    if len(body) <= _LONG or not gc.isenabled():
        return orjson.loads(body)
    # The collector would walk the values that are there again and again: three times as long.
    gc.disable()
    try:
        return orjson.loads(body)
    finally:
        gc.enable()


def _require_few_values(body: bytes) -> None:
    """PayloadTooLarge if there may be too many; a comma in a text counts, too."""
    data = np.frombuffer(body, np.uint8)
    if sum(int(np.count_nonzero(data == sign)) for sign in b",[{") > MAX_VALUES:
        raise PayloadTooLarge(
            f"the body has more than {MAX_VALUES} values (commas and brackets are counted); "
            "send less at once",
            code="too_many_values",
        )


def require_shallow(data: Any, limit: int = MAX_DEPTH) -> None:
    """InvalidRequest for JSON that is nested deeper than everything behind us can carry."""
    level = [data]
    for _ in range(limit):
        below: list[Any] = []
        for item in level:
            below += item.values() if type(item) is dict else item if type(item) is list else ()
        # orjson makes no others; each call's whole conversation comes through here.
        level = [item for item in below if type(item) is dict or type(item) is list]
        if not level:
            return
    raise _too_deep(limit)


def _too_deep(limit: int) -> InvalidRequest:
    return InvalidRequest(f"the body is nested deeper than {limit} levels", code="too_deep")
