"""When a client counts as one that takes nothing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.http import StreamWriter

from router.client_response import ClientResponder


class Transport:
    """``sizes``: what waits to be taken, each time that somebody looks; then the last for good."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self.looks = 0
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        size = self._sizes[min(self.looks, len(self._sizes) - 1)]
        self.looks += 1
        return size

    def abort(self) -> None:
        self.aborted.set()


class Request:
    def __init__(self, transport: Transport | None) -> None:
        self.transport = transport


class Writer:
    """Drained when its transport is aborted, or when told so."""

    def __init__(self, drained: asyncio.Event) -> None:
        self._drained = drained

    async def drain(self) -> None:
        async with asyncio.timeout(60):
            await self._drained.wait()


async def wait_for_client(replies: ClientResponder, transport: Any, drained: asyncio.Event) -> None:
    request = cast(web.BaseRequest, Request(transport))
    await replies.drain(request, cast(StreamWriter, Writer(drained)))


@pytest.mark.parametrize(
    ("sizes", "looks"), [([100], 2), ([100, 90, 80, 80], 4), ([100, 99, 1, 1], 4)]
)
async def test_cut_once_nothing_is_taken(sizes: list[int], looks: int) -> None:
    replies, transport = ClientResponder(timeout=0.01), Transport(sizes)
    await wait_for_client(replies, transport, transport.aborted)
    assert transport.looks == looks
    assert replies.cut == 1


async def test_a_client_that_has_left_is_not_waited_for() -> None:
    await wait_for_client(ClientResponder(timeout=60), None, asyncio.Event())
