"""The body of a client's request, bounded in size and in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qsl, urlencode

import orjson
from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11
from multidict import CIMultiDict

from any_agent.config.serving import ServerConfig
from any_agent.errors import AnyAgentError, InvalidRequest, PayloadTooLarge
from any_agent.runtime.content_coding import BodyDecoder
from any_agent.runtime.request_limits import BodyTimeout, Reservation

MAX_SHORT_BYTES = 65_536
"""Size up to which bodies are read whole; longer ones, and those of unknown length, stream."""

_MAX_FIELDS = 2048  # fields of a query; the ranks have the same limit


class RequestBody:
    """A request's body; PayloadTooLarge if its stated length exceeds `server.max_body_bytes`."""

    def __init__(
        self, request: web.BaseRequest, server: ServerConfig, reservation: Reservation
    ) -> None:
        """The reservation counts the bytes that are read as a whole."""
        self._request = request
        self._content = request.content
        self._limit = limit = server.max_body_bytes
        self._server = server
        self._reservation = reservation
        length = request.content_length
        if length is not None and length > limit:
            raise self._too_large(limit)
        self.short = length is not None and length <= MAX_SHORT_BYTES
        """The body is known to be short or empty."""
        self.error: AnyAgentError | None = None
        """The reason that the stream broke off, if it did."""

    async def read(self, limit: int | None = None) -> bytes:
        """Return the whole body, decoded; PayloadTooLarge above the limit.

        UnsupportedEncoding for a coding that is not taken, InvalidRequest for what is not in it.
        """
        limit = min(limit or self._limit, self._limit)
        decoder = BodyDecoder(self._request.headers.getall(hdrs.CONTENT_ENCODING, ()))
        content = await self.read_encoded(limit)
        return content if decoder.plain else await self._decoded(content, decoder, limit)

    async def read_encoded(self, limit: int | None = None) -> bytes:
        """Return the whole body as it came; PayloadTooLarge above the limit."""
        limit = min(limit or self._limit, self._limit)
        if (self._request.content_length or 0) > limit:
            raise self._too_large(limit)
        if self._content.is_eof():
            # The body arrived together with the head, as most do.
            content = self._content.read_nowait()
            if len(content) > limit:
                raise self._too_large(limit)
            self._reservation.add(len(content))
            return content
        parts: list[bytes] = []
        async for part in self._parts(limit):
            self._reservation.add(len(part))
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _decoded(self, content: bytes, decoder: BodyDecoder, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        for piece in decoder.pieces(content):
            size += len(piece)
            if size > limit:
                raise self._too_large(limit)
            self._reservation.add(len(piece))
            parts.append(piece)
            # Others have their turn between two pieces.
            await asyncio.sleep(0)
        decoder.finish()
        return b"".join(parts)

    async def to_send(
        self, headers: CIMultiDict[str], content: bytes | None = None
    ) -> bytes | None:
        """Return what to send on of a short or an empty body; None for one that is streamed.

        ``content``: the body, if it was read and decoded already; ``headers`` then become its own.
        """
        if content is not None:
            headers[hdrs.CONTENT_LENGTH] = str(len(content))
            headers.popall(hdrs.CONTENT_ENCODING, None)
            return content
        if not self._request.body_exists:
            return b""
        return await self.read_encoded() if self.short else None

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the body's parts as they came."""
        try:
            async for part in self._parts(self._limit):
                yield part
        except AnyAgentError as error:
            self.error = error
            raise

    async def _parts(self, limit: int) -> AsyncIterator[bytes]:
        await self._continue()
        size, server = 0, self._server
        timeout = BodyTimeout(part=server.client_timeout, whole=server.body_timeout)
        while part := await timeout.within(self._content.readany()):
            size += len(part)
            if size > limit:
                raise self._too_large(limit)
            yield part

    async def _continue(self) -> None:
        """Tell a client that waits for `100 Continue` to send the body."""
        request = self._request
        if (
            request.headers.get(hdrs.EXPECT, "").lower() == "100-continue"
            and request.version >= HttpVersion11
        ):
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            # This counts as no part of the answer.
            request.writer.output_size = 0

    def _too_large(self, limit: int) -> PayloadTooLarge:
        where = " (server.max_body_bytes)" if limit == self._limit else ""
        return PayloadTooLarge(f"the body exceeds {limit} bytes{where}; send a shorter one")


class BodyFields:
    """The fields of a `/rl` request, each in its body or its query.

    A rank refuses a field that differs between them. InvalidRequest for a query with too many.
    """

    def __init__(self, request: web.BaseRequest, content: bytes) -> None:
        self.content = content
        self.body = json_object(content)
        """The body's JSON object; None for a body that is something else."""
        self._path, _, query = request.raw_path.partition("?")
        try:
            self._query = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        except ValueError:
            raise InvalidRequest(
                f"the query has more than {_MAX_FIELDS} fields; send fewer"
            ) from None

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value in the body, else its text in the query."""
        if self.body is None:
            return default
        value = self.body.get(name)
        if value is None:
            value = next(iter(self._texts(name)), None)
        return default if value is None else value

    def text(self, name: str) -> str | None:
        """Return a field that is a non-empty text; None for any other."""
        value = self.get(name)
        return value if isinstance(value, str) and value else None

    def items(self, name: str) -> Any:
        """Return a list, which a query writes as JSON or as one field for each item."""
        if self.body is None or self.body.get(name) is not None:
            return self.body and self.body[name]
        texts = self._texts(name)
        if len(texts) == 1 and texts[0].lstrip().startswith("["):
            return json_value(texts[0])
        return texts or None

    def changed(self, **changes: Any) -> tuple[bytes, str]:
        """Return the body and the target of the same request with other values of some fields.

        InvalidRequest where body and query differ in one of them: no rank would notice.
        """
        for name in changes:
            given = (self.body or {}).get(name)
            if given is not None and any(not _means(text, given) for text in self._texts(name)):
                message = f"{name} differs between body and query; send it in one of them"
                raise InvalidRequest(message, param=name)
        rest = [(key, text) for key, text in self._query if key not in changes]
        target = f"{self._path}?{urlencode(rest)}" if rest else self._path
        return dumped({**(self.body or {}), **changes}), target

    def _texts(self, name: str) -> list[str]:
        return [text for key, text in self._query if key == name]


def _means(text: str, value: Any) -> bool:
    """Return whether a text in a query stands for a value of a body."""
    if isinstance(value, str):
        return text == value
    if isinstance(value, list):
        return text in value or json_value(text) == value
    return bool(seconds(text) == value)


def json_value(text: str | bytes) -> Any:
    """Return a text read as JSON; None if it is not JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def json_object(content: bytes) -> dict[str, Any] | None:
    """Return a body's JSON object, empty for no body; None for anything else."""
    data = json_value(content) if content else {}
    return data if isinstance(data, dict) else None


def dumped(fields: dict[str, Any]) -> bytes:
    """Return a body as JSON; InvalidRequest if it is nested too deep to be written."""
    try:
        return orjson.dumps(fields)
    except TypeError:
        raise InvalidRequest(
            "the body is nested too deep; send a flatter one", code="too_deep"
        ) from None


def seconds(value: Any) -> float | None:
    """Return a field's number of seconds, 0 without a value; None if it is not a valid number."""
    if value is None:
        return 0.0
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < float("inf") else None
